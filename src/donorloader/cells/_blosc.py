"""Blosc's decompressor, for several chunks in one call and without Python's lock."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numcodecs.blosc
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from donorloader._vectors import address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["decompress"]


def decompress(stored: NDArray[np.uint8], bounds: list[tuple[int, int]], out: NDArray[np.uint8]) -> int | None:
    """Decompress blosc buffers one behind the other.

    numcodecs gives up Python's lock for each chunk alone, and takes it back for a few microseconds between two: threads
    that decode small chunks spend a fifth of their time on that. So its C function is called from compiled code; where
    it cannot be found, numcodecs is used as it is.

    Parameters
    ----------
    stored
        Memory that holds the buffers.
    bounds
        Where each one begins and ends in it; it is as long as its header tells. Negative: none, nothing to be done.
    out
        Contiguous memory for the chunks, of equal sizes, which are those that the headers tell.

    Returns
    -------
    Position of the first buffer that cannot be decompressed, or `None` if all could.
    """
    size = out.size // len(bounds)
    if function := _function():
        failed = int(_decompress(function, stored, np.array([start for start, _ in bounds]), out, size))
        return None if failed < 0 else failed
    for i, (start, stop) in enumerate(bounds):
        if start < 0:
            continue
        try:
            numcodecs.blosc.decompress(stored[start:stop], out[i * size : (i + 1) * size])
        except (RuntimeError, ValueError):
            return i
    return None


@cache
def _function() -> int:
    """Address of `blosc_decompress_ctx` in the library that numcodecs has loaded; 0 if it does not show it."""
    try:
        library = ctypes.CDLL(numcodecs.blosc.__file__)
        return ctypes.cast(library.blosc_decompress_ctx, ctypes.c_void_p).value or 0
    except (AttributeError, OSError):
        return 0


def _generate_call(_context: Any, function: Any, source: Any, to: Any, size: Any) -> Any:  # pragma: no cover, compiled
    """Call `int blosc_decompress_ctx(const void *src, void *dest, size_t destsize, int numinternalthreads)`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(number, [pointer, pointer, ir.IntType(64), number])
        function, source, to, size = arguments
        call = builder.inttoptr(function, kind.as_pointer())
        one_thread = ir.Constant(number, 1)
        return builder.call(call, [builder.inttoptr(source, pointer), builder.inttoptr(to, pointer), size, one_thread])

    return types.int32(types.int64, types.int64, types.int64, types.int64), generate


_call: Any = intrinsic(_generate_call)


@numba.njit(nogil=True, cache=True)
def _decompress(function, stored, starts, out, size):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    for i in range(starts.size):
        if starts[i] >= 0 and _call(function, address_of(stored) + starts[i], address_of(out) + i * size, size) != size:
            return i
    return -1
