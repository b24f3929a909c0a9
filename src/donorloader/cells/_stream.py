"""The cell lane's work: batches of cells, read by annbatch, with the row and donor of each cell as it was read."""

from __future__ import annotations

from collections import deque
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import scipy.sparse as sp

from donorloader._zarr import local_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch import Loader
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool
    from donorloader.samplers import EpochSampler

__all__ = ["CellBatch", "CellWindow", "stream_cells", "stream_dense", "stream_windows"]


@dataclass(frozen=True)
class CellBatch:
    """Cells of one batch.

    Attributes
    ----------
    X
        (n_cells, n_genes) scipy CSR or numpy array; a torch tensor where annbatch preloads to the GPU.
    index
        (n_cells,) int64, the row of each cell, as annbatch says it was read.
    """

    X: Any
    index: NDArray[np.int64]


@dataclass(frozen=True)
class CellWindow:
    """Cells of one load request in the order of its batches, and the sizes of these."""

    X: Any
    index: NDArray[np.int64]
    sizes: list[int]


def stream_cells(
    loader: Loader[Any, Any], sampler: EpochSampler, epoch: int, nodes: tuple[Any, ...]
) -> Iterator[CellBatch]:
    """Batches of one epoch, as annbatch reads and splits them.

    Parameters
    ----------
    loader
        An annbatch loader whose sampler is `sampler`.
    sampler
        Armed with `epoch` on the thread that takes the first batch.
    epoch
        The epoch.
    nodes
        The zarr nodes that are read: local ones get the zarrs pipeline.
    """
    for batch in _iterate(loader, sampler, epoch, nodes, None):
        yield CellBatch(batch["X"], np.asarray(batch["index"], dtype=np.int64))


def stream_windows(
    loader: Loader[Any, Any], sampler: EpochSampler, epoch: int, nodes: tuple[Any, ...]
) -> Iterator[CellWindow]:
    """Load requests of one epoch, each as one piece; `sampler` must have been made with ``whole_windows=True``."""
    sizes: deque[list[int]] = deque()
    for window in _iterate(loader, sampler, epoch, nodes, sizes):
        yield CellWindow(window["X"], np.asarray(window["index"], dtype=np.int64), sizes.popleft())


def stream_dense(windows: Iterator[CellWindow], pool: BufferPool) -> Iterator[CellBatch]:
    """Batches with X as dense float32, filled from each window's CSR rows into recycled memory.

    Filling a batch of 1,024 × 20,000 takes a twentieth of the time of torch's ``to_dense()`` on the CPU, most of which
    goes into fresh pages.
    """
    for window in windows:
        start = 0
        for size in window.sizes:
            rows = slice(start, start + size)
            start += size
            yield CellBatch(to_dense(window.X, rows, pool), window.index[rows])
        del window  # let go of its memory while the next one is waited for


def to_dense(X: Any, rows: slice, pool: BufferPool) -> NDArray[np.float32]:
    """Contiguous rows of a matrix as a dense float32 array."""
    out: NDArray[np.float32] = pool.empty((rows.stop - rows.start, X.shape[1]), np.float32)
    if sp.issparse(X):
        _fill(X.data, X.indices, X.indptr, rows.start, out)
    else:
        out[...] = X[rows]
    return out


@numba.njit(nogil=True, cache=True)
def _fill(data, indices, indptr, first_row, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    for i in range(out.shape[0]):
        out[i, :] = 0
        for k in range(indptr[first_row + i], indptr[first_row + i + 1]):
            out[i, indices[k]] += data[k]  # += as scipy does: a column may be stored twice


def _iterate(
    loader: Loader[Any, Any],
    sampler: EpochSampler,
    epoch: int,
    nodes: tuple[Any, ...],
    sizes: deque[list[int]] | None,
) -> Iterator[Any]:
    sampler.arm(epoch, sizes)
    with closing(iter(loader)) as batches:  # type: ignore[type-var]
        # the first read opens the arrays of sparse stores, and with it binds them to a codec pipeline
        with local_pipeline(*nodes) if nodes else nullcontext():
            first = next(batches, None)
        if first is not None:
            yield first
            del first
        yield from batches
