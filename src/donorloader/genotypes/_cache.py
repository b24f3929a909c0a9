"""Rows of donors under a budget, chosen by what is needed next: the order of donors is known before it comes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import DTypeLike, NDArray

__all__ = ["LOOK", "NextUse", "PassStopped", "RowCache", "Slots"]

#: Between two looks at whether the pass is over, while something is waited for. Unit: seconds.
LOOK = 0.05

_NEVER = np.iinfo(np.int64).max


class PassStopped(Exception):
    """The pass ended while a slot was waited for."""


class NextUse:
    """When each donor is needed next, as a trace of requests is gone through.

    Parameters
    ----------
    trace
        The distinct donor codes of each request to come.
    n_codes
        Number of donor codes.

    Attributes
    ----------
    at
        (n_codes,) int64, the number of the request that needs a donor next; the largest int64 if none does.
    """

    def __init__(self, trace: Sequence[NDArray[np.integer[Any]]], n_codes: int):
        sizes = [donors.size for donors in trace]
        codes = np.concatenate([*trace, np.empty(0, dtype=np.int64)]).astype(np.int64)
        requests = np.repeat(np.arange(len(trace)), sizes)
        order = np.argsort(codes, kind="stable")
        self._requests = np.append(requests[order], _NEVER)
        self._stop = np.cumsum(np.bincount(codes, minlength=n_codes))
        self._next = self._stop - np.bincount(codes, minlength=n_codes)
        self.at = np.where(self._next < self._stop, self._requests[self._next], _NEVER)

    def pass_over(self, donors: NDArray[np.int64]) -> None:
        """The next request of the trace, which needs `donors`, is taken: its donors are needed after it."""
        self._next[donors] += 1
        there = self._next[donors] < self._stop[donors]
        self.at[donors] = np.where(
            there, self._requests[np.minimum(self._next[donors], len(self._requests) - 1)], _NEVER
        )


class RowCache:
    """Slots for rows, of which the one that is needed farthest in the future is given up first (Belady 1966).

    That choice reads the fewest rows possible. It depends on the order of requests alone; a slot that is still in use
    by a request handed out earlier is waited for, not passed over.

    Parameters
    ----------
    n_codes
        Number of donor codes.
    capacity
        Rows that it may hold.
    width, dtype
        Of a row.

    Attributes
    ----------
    values
        (capacity, width) rows by slot.
    """

    def __init__(self, n_codes: int, capacity: int, width: int, dtype: DTypeLike):
        self.values = np.empty((capacity, width), dtype=dtype)
        self._slot_of = np.full(n_codes, -1, dtype=np.int64)
        self._code_in = np.full(capacity, -1, dtype=np.int64)
        self._users = np.zeros(capacity, dtype=np.int64)
        self._changed = threading.Condition()

    @property
    def in_use(self) -> bool:
        """Whether a request that was handed out has not been let go of."""
        return bool(self._users.any())

    def request(
        self, donors: NDArray[np.int64], next_use: NextUse, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[Slots, NDArray[np.bool_]]:
        """Slots for the distinct donors of a request, and which of these are still to be filled.

        Parameters
        ----------
        donors
            (n,) int64 codes, no more of them than the cache has slots.
        next_use
            Says what is needed after this request, which has been passed over.
        stopped
            Says whether the pass is over, so that a slot may never be released: its requests may lie in a queue that
            nobody empties.

        Raises
        ------
        PassStopped
            If it is, while a slot is waited for.
        """
        slots = self._slot_of[donors]
        missing = slots < 0
        if needed := int(missing.sum()):
            taken = self._make_room(donors, needed, next_use)
            with self._changed:
                while self._users[taken].any():
                    if stopped():
                        raise PassStopped
                    self._changed.wait(LOOK)
            old = self._code_in[taken]
            self._slot_of[old[old >= 0]] = -1
            self._code_in[taken] = donors[missing]
            self._slot_of[donors[missing]] = taken
            slots[missing] = taken
        return Slots(self, slots), missing

    def forget(self, donors: NDArray[np.int64]) -> None:
        """Let go of rows that could not be read."""
        slots = self._slot_of[donors]
        self._slot_of[donors], self._code_in[slots] = -1, -1

    def _make_room(self, donors: NDArray[np.int64], needed: int, next_use: NextUse) -> NDArray[np.int64]:
        free = np.flatnonzero(self._code_in < 0)[:needed]
        if free.size == needed:
            return free
        candidates = np.flatnonzero(self._code_in >= 0)
        candidates = candidates[~np.isin(self._code_in[candidates], donors)]
        farthest = np.argsort(-next_use.at[self._code_in[candidates]], kind="stable")
        return np.concatenate([free, candidates[farthest[: needed - free.size]]])

    def _use(self, slots: NDArray[np.int64], change: int) -> None:
        with self._changed:
            self._users[slots] += change
            self._changed.notify_all()


class Slots:
    """Slots of a request, kept as they are until it is released or let go of.

    Attributes
    ----------
    index
        (n,) int64, the slot of each donor.
    """

    def __init__(self, cache: RowCache, index: NDArray[np.int64]):
        self.index = index
        self._cache: RowCache | None = cache
        cache._use(index, 1)

    def release(self) -> None:
        """The rows may be given up; harmless if they were before."""
        cache, self._cache = self._cache, None
        if cache is not None:
            cache._use(self.index, -1)

    def __del__(self) -> None:
        """A pass that was cut short leaves requests in queues, which nobody releases."""
        self.release()
