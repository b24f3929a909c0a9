"""Bags: all cells of one group, or a sample of them, group by group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NotRequired

import numpy as np
from annbatch.abc import Sampler
from annbatch.types import LoadRequest

from ._rows import cover_unsorted, split_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["BagBatch", "BagRequest", "BagSampler", "read_requests"]

# Bags that are shuffled among each other, where as many are read at once. With fewer, two bags that lie side by side in
# the collection would come in one batch too often: of 64 and with 8 a batch, in 1 pass of 9.
_SHUFFLED_TOGETHER = 64


class BagRequest(LoadRequest):
    """A load request whose batches are whole bags, or which is a part of one batch.

    Attributes
    ----------
    bags
        Per batch, (n_bags,) int64: which bags it holds.
    offsets
        Per batch, (n_bags + 1,) int64: bag i is cells ``offsets[i]`` to ``offsets[i + 1]`` of the batch.
    part_of
        Only where a batch is too large for one request: the cells of the whole batch, of which the request's only
        split holds the next ones. `bags` and `offsets` are those of the whole batch.
    """

    bags: list[NDArray[np.int64]]
    offsets: list[NDArray[np.int64]]
    part_of: NotRequired[int]


class BagSampler(Sampler):
    """Draw bags: the cells of one group at a time, `bags_per_batch` bags a batch.

    Without `weights`, each bag comes once a pass, in random order; with them, `n_bags` bags are drawn with replacement.
    Which cells stand for a large bag, and their order, is drawn anew each pass. Where all cells of every bag are drawn
    and 64 bags or more fit into `window_cells`, two that lie side by side in the collection are read together: they
    come in one batch more often than others, in 1 pass of 9 with 8 bags a batch, and reading takes 7% less time.

    Parameters
    ----------
    codes
        (n_cells,) integers, the bag of each cell; -1 for cells of none.
    bags_per_batch
        Bags a batch; the last one may have fewer.
    max_cells
        Cells of a bag at the most; of a larger bag, a random subset without replacement. `None`: no limit.
    min_cells
        Cells that a bag should have, and `small_bags` says what happens to those with fewer.
    small_bags
        ``"keep"`` them as they are, ``"drop"`` them, or ``"resample"`` their cells with replacement up to `min_cells`,
        each cell at least once.
    exact_cells
        Every bag has just so many cells: `max_cells` and `min_cells` in one. Smaller bags are resampled, or dropped.
    weights
        (n_bags,) weight of each bag, to draw bags with replacement.
    n_bags
        Bags a pass, where `weights` are given. Default: as many as there are.
    shuffle
        Whether bags, and cells in them, come in random order. Subsets of cells are random in any case.
    window_cells
        Cells that are read at once: as many batches as fit. Bounds memory whatever the sizes of bags: a batch of more
        cells is read in parts, which a :class:`donorloader.BagLoader` puts together (annbatch's own loader yields each
        as a batch). The cells of a bag that is larger are shuffled within stretches of so many rows, and these among
        each other.
    rng
        Generator of the order; a loader replaces it by that of each epoch.

    Raises
    ------
    ValueError
        If a setting is impossible, or no bag is left.
    """

    _rng: np.random.Generator

    def __init__(
        self,
        codes: NDArray[Any],
        *,
        bags_per_batch: int = 8,
        max_cells: int | None = None,
        min_cells: int | None = None,
        small_bags: Literal["keep", "drop", "resample"] = "keep",
        exact_cells: int | None = None,
        weights: NDArray[Any] | None = None,
        n_bags: int | None = None,
        shuffle: bool = True,
        window_cells: int = 16_384,
        rng: np.random.Generator | None = None,
    ):
        if exact_cells is not None:
            if max_cells is not None or min_cells is not None:
                raise ValueError("exact_cells sets max_cells and min_cells both: leave these out.")
            max_cells = min_cells = exact_cells
            small_bags = "resample" if small_bags == "keep" else small_bags
        sizes = {"bags_per_batch": bags_per_batch, "window_cells": window_cells, "n_bags": n_bags}
        for name, value in (sizes | {"max_cells": max_cells, "min_cells": min_cells}).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
        if small_bags not in ("keep", "drop", "resample"):
            raise ValueError(f"small_bags must be 'keep', 'drop' or 'resample', got {small_bags!r}.")
        if min_cells is not None and max_cells is not None and min_cells > max_cells:
            raise ValueError(f"min_cells must not exceed max_cells, got {min_cells} and {max_cells}.")
        if min_cells is None and small_bags != "keep":
            raise ValueError(f"small_bags={small_bags!r} needs min_cells, which says what a small bag is.")
        if weights is None and n_bags is not None:
            raise ValueError("n_bags says how many bags to draw with replacement, so it needs weights.")
        self._bags_per_batch, self._window_cells, self._shuffle = bags_per_batch, window_cells, shuffle
        self._max_cells, self._min_cells, self._small_bags = max_cells, min_cells, small_bags
        self._rng = np.random.default_rng() if rng is None else rng
        self._n_obs = len(codes)
        self._rows, self._starts = _group(np.asarray(codes))
        self._sizes = np.diff(self._starts)
        eligible = self._sizes > 0
        if small_bags == "drop" and min_cells is not None:
            eligible &= self._sizes >= min_cells
        if not eligible.any():
            raise ValueError(f"No bag is left: the largest has {self._sizes.max(initial=0):,} cells, {min_cells=}.")
        self._eligible = np.flatnonzero(eligible)
        self._chances = None if weights is None else self._normalised(np.asarray(weights, dtype=np.float64))
        self._n_draws = self._eligible.size if n_bags is None else n_bags

    def _normalised(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        if weights.shape != self._sizes.shape:
            raise ValueError(f"weights needs one entry per bag, {self._sizes.size:,}, got shape {weights.shape}.")
        chosen = weights[self._eligible]
        if not np.isfinite(chosen).all() or (chosen < 0).any() or chosen.sum() <= 0:
            raise ValueError("weights must be finite, at least 0, and not all 0.")
        return chosen / chosen.sum()

    @property
    def batch_size(self) -> None:
        """`None`: batches are of bags, and differ in their number of cells."""

    @property
    def shuffle(self) -> bool:
        return self._shuffle

    @property
    def bags(self) -> NDArray[np.int64]:
        """Bags that can be drawn, ascending."""
        return self._eligible

    @property
    def n_draws(self) -> int:
        """Bags of a pass."""
        return self._n_draws

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a pass."""
        return -(-self._n_draws // self._bags_per_batch)

    def validate(self, n_obs: int) -> None:
        """Check that codes tell the bag of each of `n_obs` cells."""
        if n_obs != self._n_obs:
            raise ValueError(f"codes must tell the bag of each of the {n_obs:,} cells, but has {self._n_obs:,}.")

    def _sample(self, n_obs: int) -> Iterator[BagRequest]:
        window: list[BagBatch] = []
        cells = 0
        for batch in self._draw_batches():
            if window and cells + batch.rows.size > self._window_cells:
                yield _request(window)
                window, cells = [], 0
            if batch.rows.size > self._window_cells:
                yield from _parts(batch, self._window_cells)
                continue
            window.append(batch)
            cells += batch.rows.size
        if window:
            yield _request(window)

    def _draw_batches(self) -> Iterator[BagBatch]:
        bags = self._draw_bags()
        for start in range(0, bags.size, self._bags_per_batch):
            chosen = bags[start : start + self._bags_per_batch]
            rows = [self.draw_cells(bag, self._rng) for bag in chosen]
            yield BagBatch.of(chosen, rows)

    def _draw_bags(self) -> NDArray[np.int64]:
        if self._chances is not None:
            return self._rng.choice(self._eligible, size=self._n_draws, p=self._chances)
        if not self._shuffle:
            return self._eligible
        all_cells, drawn = self._sizes[self._eligible], self._drawn_sizes(self._eligible)
        sampled = (drawn < all_cells).any()  # then scattered cells are read
        if sampled or self._window_cells < _SHUFFLED_TOGETHER * drawn.mean():
            return self._rng.permutation(self._eligible)
        # Small bags share chunks with those beside them, which are decoded once for two that are read together: bags
        # are shuffled two by two, and then each among the next ones, which for the most part are read with it.
        first_rows = self._rows[self._starts[self._eligible]]
        bags = self._eligible[np.argsort(first_rows)]
        pairs = self._rng.permutation(-(-bags.size // 2))
        places = (2 * pairs[:, None] + np.arange(2)).ravel()
        bags = bags[places[places < bags.size]]
        stops = range(_SHUFFLED_TOGETHER, bags.size, _SHUFFLED_TOGETHER)
        return np.concatenate([self._rng.permutation(part) for part in np.split(bags, stops)])

    def _drawn_sizes(self, bags: Any) -> Any:
        """How many cells stand for each of some bags, or for one."""
        # not kept: attributes of a sampler are what a state says of its settings
        sizes = self._sizes[bags]
        if self._small_bags == "resample" and self._min_cells is not None:
            sizes = np.maximum(sizes, self._min_cells)
        return sizes if self._max_cells is None else np.minimum(sizes, self._max_cells)

    def draw_cells(self, bag: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """(n_cells,) rows of the cells that stand for a bag, in the order in which they come.

        Parameters
        ----------
        bag
            One of :attr:`bags`.
        rng
            Decides which, and in what order.
        """
        rows = self._rows[self._starts[bag] : self._starts[bag + 1]]
        wanted = int(self._drawn_sizes(bag))
        if wanted < rows.size:
            rows = rng.choice(rows, size=wanted, replace=False)
        if wanted > rows.size:
            rows = np.concatenate([rows, rng.choice(rows, size=wanted - rows.size)])
        if not self._shuffle:
            return np.sort(rows)
        if wanted <= self._window_cells:
            return rng.permutation(rows)
        # read in parts: each a stretch of rows that lie near each other, or every part would decode all chunks
        stretches = split_evenly(np.sort(rows), self._window_cells)
        return np.concatenate([rng.permutation(stretches[i]) for i in rng.permutation(len(stretches))])


def _group(codes: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows ordered by bag, and where each bag's begin; a bag may have runs in several places."""
    if codes.ndim != 1 or codes.dtype.kind not in "iu":
        raise TypeError(f"codes must be one integer per cell, got an array of {codes.dtype}, shape {codes.shape}.")
    order = np.argsort(codes, kind="stable")
    n_bags = int(codes.max()) + 1 if codes.size else 0
    return order, np.searchsorted(codes[order], np.arange(n_bags + 1))


class BagBatch(NamedTuple):
    """Bags of a batch, where each begins, and the (n_cells,) rows of all, bag after bag."""

    bags: NDArray[np.int64]
    offsets: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, bags: NDArray[np.int64], rows: Sequence[NDArray[np.int64]]) -> BagBatch:
        """A batch of some bags, given the rows of each."""
        return cls(bags, np.cumsum([0, *(part.size for part in rows)]), np.concatenate(rows))


def _request(window: Sequence[BagBatch]) -> BagRequest:
    """One read of several batches: each row once, in ascending order, however often and wherever it is wanted."""
    runs, position = cover_unsorted(np.concatenate([batch.rows for batch in window]))
    return {
        "requests": runs,
        "splits": np.split(position, np.cumsum([batch.rows.size for batch in window])[:-1]),
        "bags": [batch.bags for batch in window],
        "offsets": [batch.offsets for batch in window],
    }


def _parts(batch: BagBatch, size: int) -> Iterator[BagRequest]:
    """Several reads of one batch."""
    for request in read_requests(batch.rows, size):
        yield {**request, "bags": [batch.bags], "offsets": [batch.offsets], "part_of": batch.rows.size}


def read_requests(rows: NDArray[np.int64], size: int) -> Iterator[LoadRequest]:
    """Load requests of at most `size` cells each that read given rows, in their order."""
    for part in split_evenly(rows, size):
        runs, position = cover_unsorted(part)
        yield {"requests": runs, "splits": [position]}
