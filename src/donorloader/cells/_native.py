"""Two functions of C for compiled code, which runs without Python's lock: one reads a file, one decompresses blosc."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numcodecs.blosc
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["Functions", "decompress", "native_functions", "read_file"]


class Functions(NamedTuple):
    """Addresses of functions, as compiled code takes them.

    Attributes
    ----------
    pread
        ``ssize_t pread(int file, void *to, size_t size, off_t offset)``, of POSIX.
    blosc
        ``int blosc_decompress_ctx(const void *source, void *to, size_t size, int threads)``, of c-blosc.
    """

    pread: int
    blosc: int


@cache
def native_functions() -> Functions | None:
    """The functions, of the C library and of numcodecs' own; `None` if one is not shown there."""
    try:
        system, blosc = ctypes.CDLL(None), ctypes.CDLL(numcodecs.blosc.__file__)
        found = (ctypes.cast(f, ctypes.c_void_p).value for f in (system.pread, blosc.blosc_decompress_ctx))
        return Functions(*(address or 0 for address in found))
    except (AttributeError, OSError, TypeError):  # Windows has no library without a name
        return None


_INT, _LONG, _POINTER = ir.IntType(32), ir.IntType(64), ir.IntType(8).as_pointer()


def _call(builder: Any, result: Any, parameters: list[Any], given: Any) -> Any:  # pragma: no cover, compiled
    """Call the function whose address is the first of some 64-bit numbers; the others become its parameters."""
    function = builder.inttoptr(given[0], ir.FunctionType(result, parameters).as_pointer())
    passed = [
        builder.inttoptr(value, kind) if kind is _POINTER else builder.trunc(value, kind)
        for value, kind in zip(given[1:], parameters, strict=True)
    ]
    return builder.sext(builder.call(function, passed), _LONG)


def _generate_pread(_context: Any, function: Any, file: Any, to: Any, size: Any, offset: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:  # pragma: no cover, compiled
        return _call(builder, _LONG, [_INT, _POINTER, _LONG, _LONG], given)

    return types.int64(*[types.int64] * 5), generate


def _generate_blosc(_context: Any, function: Any, source: Any, to: Any, size: Any, threads: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, given: Any) -> Any:  # pragma: no cover, compiled
        return _call(builder, _INT, [_POINTER, _POINTER, _LONG, _INT], given)

    return types.int64(*[types.int64] * 5), generate


#: To be called inside of compiled code, with the function's address before its own arguments, all 64-bit numbers.
read_file: Any = intrinsic(_generate_pread)
decompress: Any = intrinsic(_generate_blosc)
