"""Load requests as plain row numbers, complete and checked, whatever sampler made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from annbatch.abc import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

__all__ = ["complete_requests", "cover_rows", "cover_unsorted", "request_rows", "split_evenly"]

# Largest gaps to read across, tried in turn. A chunk is decoded whole for one row of it, so rows of one chunk are
# read in one piece, as long as no more than `_MAX_COVER` times the wanted rows are held.
_GAPS = (64, 16, 4)
_MAX_COVER = 4


def request_rows(requests: list[slice] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Row numbers of a load request, in request order."""
    if isinstance(requests, np.ndarray) and np.issubdtype(requests.dtype, np.integer):
        return requests.astype(np.int64, copy=False)
    if stepped := [run for run in cast("list[slice]", requests) if run.step not in (None, 1)]:
        raise ValueError(f"Load requests are of contiguous rows, but a sampler asks for {stepped[0]}.")
    runs = [np.arange(run.start, run.stop, dtype=np.int64) for run in cast("list[slice]", requests)]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def split_evenly(positions: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Cut positions into batches of `size`, the last one smaller where they do not divide."""
    return [positions[start : start + size] for start in range(0, len(positions), size)]


def complete_requests(sampler: Sampler, n_obs: int, rng: np.random.Generator) -> Iterator[LoadRequest]:
    """Load requests of one pass of a sampler, each with valid ``splits``.

    Parameters
    ----------
    sampler
        Any annbatch sampler. Its pass is consumed.
    n_obs
        Number of rows that it samples from.
    rng
        Generator for splits that the sampler leaves to its caller. annbatch draws these from numpy's global state,
        which no other thread could draw again.

    Raises
    ------
    ValueError
        If the sampler asks for a row outside of ``range(n_obs)``, or splits a request at a position that it lacks.
    """
    # `_sample` is what annbatch documents for subclasses to write; `sample` adds splits from the global generator.
    if type(sampler).sample is Sampler.sample:
        sampler.validate(n_obs)
        requests = sampler._sample(n_obs)
    else:
        requests = sampler.sample(n_obs)
    try:
        for request in requests:
            rows = request_rows(request["requests"])
            if rows.size and (rows.min() < 0 or rows.max() >= n_obs):
                wrong = rows[(rows < 0) | (rows >= n_obs)][0]
                raise ValueError(
                    f"A sampler may ask for rows 0 to {n_obs - 1}, but {type(sampler).__name__} asks for row {wrong}."
                )
            splits = request.get("splits")
            if splits is None:
                splits = _default_splits(sampler, rows.size, rng)
            for split in splits:
                if len(split) and (np.min(split) < 0 or np.max(split) >= rows.size):
                    raise ValueError(
                        f"Splits index the {rows.size} rows of their load request, but {type(sampler).__name__} "
                        f"gives position {int(np.max(split))}."
                    )
            # annbatch yields an empty batch for an empty split; nothing could be learnt from it
            yield {**request, "splits": [np.asarray(s) for s in splits if len(s)]}
    finally:
        if (close := getattr(requests, "close", None)) is not None:
            close()


def _default_splits(sampler: Sampler, n_rows: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    if sampler.batch_size is None or sampler.shuffle is None:
        raise ValueError(
            f"{type(sampler).__name__} yields load requests without `splits`, so it needs `batch_size` and `shuffle`."
        )
    positions = rng.permutation(n_rows) if sampler.shuffle else np.arange(n_rows)
    return split_evenly(positions, sampler.batch_size)


def cover_rows(rows: NDArray[np.int64], *, bridge: bool = True) -> tuple[list[slice], NDArray[np.int64]]:
    """Contiguous runs that contain all rows, and the position of each row in their concatenation.

    Rows are read fastest in ascending order; a run begins anew wherever they descend. Without `bridge`, it holds no
    rows but these.
    """
    steps = np.diff(rows)
    for gap in _GAPS if bridge else ():
        bridged = (steps > 1) & (steps <= gap)
        if rows.size + int((steps[bridged] - 1).sum()) <= _MAX_COVER * rows.size:
            break
    else:
        gap = 1
    first = np.concatenate([[0], np.flatnonzero((steps < 1) | (steps > gap)) + 1])
    last = np.concatenate([first[1:] - 1, [rows.size - 1]])
    starts, stops = rows[first], rows[last] + 1
    offsets = np.cumsum(stops - starts) - (stops - starts)
    run = np.repeat(np.arange(first.size), last - first + 1)
    position = offsets[run] + rows - starts[run]
    return [slice(int(a), int(b)) for a, b in zip(starts, stops, strict=True)], position


def cover_unsorted(rows: NDArray[np.int64], *, bridge: bool = True) -> tuple[list[slice], NDArray[np.int64]]:
    """Contiguous runs, ascending, that contain rows in any order, each once; and where in them each row is."""
    distinct, place = np.unique(rows, return_inverse=True)
    runs, position = cover_rows(distinct, bridge=bridge)
    return runs, position[place]
