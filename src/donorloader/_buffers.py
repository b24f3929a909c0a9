"""Large arrays that are used again: fresh ones cost more in page faults than filling them does."""

from __future__ import annotations

import math
import threading
import weakref
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
    this object in between, every view and every tensor made from the array keeps it, and with it the loan, alive.
    """

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]):
        self.__array_interface__ = {
            "data": (memory.ctypes.data, False),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }


class BufferPool:
    """Lend arrays and take their memory back when the last reference to it is gone.

    Parameters
    ----------
    keep
        Number of free buffers to hold at the most; further ones are released. Unit: buffers.
    keep_bytes
        What free buffers may take together. Default: no limit but their number. Unit: bytes.
    """

    def __init__(self, keep: int = 8, *, keep_bytes: int | None = None):
        self._keep, self._most = keep, math.inf if keep_bytes is None else keep_bytes
        self._free: list[NDArray[np.uint8]] = []
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
        lease = _Lease(memory, shape, dtype)
        array = np.asarray(lease)
        # the finalizer holds the memory, so it outlives the pool where it must
        finalizer = weakref.finalize(lease, self._give_back, memory)
        finalizer.atexit = False
        return array

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        with self._lock:
            fitting = [i for i, m in enumerate(self._free) if nbytes <= m.nbytes <= 2.25 * nbytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        # with some room, so that the next array of about this size fits
        room = nbytes + nbytes // 8
        memory = np.empty(room + _LINE, dtype=np.uint8)
        first = -memory.ctypes.data % _LINE  # rows that begin with a line of the cache are written fastest
        return memory[first : first + room]

    def _give_back(self, memory: NDArray[np.uint8]) -> None:
        # may run inside a garbage collection that this very thread's `_take` set off: never wait for the lock
        if self._lock.acquire(blocking=False):
            try:
                if memory.nbytes > _HUGE:
                    return
                self._free.append(memory)
                while len(self._free) > self._keep or self._held() > self._most:
                    self._free.pop(0)
            finally:
                self._lock.release()

    def clear(self) -> None:
        """Release all free buffers. Those on loan come back later."""
        with self._lock:
            self._free.clear()

    def _held(self) -> int:
        return sum(memory.nbytes for memory in self._free)
