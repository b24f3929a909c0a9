"""Sparse cells from local disk, on all cores: chunks are decoded, each cell copied once, to where its batch has it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from donorloader._cores import usable_cores
from donorloader.samplers import request_rows

from ._place import Placing, compile_for
from ._shards import ShardedArray, ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import anndata as ad
    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool

    from ._place import Group

__all__ = ["CsrReader", "StoredCsr"]

# Python's lock, which each thread needs between two groups of chunks, keeps more of them from being of use.
_MOST_THREADS = 8

# Of the processor's caches. Unit: bytes.
_LINE = 64

# That numbers of 32 bits can count.
_MOST_VALUES = 2**31 - 1


@dataclass(frozen=True)
class StoredCsr:
    """One CSR matrix on local disk.

    Attributes
    ----------
    data
        (nnz,) stored values.
    indices
        (nnz,) their columns.
    indptr
        (n_cells + 1,) where rows begin, in memory.
    """

    data: ShardedArray
    indices: ShardedArray
    indptr: NDArray[np.int64]

    @classmethod
    def open(cls, X: ad.abc.CSRDataset, name: str) -> StoredCsr | None:
        """Open a matrix, called `name` in messages, or return `None` where annbatch has to read it.

        Raises
        ------
        ValueError
            If rows cannot lie where indptr says.
        """
        group: Any = X.group  # type: ignore[attr-defined] # its abstract class does not declare it
        data, indices = ShardedArray.open(group["data"]), ShardedArray.open(group["indices"])
        if data is None or indices is None or indices.dtype.kind not in "iu":
            return None
        indptr = np.asarray(group["indptr"][:]).astype(np.int64)
        if indptr.shape != (X.shape[0] + 1,):
            raise ValueError(
                f"X of {name} is damaged: indptr must have a value more than its {X.shape[0]:,} rows, but its shape is "
                f"{indptr.shape}. Prepare it again."
            )
        size = min(data.size, indices.size)
        if indptr[0] < 0 or indptr[-1] > size or (indptr[1:] < indptr[:-1]).any():
            raise ValueError(
                f"X of {name} is damaged: its rows must lie one behind the other among {size:,} stored values, but its "
                f"indptr, from {indptr[0]:,} to {indptr[-1]:,}, has them elsewhere. Prepare it again."
            )
        return cls(data, indices, indptr)

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return self.indptr.size - 1


class CsrReader:
    """Reads load requests as annbatch's Loader does, and yields the same batches, with less work.

    annbatch reads a load request whole, makes 32-bit column numbers of it, and copies the rows of each batch out of
    that. But the lengths of all rows are known before, and with them where in its batch each row belongs: so chunks are
    decoded where a core's cache holds them, and their rows written to the batches at once. Chunks of which no batch has
    a cell are not read.

    Parameters
    ----------
    parts
        The datasets, all of one type.
    n_genes
        Columns of each.
    sampler
        Which rows, in what order; it runs anew for each iteration.
    pool
        Where batches take their memory from.
    threads
        Decode on all cores, on threads that end with the iteration. `False`: on the caller's alone.
    as_stored
        Leave columns in the type of the store, for who makes something else of the batches: `uint16` takes half.
    """

    def __init__(
        self,
        parts: Sequence[StoredCsr],
        n_genes: int,
        sampler: Sampler,
        *,
        pool: BufferPool,
        threads: bool = True,
        as_stored: bool = False,
    ):
        self._parts, self._n_genes, self._sampler = list(parts), n_genes, sampler
        self._ends = np.cumsum([part.n_rows for part in parts])
        self._helpers = min(usable_cores(), _MOST_THREADS) - 1 if threads else 0
        self._pool = pool
        self._columns = parts[0].indices.dtype if as_stored else None
        # compiled now, and not in the first batch
        compile_for(parts[0].indices.dtype)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches of one run of the sampler: `X`, scipy CSR with int32 columns, and `index`, (n_cells,) int64."""
        with ThreadPoolExecutor(self._helpers, "donorloader decoding") if self._helpers else nullcontext() as team:
            for request in self._sampler.sample(int(self._ends[-1])):
                batches = self._read(request, team)
                while batches:
                    yield batches.popleft()

    def _read(self, request: LoadRequest, team: ThreadPoolExecutor | None) -> deque[dict[str, Any]]:
        """The batches of one load request."""
        splits = [np.asarray(split, dtype=np.int64) for split in request["splits"]]
        if not splits:
            return deque()
        rows = request_rows(request["requests"])[np.concatenate(splits)]
        dataset, starts, stops = self._find(rows)
        ends = np.cumsum([split.size for split in splits])
        batches = [slice(end - split.size, end) for split, end in zip(splits, ends, strict=True)]
        # numbers of 32 bits, as scipy has them, unless a batch has more values than these can count
        most = max(int((stops[batch] - starts[batch]).sum()) for batch in batches)
        index_type = np.dtype(np.int32 if most <= _MOST_VALUES else np.int64)
        column_type = index_type if self._columns is None else self._columns
        matrices = [self._empty(stops[batch] - starts[batch], index_type, column_type) for batch in batches]
        to_data = np.concatenate([_addresses(X.data, X.indptr) for X in matrices])
        to_indices = np.concatenate([_addresses(X.indices, X.indptr) for X in matrices])

        groups: deque[Group] = deque()
        for number, part in enumerate(self._parts):
            mine = np.flatnonzero((dataset == number) & (starts < stops))
            mine = mine[np.argsort(starts[mine], kind="stable")]
            where = starts[mine], stops[mine]
            groups.extend(Placing(part.data, *where, to_data[mine], matrices).groups())
            groups.extend(
                Placing(part.indices, *where, to_indices[mine], matrices, self._n_genes, column_type).groups()
            )
        _work_off(groups, team, self._helpers)
        return deque({"X": X, "index": rows[batch].copy()} for X, batch in zip(matrices, batches, strict=True))

    def _find(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Which dataset each row is in, and where in it its values begin and end."""
        if rows.size and not (rows.min() >= 0 and rows.max() < self._ends[-1]):
            raise IndexError(
                f"Rows go from 0 to {self._ends[-1] - 1:,}, but the sampler drew {rows.min():,} to {rows.max():,}."
            )
        dataset = np.searchsorted(self._ends, rows, side="right")
        starts, stops = np.empty((2, rows.size), dtype=np.int64)
        for number, (part, end) in enumerate(zip(self._parts, self._ends, strict=True)):
            mine = np.flatnonzero(dataset == number)
            local = rows[mine] - (end - part.n_rows)
            starts[mine], stops[mine] = part.indptr[local], part.indptr[local + 1]
        return dataset, starts, stops

    def _empty(
        self, lengths: NDArray[np.int64], index_type: np.dtype[Any], column_type: np.dtype[Any]
    ) -> sp.csr_matrix:
        """A matrix of rows of these lengths, whose values and columns are still to be written."""
        X = sp.csr_matrix((lengths.size, self._n_genes), dtype=self._parts[0].data.dtype)
        X.indptr = np.append(0, np.cumsum(lengths)).astype(index_type)
        n_values = int(X.indptr[-1])
        # one buffer for both, each of them aligned: numpy asks for huge pages from 4 MB on
        room = -(-n_values * X.dtype.itemsize // _LINE) * _LINE
        buffer = self._pool.empty((room + n_values * column_type.itemsize,), np.uint8)
        X.data, X.indices = buffer[: n_values * X.dtype.itemsize].view(X.dtype), buffer[room:].view(column_type)
        return X


def _addresses(values: NDArray[Any], indptr: NDArray[Any]) -> NDArray[np.int64]:
    """Where in memory each row of a matrix begins."""
    return values.ctypes.data + indptr[:-1].astype(np.int64) * values.itemsize


def _work_off(groups: deque[Group], team: ThreadPoolExecutor | None, helpers: int) -> None:
    """Decode and place all groups, on this thread and the team's."""
    others: list[Future[None]] = []
    try:
        if team is not None:
            others += (team.submit(_work, groups) for _ in range(min(helpers, len(groups) // 2)))
        _work(groups)
        wait(others)
    except BaseException:  # an interrupt among them, wherever it comes
        groups.clear()
        wait(others)
        raise
    for other in others:
        other.result()


def _work(groups: deque[Group]) -> None:
    """Take groups until none is left. After an error, none is."""
    with closing(ShardReader()) as reader:
        try:
            while (group := _next(groups)) is not None:
                group.placing.place(group, reader)
        except BaseException:
            groups.clear()
            raise


def _next(groups: deque[Group]) -> Group | None:
    try:
        return groups.popleft()
    except IndexError:
        return None
