"""Whole vectors written to memory, past the processor's caches where the array is large: what fast kernels end with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "LARGE",
    "WIDTH",
    "address_of",
    "copy_bytes",
    "copy_past_cache",
    "finish_writes",
    "splat",
    "store_vectors",
    "vector_of",
]

#: From here on, an array does not stay in the caches anyway until it is read. Unit: bytes.
LARGE = 8 << 20

#: Size of one vector, and what the address of a store past the caches must be a multiple of. Unit: bytes.
WIDTH = 32


def vector_of(bits: int) -> Any:
    """Type of a vector of integers of so many bits."""
    return ir.VectorType(ir.IntType(bits), 8 * WIDTH // bits)


def splat(builder: Any, value: Any) -> Any:  # pragma: no cover, compiled
    """A vector of one value."""
    count = 8 * WIDTH // value.type.width
    one = builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), count), [0] * count))


def store_vectors(
    builder: Any, to: Any, number: Any, vectors: Callable[[Any], Sequence[Any]], *, past_cache: bool
) -> None:  # pragma: no cover, compiled
    """Generate a loop that writes vectors one behind the other.

    An ordinary store first reads the line that it changes from memory, half of all traffic where whole lines are
    written; LLVM's `nontemporal` stores do not. They are issued here as each vector is computed, so that the processor
    computes while it waits for memory: filling a buffer in the cache and copying that takes the sum of both.

    Parameters
    ----------
    builder
        Of LLVM's instructions.
    to
        Address; a multiple of `WIDTH` if `past_cache`.
    number
        Of rounds of the loop.
    vectors
        Generates the vectors of one round, each of `WIDTH` bytes, from its number.
    past_cache
        Write past the caches. :func:`finish_writes` must follow the last loop.
    """
    nontemporal = builder.module.add_metadata([ir.IntType(32)(1)])
    with cgutils.for_range(builder, number) as loop:
        made = vectors(loop.index)
        start = builder.add(to, builder.mul(loop.index, loop.index.type(WIDTH * len(made))))
        for i, vector in enumerate(made):
            address = builder.inttoptr(builder.add(start, start.type(WIDTH * i)), vector.type.as_pointer())
            store = builder.store(vector, address)
            store.align = WIDTH if past_cache else 1
            if past_cache:
                store.set_metadata("nontemporal", nontemporal)


def _generate_fence(_context: Any) -> Any:  # pragma: no cover, compiled
    """Wait until writes past the cache are there for other threads too, which such stores leave open."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _generate_copy(past_cache: bool) -> Any:  # pragma: no cover, compiled
    """Code that copies a number of vectors between addresses; those past the caches go to multiples of `WIDTH`."""

    def copy(_context: Any, to: Any, source: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            to, source, number = arguments

            def vectors(index: Any) -> list[Any]:
                address = builder.add(source, builder.mul(index, index.type(WIDTH)))
                value = builder.load(builder.inttoptr(address, vector_of(64).as_pointer()))
                value.align = 1
                return [value]

            store_vectors(builder, to, number, vectors, past_cache=past_cache)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), generate

    return intrinsic(copy)


def _generate_copy_bytes(_context: Any, to: Any, source: Any, number: Any) -> Any:  # pragma: no cover, compiled
    """Copy a number of bytes between addresses."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        to, source, number = arguments
        byte = ir.IntType(8).as_pointer()
        with cgutils.for_range(builder, number) as loop:
            value = builder.load(builder.inttoptr(builder.add(source, loop.index), byte))
            builder.store(value, builder.inttoptr(builder.add(to, loop.index), byte))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


#: To be called, inside of compiled code, after the last write past the caches.
finish_writes: Any = intrinsic(_generate_fence)

_copy: Any = _generate_copy(past_cache=False)
_copy_past_cache: Any = _generate_copy(past_cache=True)
_copy_bytes: Any = intrinsic(_generate_copy_bytes)


@numba.njit(nogil=True)
def copy_bytes(to, source, number):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Copy a number of bytes between addresses."""
    if number < WIDTH:
        _copy_bytes(to, source, number)
        return
    _copy(to, source, number // WIDTH)
    if number % WIDTH:  # a vector over the last bytes, which overlaps those before
        _copy(to + number - WIDTH, source + number - WIDTH, 1)


@numba.njit(nogil=True)
def copy_past_cache(to, source, number):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Copy a number of bytes between addresses. Call :func:`finish_writes` after the last copy.

    Addresses in place of arrays, here and in what writes past the caches row by row: numba counts references to slices
    of arrays, with instructions that wait for all writes.
    """
    if number < WIDTH:
        _copy_bytes(to, source, number)
        return
    head = -to % WIDTH
    if head:  # a vector over the first bytes, and one over the last ones, which may overlap the others
        _copy(to, source, 1)
    vectors = (number - head) // WIDTH
    _copy_past_cache(to + head, source + head, vectors)
    if head + vectors * WIDTH < number:
        _copy(to + number - WIDTH, source + number - WIDTH, 1)


@numba.njit(nogil=True)
def address_of(array):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Of an array's first value. Signed: numba makes a float of the sum of a signed and an unsigned integer."""
    return np.int64(array.ctypes.data)
