"""The form in which rows of genotypes lie in memory: as stored, or packed at two bits a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ._packed import bytes_of
from ._packing import pack_rows, packed_width
from ._unpacking import unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool

    from ._encoding import Encoder
    from ._packed import PackedMatrix
    from ._rows import Columns
    from ._store import GenotypeStore

__all__ = ["PackedForm", "PlainForm", "RowForm", "row_form"]


class RowForm(Protocol):
    """How rows are read, held, and turned into what a batch brings."""

    width: int
    dtype: np.dtype[Any]
    read_bytes: int
    """What reading a row takes in memory. Unit: bytes."""

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """(len(rows), width) rows of the store, as they are held."""

    def gather(
        self, values: NDArray[Any], slots: NDArray[np.int64], encoder: Encoder, out: NDArray[Any], pool: BufferPool
    ) -> NDArray[np.int64] | None:
        """Write rows of held `values` into `out`; the first missing call as (row, column), where none is allowed."""


class PlainForm:
    """Values in the type of the store."""

    def __init__(self, store: GenotypeStore, columns: Columns, n_variants: int):
        self._store, self._columns = store, columns
        self.width, self.dtype = n_variants, store.dtype
        self.read_bytes = n_variants * store.dtype.itemsize

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Values of the chosen variants."""
        return self._store.read(rows, self._columns)

    def gather(
        self, values: NDArray[Any], slots: NDArray[np.int64], encoder: Encoder, out: NDArray[Any], pool: BufferPool
    ) -> NDArray[np.int64] | None:
        """Take rows, and encode them unless they stay as they are."""
        as_stored = encoder.encoding is None and encoder.missing is None and out.dtype == values.dtype
        block = out if as_stored else pool.empty((slots.size, values.shape[1]), values.dtype)
        # "clip" writes straight into `out`; "raise" would go through a copy. Slots are in range by construction.
        np.take(values, slots, axis=0, out=block, mode="clip")
        return None if as_stored else encoder.from_values(block, out)


class PackedForm:
    """Calls at two bits, of the chosen variants alone."""

    def __init__(self, matrix: PackedMatrix, columns: Columns, n_variants: int):
        self._matrix = matrix
        self._first, self._stop, columns = bytes_of(columns)
        self.dtype = np.dtype(np.uint8)
        self.read_bytes = self._stop - self._first
        # chosen one by one, they are packed anew, so that what lies between them takes no memory
        self._pick = None if isinstance(columns, slice) else columns
        self.columns = columns if isinstance(columns, slice) else slice(0, n_variants)
        self.width = self.read_bytes if self._pick is None else packed_width(n_variants)
        if self._pick is not None:
            self.read_bytes += n_variants

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Packed calls of the chosen variants."""
        packed = self._matrix.read_bytes(rows, self._first, self._stop)
        if self._pick is None:
            return packed
        return pack_rows(unpack(packed, self._pick))

    def gather(
        self, values: NDArray[Any], slots: NDArray[np.int64], encoder: Encoder, out: NDArray[Any], pool: BufferPool
    ) -> NDArray[np.int64] | None:
        """Unpack rows straight into what they become."""
        return encoder.from_packed(values, slots, self.columns, out)


def row_form(store: GenotypeStore, columns: Columns, n_variants: int) -> RowForm:
    """The form for rows of a store: packed where it is packed."""
    if store.packed is not None:
        return PackedForm(store.packed, columns, n_variants)
    return PlainForm(store, columns, n_variants)
