"""Large arrays that are used again: fresh ones cost more in page faults than filling them does."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["BufferPool"]

_SMALL = 1 << 18  # below this the allocator recycles memory by itself
_LINE = 64
_HUGE = 1 << 32  # above this memory is given back: what one huge bag took would be held for good


class _Lease:
    """Memory on loan, seen by numpy as the owner of an array.

    numpy gives a view the *owner* of its memory as base, looking through arrays but not through other objects: with
    this object in between, every view and every tensor made from the array keeps it, and with it the loan, alive. It
    holds the pool too, so that loans may outlive the loader.
    """

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: BufferPool, memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]):
        self._pool, self._memory = pool, memory
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        # runs between two steps of the training loop, where a weakref.finalize takes several times as long
        self._pool.give_back(self._memory)


class BufferPool:
    """Lend arrays and take their memory back when the last reference to it is gone.

    Parameters
    ----------
    keep
        Number of free buffers to hold at the most; of more, those that came back first are released. Should be as many
        as are on loan at once: they come back together where the loop has caught up. Unit: buffers.
    keep_bytes
        What free buffers may take together. Default: no limit but their number. Unit: bytes.
    """

    def __init__(self, keep: int = 16, *, keep_bytes: int | None = None):
        self._keep, self._most = keep, math.inf if keep_bytes is None else keep_bytes
        self._free: list[NDArray[np.uint8]] = []
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialised C-contiguous array.

        The memory is lent until no array, view or tensor refers to it: keeping every batch of an epoch is safe.
        """
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _SMALL:
            return np.empty(shape, dtype)
        memory = self._take(nbytes)
        return np.asarray(_Lease(self, memory, shape, dtype))

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            self._tidy()
            best = None
            for i, memory in enumerate(self._free):  # of equal ones the last: it may still be in a cache
                if nbytes <= memory.nbytes <= (2.25 * nbytes if best is None else self._free[best].nbytes):
                    best = i
            if best is not None:
                return self._free.pop(best)
        # with some room, so that the next array of about this size fits
        room = nbytes + nbytes // 8
        memory = np.empty(room + _LINE, dtype=np.uint8)
        first = -memory.ctypes.data % _LINE  # rows that begin with a line of the cache are written fastest
        return memory[first : first + room]

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """Take memory back from a loan that has ended."""
        # may run inside a garbage collection that this very thread's `_take` set off: never wait for the lock
        self._returned.append(memory)
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Release all free buffers. Those on loan come back later."""
        with self._lock:
            self._returned.clear()
            self._free.clear()

    def _tidy(self) -> None:
        """Add what came back to what is free, as much of it as is to be held."""
        while self._returned:
            memory = self._returned.popleft()
            if memory.nbytes <= _HUGE:
                self._free.append(memory)
        while len(self._free) > self._keep or sum(memory.nbytes for memory in self._free) > self._most:
            self._free.pop(0)
