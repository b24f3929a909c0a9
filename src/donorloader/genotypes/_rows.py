"""Rows of a donors × variants matrix from wherever it lies: memory, zarr or HDF5, dense or CSR."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import scipy.sparse as sp

from donorloader._ids import shorten

from ._checksums import check_whole, has_checksums, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = [
    "Columns",
    "GenotypeRows",
    "Matrix",
    "MemoryMatrix",
    "SparseMatrix",
    "StackedMatrix",
    "StoredMatrix",
    "as_columns",
    "as_numbers",
    "count_columns",
]

type Columns = slice | NDArray[np.int64]


def count_columns(columns: Columns) -> int:
    """How many columns are chosen; a slice has both its ends."""
    return columns.stop - columns.start if isinstance(columns, slice) else columns.size


def as_columns(chosen: Any, n: int) -> Columns:
    """Columns as any numpy indexing gives them: a slice of step 1 with both its ends, or as :func:`as_numbers`."""
    if not isinstance(chosen, slice):
        return as_numbers(chosen, n, "columns")
    start, stop, step = chosen.indices(n)
    return slice(start, max(start, stop)) if step == 1 else np.arange(start, stop, step)


def as_numbers(chosen: Any, n: int, what: str) -> NDArray[np.int64]:
    """Numbers from 0 to `n` of rows or columns; given as numbers, negative ones from the end, or as a mask.

    Raises
    ------
    IndexError, TypeError, ValueError
        If a number is out of range, a mask of another length, or it is something else.
    """
    numbers = np.asarray(chosen)
    if numbers.ndim != 1 or (numbers.dtype.kind not in "iub" and numbers.size):
        raise TypeError(f"{what} must be numbers or a mask, one-dimensional, got {numbers.dtype} {numbers.shape}.")
    if numbers.dtype.kind == "b":
        if numbers.size != n:
            raise ValueError(f"A mask of {what} needs one entry for each of the {n:,}, got {numbers.size:,}.")
        return np.flatnonzero(numbers)
    numbers = numbers.astype(np.int64, copy=False)
    if not numbers.size or (numbers.min() >= 0 and numbers.max() < n):
        return numbers
    if (wrong := numbers[(numbers < -n) | (numbers >= n)]).size:
        raise IndexError(f"Numbers of {what} must be below {n:,}, got {shorten(wrong)}.")
    return np.where(numbers < 0, numbers + n, numbers)


# Columns that lie closer than this are read in one piece: asking costs more than the columns between.
_COLUMN_GAP = 64


class GenotypeRows(Protocol):
    """What the loader and the writer need of genotypes, wherever they come from."""

    ids: NDArray[np.object_]
    """(n_donors,) donor ids as text."""
    n_variants: int
    dtype: np.dtype[Any]

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """C-contiguous (len(rows), n_columns) values of given donors, in the order asked for."""

    def names(self, columns: Columns) -> NDArray[np.object_]:
        """Names of given variants."""

    def var(self) -> Any:
        """Annotation of all variants, a DataFrame."""

    def obs(self) -> Any:
        """Annotation of all donors in order of `ids`, a DataFrame."""

    def close(self) -> None:
        """Let go of open files."""


class Matrix(Protocol):
    """A matrix that can be read by rows."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """C-contiguous values of given rows and columns, in the order asked for."""


class MemoryMatrix:
    """A numpy array."""

    def __init__(self, array: NDArray[Any]):
        self.array = array
        self.shape = (array.shape[0], array.shape[1])
        self.dtype = array.dtype

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """Values by numpy indexing."""
        if isinstance(columns, slice):
            return np.take(self.array[:, columns], rows, axis=0)
        return np.ascontiguousarray(self.array[np.ix_(rows, columns)])


class StoredMatrix:
    """A dense zarr array or HDF5 dataset, read by contiguous pieces.

    Parameters
    ----------
    array
        The array.
    name
        Of the store, for messages.

    Raises
    ------
    ValueError
        If the array has checksums, and is not whole; on reading, if they say that it is damaged.
    """

    def __init__(self, array: Any, name: str):
        self._array = array
        self._what = f"{array.name.strip('/')} of {name}"
        self._checked = has_checksums(array)
        if self._checked:
            check_whole(array, self._what)
        self.shape = (int(array.shape[0]), int(array.shape[1]))
        self.dtype = np.dtype(array.dtype)

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """Values by slices, which both libraries read fastest, and HDF5 only in ascending order."""
        if isinstance(columns, slice):
            return self._read_slice(rows, columns)
        out = np.empty((rows.size, columns.size), dtype=self.dtype)
        order = np.argsort(columns, kind="stable")
        for piece in _pieces(columns[order], _COLUMN_GAP):
            wanted = columns[order[piece]]
            block = self._read_slice(rows, slice(int(wanted[0]), int(wanted[-1]) + 1))
            out[:, order[piece]] = block[:, wanted - wanted[0]]
        return out

    def _read_slice(self, rows: NDArray[np.int64], columns: slice) -> NDArray[Any]:
        out = np.empty((rows.size, len(range(*columns.indices(self.shape[1])))), dtype=self.dtype)
        order = np.argsort(rows, kind="stable")
        in_order = bool((order == np.arange(rows.size)).all())
        for piece in _pieces(rows[order], 1):
            wanted = rows[order[piece]]
            block = self._block(int(wanted[0]), int(wanted[-1]) + 1, columns)
            if in_order and block.shape[0] == wanted.size:
                out[piece] = block
            else:
                out[order[piece]] = block[wanted - wanted[0]]
        return out

    def _block(self, begin: int, end: int, columns: slice) -> Any:
        if self._checked:
            return read_rows(self._array, self._what, begin, end, columns)
        return self._array[begin:end, columns]


class SparseMatrix:
    """CSR in memory (scipy) or backed by zarr or HDF5 (anndata); rows are made dense as they are read."""

    def __init__(self, matrix: Any):
        self._matrix = matrix
        self.shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        self.dtype = np.dtype(matrix.dtype)

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """Values of rows, absent entries being 0."""
        if sp.issparse(self._matrix) or rows.size == 0:
            block = self._matrix[rows] if rows.size else sp.csr_matrix((0, self.shape[1]), dtype=self.dtype)
        else:
            order = np.argsort(rows, kind="stable")
            parts = [
                self._matrix[int(wanted[0]) : int(wanted[-1]) + 1][wanted - wanted[0]]
                for wanted in (rows[order[piece]] for piece in _pieces(rows[order], 1))
            ]
            block = sp.csr_matrix(sp.vstack(parts, format="csr"))[np.argsort(order, kind="stable")]
        return np.ascontiguousarray(block[:, columns].toarray())


class StackedMatrix:
    """Matrices one below the other, as the datasets of an annbatch collection."""

    def __init__(self, parts: list[Matrix]):
        self._parts = parts
        self._stops = np.cumsum([part.shape[0] for part in parts])
        self.shape = (int(self._stops[-1]), parts[0].shape[1])
        self.dtype = np.result_type(*(part.dtype for part in parts))

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[Any]:
        """Values, each row from its part."""
        part_of_row = np.searchsorted(self._stops, rows, side="right")
        n_columns = len(range(*columns.indices(self.shape[1]))) if isinstance(columns, slice) else columns.size
        out = np.empty((rows.size, n_columns), dtype=self.dtype)
        for i in np.unique(part_of_row):
            mine = part_of_row == i
            start = self._stops[i] - self._parts[i].shape[0]
            out[mine] = self._parts[i].read(rows[mine] - start, columns)
        return out


def _pieces(ascending: NDArray[np.int64], gap: int) -> Iterator[slice]:
    """Stretches of ascending numbers whose neighbours differ by `gap` at the most."""
    breaks = np.flatnonzero(np.diff(ascending) > gap) + 1
    for start, stop in zip([0, *breaks], [*breaks, ascending.size], strict=True):
        if stop > start:
            yield slice(int(start), int(stop))
