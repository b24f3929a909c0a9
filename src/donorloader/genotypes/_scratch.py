"""Where variants become columns of donor rows: in memory, or in a file that is removed."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ._packing import pack_variants, packed_width, turn_packed

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["PER_BYTE", "MoreThanTwoCopiesError", "Scratch", "ScratchRows"]

#: Packed bytes hold calls of four variants each.
PER_BYTE = 4

# The part of the memory granted that the scratch may take before it goes to a file.
_SCRATCH_PART = 0.25


class MoreThanTwoCopiesError(Exception):
    """Two bits hold counts up to 2."""


class Scratch:
    """(n_donors, width) of packed bytes or plain values, in memory if it fits its part of it, else in a file."""

    def __init__(self, path: Path, n_donors: int, n_variants: int, dtype: np.dtype[Any] | None, memory: int) -> None:
        self.packed = dtype is None
        shape = (n_donors, packed_width(n_variants) if dtype is None else n_variants)
        dtype = np.dtype(np.uint8) if dtype is None else dtype
        n_bytes = shape[0] * shape[1] * dtype.itemsize
        self._path = path
        self._map: mmap.mmap | None = None
        if n_bytes <= _SCRATCH_PART * memory:
            self.array: NDArray[Any] = np.empty(shape, dtype=dtype)
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _reserve(descriptor, n_bytes)
            self._map = mmap.mmap(descriptor, n_bytes)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(descriptor)
        self.array = np.frombuffer(self._map, dtype=dtype).reshape(shape)

    def write(self, start: int, values: NDArray[Any], *, packed: bool = False) -> None:
        """Put variant-major values, or packed calls, where the given variant begins."""
        if not len(values):
            return
        if self.packed:
            first = start // PER_BYTE
            place = self.array[:, first : first + packed_width(len(values))]
            if packed:
                turn_packed(values, place, len(place))
            else:
                try:
                    pack_variants(values, place)
                except ValueError as error:
                    raise MoreThanTwoCopiesError from error
        else:
            place = self.array[:, start : start + len(values)]
            place[:] = values.T
            if place.dtype.kind == "i":
                np.maximum(place, -1, out=place)
        self.forget_pages()

    def narrow(self, n_variants: int) -> None:
        """Move rows together once it is known that fewer variants passed than there was room for."""
        width = packed_width(n_variants) if self.packed else n_variants
        n_donors, room = self.array.shape
        if width == room:
            return
        flat = self.array.reshape(-1)
        for row in range(1, n_donors):  # upwards, so that no row is overwritten before it has moved
            flat[row * width : (row + 1) * width] = self.array[row, :width].copy()
        self.array = flat[: n_donors * width].reshape(n_donors, width)
        self.forget_pages()

    def forget_pages(self) -> None:
        """Let the system count the pages of the file as its cache, not as our memory; what is in them stays."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Remove the file."""
        self.array = np.empty((0, 0), dtype=np.uint8)
        if self._map is not None:
            self._map = None  # closed with the last array that shows it
            self._path.unlink(missing_ok=True)


class ScratchRows:
    """Rows of a scratch, copied, so that the pages they lie on need not stay in memory."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.shape = scratch.array.shape

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        block = np.take(self._scratch.array, rows, axis=0)
        self._scratch.forget_pages()
        return block


def _reserve(descriptor: int, n_bytes: int) -> None:
    """Take the room on the disk now: a write to a mapped page finds none with a signal that ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, n_bytes)
        return
    zeros = bytes(2**20)
    while n_bytes > 0:
        n_bytes -= os.write(descriptor, zeros[: min(len(zeros), n_bytes)])
