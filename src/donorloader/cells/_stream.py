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

from ._parts import Parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch import Loader
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool
    from donorloader.samplers import EpochSampler, RequestPlan

__all__ = ["CellBatch", "CellWindow", "fill_dense", "stream_cells", "stream_dense", "stream_windows"]


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
    """Cells of one load request in the order of its batches, and what these are."""

    X: Any
    index: NDArray[np.int64]
    plan: RequestPlan


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
    plan: deque[RequestPlan] = deque()
    left, part_of, parts = 0, None, None
    for batch in _iterate(loader, sampler, epoch, nodes, plan):
        if not left:
            sizes, part_of = plan.popleft()
            left = len(sizes)
        left -= 1
        X, index = batch["X"], np.asarray(batch["index"], dtype=np.int64)
        if part_of is None:
            yield CellBatch(X, index)
            del batch, X  # not held while the next one is read
            continue
        parts = parts or Parts(part_of)
        parts.add(X, index)
        del batch, X
        if not parts.missing:
            whole, parts = CellBatch(*parts.whole()), None
            yield whole
            del whole


def stream_windows(
    loader: Loader[Any, Any], sampler: EpochSampler, epoch: int, nodes: tuple[Any, ...]
) -> Iterator[CellWindow]:
    """Load requests of one epoch, each as one piece; `sampler` must have been made with ``whole_windows=True``."""
    plan: deque[RequestPlan] = deque()
    for window in _iterate(loader, sampler, epoch, nodes, plan):
        yield CellWindow(window["X"], np.asarray(window["index"], dtype=np.int64), plan.popleft())
        del window


def stream_dense(windows: Iterator[CellWindow], pool: BufferPool) -> Iterator[CellBatch]:
    """Batches with X as dense float32, filled from each window's CSR rows into recycled memory.

    Filling a batch of 1,024 × 20,000 takes a twentieth of the time of torch's ``to_dense()`` on the CPU, most of which
    goes into fresh pages.
    """
    whole: NDArray[np.float32] | None = None  # a batch that comes in several windows
    parts: list[NDArray[np.int64]] = []
    for window in windows:
        sizes, part_of = window.plan
        if part_of is not None:
            if whole is None:
                whole = pool.empty((part_of, window.X.shape[1]), np.float32)
            start = sum(part.size for part in parts)
            _fill(window.X, slice(0, sizes[0]), whole[start : start + sizes[0]])
            parts.append(window.index)
            del window
            if start + sizes[0] == part_of:
                batch = CellBatch(whole, np.concatenate(parts))
                whole, parts = None, []
                yield batch
                del batch
            continue
        start = 0
        for size in sizes:
            rows = slice(start, start + size)
            start += size
            out = pool.empty((size, window.X.shape[1]), np.float32)
            _fill(window.X, rows, out)
            yield CellBatch(out, window.index[rows])
            del out
        del window  # let go of its memory while the next one is waited for


def _fill(X: Any, rows: slice, out: NDArray[np.float32]) -> None:
    if sp.issparse(X):
        fill_dense(X.data, X.indices, X.indptr, rows.start, out)
    else:
        out[...] = X[rows]


@numba.njit(nogil=True, cache=True)
def fill_dense(data, indices, indptr, first_row, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Write rows of a CSR matrix, from `first_row` on, into a dense array of as many rows."""
    for i in range(out.shape[0]):
        out[i, :] = 0
        for k in range(indptr[first_row + i], indptr[first_row + i + 1]):
            out[i, indices[k]] += data[k]  # += as scipy does: a column may be stored twice


def _iterate(
    loader: Loader[Any, Any],
    sampler: EpochSampler,
    epoch: int,
    nodes: tuple[Any, ...],
    plan: deque[RequestPlan],
) -> Iterator[Any]:
    sampler.arm(epoch, plan)
    with closing(iter(loader)) as batches:  # type: ignore[type-var]
        # the first read opens the arrays of sparse stores, and with it binds them to a codec pipeline
        with local_pipeline(*nodes) if nodes else nullcontext():
            first = next(batches, None)
        if first is not None:
            yield first
            del first
        yield from batches
