"""Samplers as users write them, and annbatch's, made from one set of sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.abc import Sampler
from annbatch.samplers import ClassSampler, RandomSampler, SequentialSampler, WeightedClassSampler
from annbatch.utils import split_given_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest

    from _data import Cells

#: Samplers that visit each row once a pass.
ONCE = ("random", "sequential", "own_rows", "own_generator", "no_splits", "no_splits_shuffled")
#: Samplers that draw with replacement.
REPLACING = ("random_replacement", "class", "weighted", "own_draws")
KINDS = ONCE + REPLACING


class OwnRows(Sampler):
    """A user's sampler: asks for single rows, in windows, with the generator annbatch gives a place to."""

    def __init__(self, window: int, batch_size: int, *, drop_last: bool, rng: np.random.Generator) -> None:
        self.window, self._batch_size, self.drop_last = window, batch_size, drop_last
        self.rng = rng

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def shuffle(self) -> bool:
        return True

    def n_batches(self, n_obs: int) -> int:
        full, rest = divmod(n_obs, self.window)
        per_window = self.window // self._batch_size  # the window is a multiple of the batch
        if self.drop_last:
            return full * per_window + rest // self._batch_size
        return full * per_window + -(-rest // self._batch_size)

    def validate(self, n_obs: int) -> None:
        if n_obs < 1:
            raise ValueError("nothing to sample")

    def _generator(self) -> np.random.Generator:
        assert self.rng is not None
        return self.rng

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rng = self._generator()
        rows = rng.permutation(n_obs)
        for start in range(0, n_obs, self.window):
            part = rows[start : start + self.window]
            splits = split_given_size(rng.permutation(len(part)), self._batch_size)
            if self.drop_last:
                splits = [s for s in splits if len(s) == self._batch_size]
            if splits:
                yield {"requests": part, "splits": splits}


class OwnDraws(OwnRows):
    """The same, but it draws rows with replacement: a request may ask for a row twice."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rng = self._generator()
        for start in range(0, n_obs, self.window):
            size = min(self.window, n_obs - start)
            splits = split_given_size(np.arange(size), self._batch_size)
            if self.drop_last:
                splits = [s for s in splits if len(s) == self._batch_size]
            if splits:
                yield {"requests": rng.integers(0, n_obs, size), "splits": splits}


class OwnGenerator(OwnRows):
    """The same, but it keeps its generator where nobody knows of it."""

    def __init__(self, window: int, batch_size: int, *, drop_last: bool, rng: np.random.Generator) -> None:
        super().__init__(window, batch_size, drop_last=drop_last, rng=rng)
        self.dice = rng
        self._rng = None

    def _generator(self) -> np.random.Generator:
        return self.dice


class NoSplits(Sampler):
    """A user's sampler that leaves the batches of a request to annbatch."""

    def __init__(self, chunk_size: int, preload_nchunks: int, batch_size: int, *, shuffle: bool) -> None:
        self.chunk_size, self.preload_nchunks = chunk_size, preload_nchunks
        self._batch_size, self._shuffle = batch_size, shuffle

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def shuffle(self) -> bool:
        return self._shuffle

    def n_batches(self, n_obs: int) -> int:
        full, rest = divmod(n_obs, self.chunk_size * self.preload_nchunks)
        return full * (self.chunk_size * self.preload_nchunks // self._batch_size) + -(-rest // self._batch_size)

    def validate(self, n_obs: int) -> None:
        if n_obs < 1:
            raise ValueError("nothing to sample")

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        chunks = [slice(s, min(s + self.chunk_size, n_obs)) for s in range(0, n_obs, self.chunk_size)]
        for start in range(0, len(chunks), self.preload_nchunks):
            yield {"requests": chunks[start : start + self.preload_nchunks]}


def make_sampler(
    kind: str,
    cells: Cells,
    *,
    chunk_size: int,
    preload_nchunks: int,
    batch_size: int,
    drop_last: bool = False,
    seed: int = 0,
    rows: np.ndarray | None = None,
) -> Sampler:
    """A sampler of a kind in `KINDS`, over all cells or some rows of them.

    Class samplers take chunks of at most 20 cells, the shortest run of the column `run`.
    """
    rows = np.arange(cells.n_obs) if rows is None else rows
    n_obs = len(rows)
    sizes: dict[str, Any] = {
        "chunk_size": chunk_size,
        "preload_nchunks": preload_nchunks,
        "batch_size": batch_size,
    }
    rng = np.random.default_rng(seed)
    window = chunk_size * preload_nchunks
    match kind:
        case "random":
            return RandomSampler(**sizes, drop_last=drop_last, rng=rng)
        case "random_replacement":
            # with drop_last, annbatch 0.3.1 counts its last window wrongly and ends in an error of its own
            return RandomSampler(**sizes, rng=rng, replacement=True, num_samples=n_obs)
        case "sequential":
            return SequentialSampler(**sizes, drop_last=drop_last)
        case "class" | "weighted":
            classes = pd.Categorical(cells.obs["run"].iloc[rows])
            made = ClassSampler if kind == "class" else WeightedClassSampler
            return made(**sizes, drop_last=drop_last, rng=rng, classes=classes, num_samples=n_obs + 7)
        case "own_rows":
            return OwnRows(window, batch_size, drop_last=drop_last, rng=rng)
        case "own_draws":
            return OwnDraws(window, batch_size, drop_last=drop_last, rng=rng)
        case "own_generator":
            return OwnGenerator(window, batch_size, drop_last=drop_last, rng=rng)
        case "no_splits":
            return NoSplits(chunk_size, preload_nchunks, batch_size, shuffle=False)
        case "no_splits_shuffled":
            return NoSplits(chunk_size, preload_nchunks, batch_size, shuffle=True)
    raise ValueError(f"unknown kind {kind!r}")


def expected_length(kind: str, n_obs: int, batch_size: int, *, drop_last: bool) -> int:
    """Batches a pass yields."""
    total = n_obs + 7 if kind in ("class", "weighted") else n_obs
    drops = drop_last and kind not in ("no_splits", "no_splits_shuffled", "random_replacement")
    return total // batch_size if drops else -(-total // batch_size)
