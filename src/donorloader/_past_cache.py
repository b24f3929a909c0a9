"""Copies to memory past the processor's caches: for large arrays that nobody reads before they are full."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["LARGE", "copy_past_cache", "finish_copies"]

#: From here on, an array does not stay in the caches anyway until it is read. Unit: bytes.
LARGE = 8 << 20

_WIDTH = 32  # bytes of one store, and what its address must be a multiple of


def _generate_stores(_context: Any, to: Any, source: Any, number: Any) -> Any:  # pragma: no cover, compiled
    """Copy vectors of `_WIDTH` bytes between addresses.

    An ordinary store first reads the line that it changes from memory, half of all traffic where whole lines are
    written; LLVM's `nontemporal` stores do not.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source, number = arguments
        vector = ir.VectorType(ir.IntType(64), _WIDTH // 8)
        nontemporal = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        with cgutils.for_range(builder, number) as loop:
            offset = builder.mul(loop.index, ir.Constant(loop.index.type, _WIDTH))
            value = builder.load(builder.inttoptr(builder.add(source, offset), vector.as_pointer()))
            value.align = 1
            store = builder.store(value, builder.inttoptr(builder.add(to, offset), vector.as_pointer()))
            store.align = _WIDTH
            store.set_metadata("nontemporal", nontemporal)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.int64), generate


def _generate_fence(_context: Any) -> Any:  # pragma: no cover, compiled
    """Wait until copies past the cache are there for other threads too, which such stores leave open."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


_store_vectors: Any = intrinsic(_generate_stores)

#: To be called, inside of compiled code, after the last copy.
finish_copies: Any = intrinsic(_generate_fence)


@numba.njit(nogil=True, cache=True)
def copy_past_cache(to, source):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Copy bytes, (n,) uint8, into as many. Call :func:`finish_copies` after the last one."""
    n = to.size
    head = min(n, -to.ctypes.data % _WIDTH)
    vectors = (n - head) // _WIDTH
    to[:head] = source[:head]
    _store_vectors(to.ctypes.data + head, source.ctypes.data + head, vectors)
    to[head + vectors * _WIDTH :] = source[head + vectors * _WIDTH :]
