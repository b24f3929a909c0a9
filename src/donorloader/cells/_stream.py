"""The cell lane's work: batches of cells with the row of each, sparse as they are read, or dense."""

from __future__ import annotations

from collections import deque
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import scipy.sparse as sp

from donorloader._vectors import LARGE, address_of, copy_past_cache, finish_writes
from donorloader._zarr import local_pipeline

from ._parts import Parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool
    from donorloader.samplers import EpochSampler, RequestPlan

__all__ = ["CellBatch", "fill_dense", "stream_cells", "stream_dense", "to_dense"]


@dataclass(frozen=True)
class CellBatch:
    """Cells of one batch.

    Attributes
    ----------
    X
        (n_cells, n_genes) scipy CSR or numpy array; a torch tensor where annbatch preloads to the GPU.
    index
        (n_cells,) int64, the row of each cell, as the reader says it was read.
    """

    X: Any
    index: NDArray[np.int64]


def stream_cells(
    loader: Iterable[Mapping[str, Any]], sampler: EpochSampler, epoch: int, nodes: tuple[Any, ...], *, skip: int = 0
) -> Iterator[CellBatch]:
    """Batches of one epoch.

    Parameters
    ----------
    loader
        Yields the batches of `sampler`, as `CellSource.loader` makes it.
    sampler
        Armed with `epoch` on the thread that takes the first batch.
    epoch
        The epoch.
    nodes
        The zarr nodes that are read: local ones get the zarrs pipeline.
    skip
        Batches that were delivered before. Load requests that hold no other are not read.
    """
    plan: deque[RequestPlan] = deque()
    left, part_of, parts = 0, None, None
    for batch in _iterate(loader, sampler, epoch, nodes, plan, skip):
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


def stream_dense(batches: Iterator[CellBatch], pool: BufferPool) -> Iterator[CellBatch]:
    """Batches with X as dense float32, filled from CSR into recycled memory.

    Filling a batch of 1,024 × 20,000 takes less than a tenth of the time of torch's ``to_dense()`` on the CPU, most of
    which goes into fresh pages.
    """
    for batch in batches:
        dense = CellBatch(to_dense(batch.X, pool), batch.index)
        del batch  # its memory is used again for the next one
        yield dense
        del dense


def to_dense(X: Any, pool: BufferPool) -> NDArray[np.float32]:
    """A scipy CSR matrix or an array as a dense float32 array in recycled memory."""
    out: NDArray[np.float32] = pool.empty(X.shape, np.float32)
    if sp.issparse(X):
        fill_dense(X.data, X.indices, X.indptr, out)
    else:
        out[...] = X
    return out


def fill_dense(data: NDArray[Any], indices: NDArray[Any], indptr: NDArray[Any], out: NDArray[Any]) -> None:
    """Write rows of a CSR matrix, as many as it has, into a dense C-contiguous array of any type."""
    if out.nbytes < LARGE or not out.flags.c_contiguous:
        _fill(data, indices, indptr, out)
    else:
        row = np.zeros(out.shape[1], dtype=out.dtype)
        _fill_past_cache(data, indices, indptr, row, out)


@numba.njit(nogil=True, cache=True)
def _fill(data, indices, indptr, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    for i in range(out.shape[0]):
        out[i, :] = 0
        for k in range(indptr[i], indptr[i + 1]):
            out[i, indices[k]] += data[k]  # += as scipy does: a column may be stored twice


# Columns of a row that are filled and written at a time. So few that the processor fills the next ones while it waits
# for memory to take these.
_COLUMNS = 512

# What memory is written in. Unit: bytes.
_LINE = 64


@numba.njit(nogil=True, cache=True)
def _fill_past_cache(data, indices, indptr, row, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """As `_fill`, into a large array: parts of a row are made in `row`, which is zeros, and copied.

    All in one function: a call with arrays counts references to them, and waits for all writes to do so.
    """
    n, width = out.shape[1], out.itemsize
    for i in range(out.shape[0]):
        to, k, stop = address_of(out) + i * n * width, indptr[i], indptr[i + 1]
        # parts end where a line does, but for the last
        begin, end = 0, min(n, _COLUMNS - to % _LINE // width)
        while begin < n:
            first, size = k, np.uintp(end - begin)
            while k < stop:
                column = np.uintp(np.int64(indices[k]) - begin)  # one before this part becomes a large number
                if column >= size:
                    break
                row[column] += data[k]
                k += 1
            copy_past_cache(to + begin * width, address_of(row), (end - begin) * width)
            for j in range(first, k):
                row[np.uintp(np.int64(indices[j]) - begin)] = 0
            begin, end = end, min(n, end + _COLUMNS)
        if k < stop:  # its columns are in no order: all of it again, as one part
            for j in range(indptr[i], stop):
                row[indices[j]] += data[j]
            copy_past_cache(to, address_of(row), n * width)
            row[:] = 0
    finish_writes()


def _iterate(
    loader: Iterable[Mapping[str, Any]],
    sampler: EpochSampler,
    epoch: int,
    nodes: tuple[Any, ...],
    plan: deque[RequestPlan],
    skip: int,
) -> Iterator[Any]:
    sampler.arm(epoch, plan, skip=skip)
    with closing(iter(loader)) as batches:  # type: ignore[type-var]
        # the first read opens the arrays of sparse stores, and with it binds them to a codec pipeline
        with local_pipeline(*nodes) if nodes else nullcontext():
            first = next(batches, None)
        if first is not None:
            yield first
            del first
        yield from batches
