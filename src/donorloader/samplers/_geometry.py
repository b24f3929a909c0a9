"""Chunk and window sizes that satisfy annbatch's divisibility rules."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

__all__ = ["WINDOW_CELLS", "Geometry", "choose_geometry"]

# annbatch reads a window of `preload_nchunks` chunks at once. 64 cells a chunk match the on-disk chunks that annbatch
# writes; 16,384 cells a window let one read serve 16 batches of 1,024 while its buffers stay near 100 MB.
_CHUNK = 64
WINDOW_CELLS = 16_384


class Geometry(NamedTuple):
    """How a pass is read: `preload_nchunks` runs of `chunk_size` cells a window, cut into batches."""

    chunk_size: int
    preload_nchunks: int


def choose_geometry(batch_size: int, chunk_size: int | None = None, preload_nchunks: int | None = None) -> Geometry:
    """Chunk size and chunks per window for a batch size.

    annbatch needs ``chunk_size * preload_nchunks`` to be a multiple of `batch_size`. What the user leaves open is
    chosen close to 64 cells a chunk and 16,384 cells a window.

    Parameters
    ----------
    batch_size
        Cells a batch.
    chunk_size, preload_nchunks
        The user's choice, or `None` for ours.

    Raises
    ------
    ValueError
        If a size is below 1, or the two given sizes do not make whole batches; the message proposes some that do.
    """
    for name, value in (("batch_size", batch_size), ("chunk_size", chunk_size), ("preload_nchunks", preload_nchunks)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    if chunk_size is not None and preload_nchunks is not None:
        if (chunk_size * preload_nchunks) % batch_size:
            proposal = Geometry(chunk_size, _chunks_for(batch_size, chunk_size, chunk_size * preload_nchunks))
            raise ValueError(
                "chunk_size * preload_nchunks must be a multiple of batch_size, but "
                f"{chunk_size} * {preload_nchunks} = {chunk_size * preload_nchunks} is not a multiple of {batch_size}. "
                f"Use preload_nchunks={proposal.preload_nchunks}, or leave both out."
            )
        return Geometry(chunk_size, preload_nchunks)
    if chunk_size is not None:
        return Geometry(chunk_size, _chunks_for(batch_size, chunk_size, WINDOW_CELLS))
    if preload_nchunks is not None:
        step = batch_size // math.gcd(batch_size, preload_nchunks)
        return Geometry(step * max(1, round(_CHUNK / step)), preload_nchunks)
    candidates = [Geometry(size, _chunks_for(batch_size, size, WINDOW_CELLS)) for size in range(16, 129)]
    return min(candidates, key=_distance)


def _chunks_for(batch_size: int, chunk_size: int, window: int) -> int:
    """Chunks a window, so that it holds whole batches and is as close to `window` cells as can be."""
    step = batch_size // math.gcd(batch_size, chunk_size)
    return step * max(1, round(window / (chunk_size * step)))


def _distance(geometry: Geometry) -> float:
    """How far sizes are from the preferred ones, in doublings; a window too large costs memory, so it counts more."""
    window = math.log2(geometry.chunk_size * geometry.preload_nchunks / WINDOW_CELLS)
    return 2 * abs(window) + abs(math.log2(geometry.chunk_size / _CHUNK))
