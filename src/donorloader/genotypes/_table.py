"""The genotype rows of the donors in use: resident where they fit the budget, else read window by window."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool

    from ._rows import Columns
    from ._store import GenotypeStore

__all__ = ["DonorTable", "WindowTable"]


@dataclass(frozen=True)
class WindowTable:
    """Rows of at least the donors of one window.

    Attributes
    ----------
    donors
        (n_window_donors,) int64 codes of the window's donors, ascending.
    values
        (n_rows, n_variants) C-contiguous genotypes. Never handed to a user: batches get copies.
    slots
        (n_window_donors,) int64, the row of `values` of each donor.
    """

    donors: NDArray[np.int64]
    values: NDArray[Any]
    slots: NDArray[np.int64]

    def gather(self, split: NDArray[np.int64], pool: BufferPool) -> NDArray[Any]:
        """Rows of some of the window's donors, by position in `donors`, as an array of the caller's own."""
        out = pool.empty((split.size, self.values.shape[1]), self.values.dtype)
        # "clip" writes straight into `out`; "raise" would go through a copy. Slots are in range by construction.
        return np.take(self.values, self.slots[split], axis=0, out=out, mode="clip")


class DonorTable:
    """Genotype rows by donor code, of the chosen variants.

    Parameters
    ----------
    store
        The genotypes.
    columns
        The chosen variants.
    rows
        (n_codes,) int64, the row of `store` of each donor code; -1 for a donor without one, which gets a row of NaN.
    memory
        Budget for rows that stay. Unit: bytes.
    nan
        Whether rows may be NaN, so that the values must be floats, whether or not a donor lacks its row.

    Attributes
    ----------
    dtype
        The store's, but float32 for an integer store if `nan`, as integers have no NaN.
    resident
        Whether all rows stay once they are read. Otherwise a window's rows are read for it, those that the window
        before had too being kept; two windows are held.
    """

    def __init__(
        self, store: GenotypeStore, columns: Columns, rows: NDArray[np.int64], *, memory: int, nan: bool = False
    ):
        self.store, self.columns, self.rows = store, columns, rows
        self.n_variants = columns.stop - columns.start if isinstance(columns, slice) else columns.size
        absent = rows < 0
        self.dtype = np.dtype(np.float32) if nan and store.dtype.kind != "f" else store.dtype
        self.row_bytes = self.n_variants * self.dtype.itemsize
        self._lock = threading.Lock()
        self._values: NDArray[Any] | None = None
        whole = store.in_memory
        all_columns = isinstance(columns, slice) and columns == slice(0, store.n_variants)
        if (
            whole is not None
            and whole.flags.c_contiguous
            and all_columns
            and self.dtype == store.dtype
            and not absent.any()
        ):
            self.resident = True
            self._values, self._slots, self._have = whole, rows, np.ones(rows.size, dtype=bool)
            return
        self.resident = rows.size * self.row_bytes <= memory
        self._slots = np.arange(rows.size, dtype=np.int64)
        self._have = np.zeros(rows.size, dtype=bool)

    def batches_ahead(self, wanted: int, batch_size: int | None) -> int:
        """How many batches of gathered rows may wait: enough to stay ahead, within a budget however wide they are."""
        rows = min(self.rows.size, batch_size or self.rows.size)
        return max(2, min(wanted, _GATHERED_BYTES // (rows * self.row_bytes)))

    def window(self, donors: NDArray[np.int64], previous: WindowTable | None, pool: BufferPool) -> WindowTable:
        """Rows of the given donor codes (ascending), read where they are not at hand."""
        if self.resident:
            return WindowTable(donors, self._resident_rows(donors), self._slots[donors])
        values = pool.empty((donors.size, self.n_variants), self.dtype)
        at_hand = np.zeros(donors.size, dtype=bool)
        if previous is not None:
            place = np.searchsorted(previous.donors, donors).clip(max=previous.donors.size - 1)
            at_hand = previous.donors[place] == donors
            values[at_hand] = previous.values[previous.slots[place[at_hand]]]
        self._read_into(values, np.flatnonzero(~at_hand), donors[~at_hand])
        return WindowTable(donors, values, np.arange(donors.size, dtype=np.int64))

    def _resident_rows(self, donors: NDArray[np.int64]) -> NDArray[Any]:
        with self._lock:  # two passes may run side by side
            if self._values is None:
                self._values = np.empty((self.rows.size, self.n_variants), dtype=self.dtype)
            missing = donors[~self._have[donors]]
            if missing.size:
                self._read_into(self._values, missing, missing)
                self._have[missing] = True
            return self._values

    def _read_into(self, values: NDArray[Any], slots: NDArray[np.int64], donors: NDArray[np.int64]) -> None:
        """Read the rows of donors into slots, in pieces so that the reader's copy stays small."""
        rows = self.rows[donors]
        values[slots[rows < 0]] = np.nan if self.dtype.kind == "f" else 0  # integers never have absent donors
        slots, rows = slots[rows >= 0], rows[rows >= 0]
        step = max(1, _READ_BYTES // max(1, self.n_variants * self.store.dtype.itemsize))
        order = np.argsort(rows, kind="stable")
        for start in range(0, rows.size, step):
            piece = order[start : start + step]
            values[slots[piece]] = self.store.read(rows[piece], self.columns)


# Read at once into a copy, and gathered rows that may wait for the loop. Unit: bytes.
_READ_BYTES = 64 << 20
_GATHERED_BYTES = 256 << 20
