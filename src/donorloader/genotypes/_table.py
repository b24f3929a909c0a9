"""The genotype rows of the donors in use: resident where they fit the budget, else cached for what is needed next."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader._buffers import BufferPool

from ._cache import NextUse, RowCache
from ._forms import row_form

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ._cache import Slots
    from ._encoding import Encoder
    from ._rows import Columns
    from ._store import GenotypeStore

__all__ = ["DonorTable", "PassRows", "ReadCounts", "WindowRows"]


@dataclass
class ReadCounts:
    """What was read of the genotypes.

    Attributes
    ----------
    needed
        Rows that requests asked for.
    read
        Rows that were read for them; the others were at hand.
    read_bytes
        What was read, as it is held. Unit: bytes.
    """

    needed: int = 0
    read: int = 0
    read_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Part of the rows asked for that were at hand; 1 if none were asked for."""
        return 1 - self.read / self.needed if self.needed else 1.0


@dataclass(frozen=True)
class WindowRows:
    """Rows of the donors of one request.

    Attributes
    ----------
    table
        The table that they are of.
    donors
        (n,) int64 codes, ascending.
    values
        Rows as they are held. Never handed to a user: batches get copies.
    slots
        (n,) int64, the row of `values` of each donor.
    held
        Keeps the slots as they are.
    """

    table: DonorTable
    donors: NDArray[np.int64]
    values: NDArray[Any]
    slots: NDArray[np.int64]
    held: Slots | None = None

    def gather(self, split: NDArray[np.int64], pool: BufferPool) -> NDArray[Any]:
        """Rows of some of the donors, by position in `donors`, as an array of the caller's own."""
        return self.table.encode(self.values, self.slots[split], self.donors[split], pool)

    def release(self) -> None:
        """The rows are not needed for this request any more."""
        if self.held is not None:
            self.held.release()


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
        Budget for rows. 0: those of the largest request, and no more. Unit: bytes.
    encoder
        What a batch's rows become.

    Attributes
    ----------
    resident
        Whether all rows stay once they are read.
    """

    def __init__(
        self, store: GenotypeStore, columns: Columns, rows: NDArray[np.int64], *, memory: int, encoder: Encoder
    ):
        self.store, self.columns, self.rows = store, columns, rows
        self.encoder = encoder
        self.n_variants, self.dtype = encoder.n_variants, encoder.dtype
        self.counts = ReadCounts()
        self._absent = rows < 0
        self._lock = threading.Lock()
        self._values: NDArray[Any] | None = None
        self._idle: RowCache | None = None
        self.form = row_form(store, columns, self.n_variants)
        self._compile()
        self._row_bytes = self.form.width * self.form.dtype.itemsize
        whole = store.in_memory
        if whole is not None and whole.flags.c_contiguous and _is_all(columns, store.n_variants):
            # absent donors are given any row, and NaN as it is handed out
            self.resident, self._values, self._slots = True, whole, rows.clip(min=0)
            self._have = np.ones(rows.size, dtype=bool)
            return
        self.resident = rows.size * self._row_bytes <= memory
        self._slots = np.arange(rows.size, dtype=np.int64)
        self._have = self._absent.copy()
        self._capacity = min(rows.size, memory // self._row_bytes)
        self._keeps_nothing = memory == 0

    def batches_ahead(self, wanted: int, batch_size: int | None) -> int:
        """How many batches of gathered rows may wait: enough to stay ahead, within a budget however wide they are."""
        rows = min(self.rows.size, batch_size or self.rows.size)
        row_bytes = self.dtype.itemsize * int(np.prod(self.encoder.shape))
        return max(2, min(wanted, _GATHERED_BYTES // (rows * row_bytes)))

    def begin(self, trace: Callable[[], Sequence[NDArray[np.integer[Any]]]], largest: int) -> PassRows:
        """Rows for a pass.

        Parameters
        ----------
        trace
            Gives the distinct donors of each request to come, of this pass and, as far as known, of the next one.
        largest
            Donors of the largest request.

        Raises
        ------
        ValueError
            If they do not fit the budget.
        """
        if self.resident:
            return PassRows(self, None, None)
        self.check_fits(largest)
        capacity = largest if self._keeps_nothing else self._capacity
        with self._lock:
            cache, self._idle = self._idle, None
        if cache is None or cache.in_use or len(cache.values) != capacity:
            # a pass beside this one has it, or rows of one that was cut short are still held
            cache = RowCache(self.rows.size, capacity, self.form.width, self.form.dtype)
        return PassRows(self, cache, NextUse(trace(), self.rows.size))

    def fits(self, n_donors: int) -> bool:
        """Whether the rows of so many donors fit the budget at once."""
        return self.resident or self._keeps_nothing or n_donors <= self._capacity

    def check_fits(self, n_donors: int) -> None:
        """Refuse requests that the budget does not hold."""
        if not self.fits(n_donors):
            raise ValueError(
                f"genotype_memory must hold the rows of one batch: {n_donors:,} donors × {self._row_bytes:,} bytes, "
                f"{n_donors * self._row_bytes:,} in all, but it holds {self._capacity:,} rows. Give more memory, "
                "choose fewer variants, or use smaller batches."
            )

    def resident_rows(self, donors: NDArray[np.int64]) -> WindowRows:
        """Rows of donors, read where they are not at hand, to stay."""
        with self._lock:  # two passes may run side by side
            if self._values is None:
                self._values = np.empty((self.rows.size, self.form.width), dtype=self.form.dtype)
            missing = donors[~self._have[donors]]
            self.counts.needed += donors.size
            if missing.size:
                self.read_into(self._values, missing, missing)
                self._have[missing] = True
            return WindowRows(self, donors, self._values, self._slots[donors])

    def rows_now(self, donors: NDArray[np.int64], pool: BufferPool) -> NDArray[Any]:
        """Rows of a few donors as a batch brings them, read for this once where rows do not stay."""
        if self.resident:
            return self.resident_rows(donors).gather(np.arange(donors.size), pool)
        values = np.empty((donors.size, self.form.width), dtype=self.form.dtype)
        self.counts.needed += donors.size
        self.read_into(values, np.arange(donors.size), donors)
        return self.encode(values, np.arange(donors.size), donors, pool)

    def read_into(self, values: NDArray[Any], slots: NDArray[np.int64], donors: NDArray[np.int64]) -> None:
        """Read the rows of donors into slots, in pieces so that the reader's copy stays small."""
        there = ~self._absent[donors]
        slots, rows = slots[there], self.rows[donors[there]]
        step = max(1, _READ_BYTES // max(1, self.form.read_bytes))
        order = np.argsort(rows, kind="stable")
        for start in range(0, rows.size, step):
            piece = order[start : start + step]
            values[slots[piece]] = self.form.read(rows[piece])
        self.counts.read += rows.size
        self.counts.read_bytes += rows.size * self._row_bytes

    def encode(
        self, values: NDArray[Any], slots: NDArray[np.int64], donors: NDArray[np.int64], pool: BufferPool
    ) -> NDArray[Any]:
        """Rows of `values` as a batch brings them.

        Raises
        ------
        ValueError
            If a call is missing that must not be.
        """
        out = pool.empty((slots.size, *self.encoder.shape), self.dtype)
        absent = self._absent[donors]
        found = self.form.gather(values, slots, self.encoder, out, pool)
        if found is not None and absent.any():  # rows of donors without genotypes hold anything
            found = self._first_missing(values, slots[~absent], pool)
            donors = donors[~absent]
        if found is not None:
            donor, variant = self.store.ids[self.rows[donors[found[0]]]], self.encoder.name(int(found[1]))
            raise ValueError(
                f"missing_calls='error' allows no missing call, but donor {donor!r} has none of variant {variant!r}. "
                "Choose another policy, or leave out variants with missing calls."
            )
        if absent.any():
            out[absent] = np.nan
        return out

    def _first_missing(
        self, values: NDArray[Any], slots: NDArray[np.int64], pool: BufferPool
    ) -> NDArray[np.int64] | None:
        out = pool.empty((slots.size, *self.encoder.shape), self.dtype)
        return self.form.gather(values, slots, self.encoder, out, pool)

    def _compile(self) -> None:
        """Gather one row of nothing, so that what gathers is compiled now and not in the first step of a loop."""
        nothing = np.zeros((1, self.form.width), dtype=self.form.dtype)
        out = np.empty((1, *self.encoder.shape), dtype=self.dtype)
        self.form.gather(nothing, np.zeros(1, dtype=np.int64), self.encoder, out, BufferPool(keep=1))

    def give_back(self, cache: RowCache) -> None:
        """A pass is over: the next one begins with its rows."""
        with self._lock:
            self._idle = cache


class PassRows:
    """The rows of one pass, request by request in the order of its trace."""

    def __init__(self, table: DonorTable, cache: RowCache | None, next_use: NextUse | None):
        self._table, self._cache, self._next_use = table, cache, next_use

    def request(self, donors: NDArray[np.int64], stopped: Callable[[], bool]) -> WindowRows:
        """Rows of the given donor codes (ascending), read where they are not at hand.

        Raises
        ------
        PassStopped
            If the pass is over while rows of earlier requests are waited for.
        """
        if self._cache is None or self._next_use is None:
            return self._table.resident_rows(donors)
        self._next_use.pass_over(donors)
        held, missing = self._cache.request(donors, self._next_use, stopped)
        self._table.counts.needed += donors.size
        try:
            self._table.read_into(self._cache.values, held.index[missing], donors[missing])
        except BaseException:
            self._cache.forget(donors[missing])
            raise
        return WindowRows(self._table, donors, self._cache.values, held.index, held)

    def close(self) -> None:
        """The pass is over."""
        if self._cache is not None:
            self._table.give_back(self._cache)
            self._cache = None


def _is_all(columns: Columns, n_variants: int) -> bool:
    return isinstance(columns, slice) and columns == slice(0, n_variants)


# Read at once into a copy, and gathered rows that may wait for the loop. Unit: bytes.
_READ_BYTES = 64 << 20
_GATHERED_BYTES = 256 << 20
