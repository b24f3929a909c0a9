"""Calls from packed rows: any donors × any variants, as whatever they are to become, and counts of them.

The format is that of :mod:`._packing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from donorloader._vectors import LARGE, WIDTH, address_of, finish_writes, splat, store_vectors

from ._rows import count_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["count_packed", "gather_packed", "unpack"]

#: What the codes stand for: counts of the counted allele, and -1 for a missing call.
CALLS: NDArray[np.int8] = np.array([0, 1, 2, -1], dtype=np.int8)


def unpack(
    packed: NDArray[np.uint8], columns: slice | NDArray[np.int64], rows: NDArray[np.int64] | None = None
) -> NDArray[np.int8]:
    """Calls of some rows and columns, (n_rows, n_columns) int8, -1 where missing; parameters as of `gather_packed`.

    Without `rows`, of all.
    """
    rows = np.arange(packed.shape[0]) if rows is None else rows
    out = np.empty((rows.size, count_columns(columns)), dtype=np.int8)
    gather_packed(packed, rows, columns, CALLS, out)
    return out


def gather_packed(
    packed: NDArray[np.uint8],
    rows: NDArray[np.int64],
    columns: slice | NDArray[np.int64],
    values: NDArray[Any],
    out: NDArray[Any],
) -> None:
    """Write the values of some rows and columns.

    Parameters
    ----------
    packed
        (n_rows, width) uint8.
    rows
        (n,) int64 rows to take, in any order, also more than once. In range: not checked.
    columns
        The variants to take: a slice of step 1, or (m,) int64 positions. In range: not checked.
    values
        What each code becomes: (4,), or (4, m) where that differs by variant; in the type of `out`.
    out
        (n, m) C-contiguous, written.
    """
    bits = np.dtype(f"u{out.dtype.itemsize}")  # values are chosen, not computed with: numba need not know their type
    values, out = np.ascontiguousarray(values).view(bits), out.view(bits)
    if not out.size:
        return
    if values.ndim == 1 and isinstance(columns, slice):
        if packed.strides[1] != 1:
            packed = np.ascontiguousarray(packed)
        _gather_slice(packed, rows, columns.start, values, out, out.nbytes >= LARGE and out.flags.aligned)
        return
    by_variant = values if values.ndim == 2 else np.empty((4, 0), dtype=bits)
    alike = values if values.ndim == 1 else np.empty(4, dtype=bits)
    if isinstance(columns, slice):
        _gather_slice_by_variant(packed, rows, columns.start, alike, by_variant, out)
    else:
        _gather_columns(packed, rows, columns, alike, by_variant, out)


def count_packed(packed: NDArray[np.uint8], called: NDArray[np.int32], total: NDArray[np.int32]) -> None:
    """Add the calls of packed rows to what was counted before.

    Parameters
    ----------
    packed
        (n_rows, width) uint8.
    called
        (n_variants,) int32, gains the number of rows whose call is there.
    total
        (n_variants,) int32, gains the sum of their calls.
    """
    _count_packed(packed, called, total)


# Codes of one round of the loop below: of eight bytes.
_ROUND = 32


def _generate_choices(past_cache: bool) -> Any:  # pragma: no cover, compiled
    """Code that writes what `number` × `_ROUND` codes become, from any code of a byte on.

    Each byte is repeated for its four codes; of each copy, the bits of one code are kept, and compared where they are.
    It reads one byte further than the codes go.
    """

    def choose(_context: Any, to: Any, source: Any, shift: Any, number: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            to, source, shift, number = arguments[:4]
            values = [splat(builder, value) for value in arguments[4:]]
            many = values[0].type
            positions, parts = [i % 4 for i in range(_ROUND)], _ROUND // many.count

            def vectors(index: Any) -> list[Any]:
                address = builder.add(source, builder.mul(index, index.type(_ROUND // 4)))
                word = builder.load(builder.inttoptr(address, ir.IntType(64).as_pointer()))
                word.align = 1
                address = builder.add(address, address.type(8))
                more = builder.zext(builder.load(builder.inttoptr(address, ir.IntType(8).as_pointer())), word.type)
                # by one and then by the rest: a shift by all 64 bits is not defined
                more = builder.shl(builder.shl(more, word.type(1)), builder.sub(word.type(63), shift))
                bytes_ = builder.bitcast(builder.or_(builder.lshr(word, shift), more), ir.VectorType(ir.IntType(8), 8))
                repeat = ir.Constant(ir.VectorType(ir.IntType(32), _ROUND), [i // 4 for i in range(_ROUND)])
                repeated = builder.shuffle_vector(bytes_, bytes_, repeat)
                codes = builder.and_(repeated, repeated.type([3 << 2 * p for p in positions]))
                made = []
                for part in range(parts):
                    own = ir.Constant(
                        ir.VectorType(ir.IntType(32), many.count), [part * many.count + i for i in range(many.count)]
                    )
                    code = codes if parts == 1 else builder.zext(builder.shuffle_vector(codes, codes, own), many)
                    chosen = values[0]
                    for k in (1, 2, 3):
                        there = many([k << 2 * p for p in positions[: many.count]])
                        chosen = builder.select(builder.icmp_unsigned("==", code, there), values[k], chosen)
                    made.append(chosen)
                return made

            store_vectors(builder, to, number, vectors, past_cache=past_cache)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.uint64, types.int64, v0, v1, v2, v3), generate

    return intrinsic(choose)


_choose = _generate_choices(past_cache=False)
_choose_past_cache = _generate_choices(past_cache=True)


@numba.njit(nogil=True, cache=True)
def _gather_slice(packed, rows, start, values, out, past_cache):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    m = out.shape[1]
    for i in range(rows.size):
        head = min(m, -(address_of(out) + i * out.strides[0]) % WIDTH // out.itemsize) if past_cache else 0
        number = _rounds(packed, start + head, m - head)
        to, source, shift = _addresses(packed, rows[i], start, out, i, head)
        _choose_each(packed, rows[i], start, values, out, i, 0, head)
        if past_cache:
            _choose_past_cache(to, source, shift, number, values[0], values[1], values[2], values[3])
        else:
            _choose(to, source, shift, number, values[0], values[1], values[2], values[3])
        _choose_each(packed, rows[i], start, values, out, i, head + number * _ROUND, m)
    if past_cache:
        finish_writes()


@numba.njit(nogil=True)
def _rounds(packed, start, size):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Rounds that write no more than `size` values and read no byte after a row's last."""
    return max(0, min(size // _ROUND, (packed.shape[1] - (start >> 2) - 1) // (_ROUND // 4)))


@numba.njit(nogil=True)
def _addresses(packed, row, start, out, i, first):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Where to write, where to read, and by how many bits the first code is away from the beginning of its byte."""
    column = start + first
    to = address_of(out) + i * out.strides[0] + first * out.itemsize
    return to, address_of(packed) + row * packed.strides[0] + (column >> 2), np.uint64(2 * (column & 3))


@numba.njit(nogil=True)
def _choose_each(packed, row, start, values, out, i, first, stop):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    for j in range(first, stop):
        column = start + j
        out[i, j] = values[(packed[row, column >> 2] >> 2 * (column & 3)) & 3]


# Packed bytes that are taken apart at a time, into memory that stays in the first-level cache.
_BYTES = 1024


@numba.njit(nogil=True, cache=True)
def _gather_slice_by_variant(packed, rows, start, alike, by_variant, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    m = out.shape[1]
    words = np.empty(_BYTES, dtype=np.uint32)
    codes = words.view(np.uint8)
    first, last = start // 4, (start + m - 1) // 4 + 1
    for i in range(rows.size):
        row = packed[rows[i]]
        for piece in range(first, last, _BYTES):
            size = min(_BYTES, last - piece)
            _take_apart(row[piece : piece + size], words)
            begin, end = max(4 * piece, start), min(4 * (piece + size), start + m)
            j = begin - start
            _look_up(codes[begin - 4 * piece : end - 4 * piece], alike, by_variant, j, out[i, j : end - start])


@numba.njit(nogil=True, cache=True)
def _gather_columns(packed, rows, columns, values, by_variant, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    codes = np.empty(4 * _BYTES, dtype=np.uint8)
    for i in range(rows.size):
        row = packed[rows[i]]
        for begin in range(0, columns.size, codes.size):
            end = min(begin + codes.size, columns.size)
            for j in range(begin, end):
                codes[j - begin] = (row[columns[j] >> 2] >> 2 * (columns[j] & 3)) & 3
            _look_up(codes[: end - begin], values, by_variant, begin, out[i, begin:end])


# Rows that are counted in single bytes: twice as many must not overflow one.
_ROWS = 127


@numba.njit(nogil=True, cache=True)
def _count_packed(packed, called, total):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    m = called.size
    words = np.empty(_BYTES, dtype=np.uint32)
    codes = words.view(np.uint8)
    missing, copies = np.empty(4 * _BYTES, dtype=np.uint8), np.empty(4 * _BYTES, dtype=np.uint8)
    for first in range(0, packed.shape[1], _BYTES):
        size = min(_BYTES, packed.shape[1] - first)
        stop = min(4 * size, m - 4 * first)
        for top in range(0, packed.shape[0], _ROWS):
            n = min(_ROWS, packed.shape[0] - top)
            missing[:], copies[:] = 0, 0
            for i in range(top, top + n):
                _take_apart(packed[i, first : first + size], words)
                for j in range(4 * size):
                    missing[j] += codes[j] == 3
                    copies[j] += 0 if codes[j] == 3 else codes[j]
            for j in range(stop):
                called[4 * first + j] += n - missing[j]
                total[4 * first + j] += copies[j]


@numba.njit(nogil=True, cache=True)
def _take_apart(row, words):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """The four codes of each byte as the four bytes of a word."""
    for b in range(row.size):
        word = np.uint32(row[b])
        word = (word | word << np.uint32(12)) & np.uint32(0x000F000F)
        words[b] = (word | word << np.uint32(6)) & np.uint32(0x03030303)


@numba.njit(nogil=True, cache=True)
def _look_up(codes, values, by_variant, first, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Write what each code becomes. Choices in place of a table: the compiler makes vector instructions of them."""
    if by_variant.shape[1]:
        stop = first + codes.size
        v0, v1, v2, v3 = (
            by_variant[0, first:stop],
            by_variant[1, first:stop],
            by_variant[2, first:stop],
            by_variant[3, first:stop],
        )
        for j in range(codes.size):
            code, a, b, c, d = codes[j], v0[j], v1[j], v2[j], v3[j]  # all four, or each would be a branch
            low = b if code == 1 else a
            high = d if code == 3 else c
            out[j] = high if code > 1 else low
    else:
        w0, w1, w2, w3 = values[0], values[1], values[2], values[3]
        for j in range(codes.size):
            code = codes[j]
            low = w1 if code == 1 else w0
            high = w3 if code == 3 else w2
            out[j] = high if code > 1 else low
