"""Calls from packed rows: any donors × any variants, as whatever they are to become, and counts of them.

The format is that of :mod:`._packing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

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
    by_variant = values if values.ndim == 2 else np.empty((4, 0), dtype=bits)
    alike = values if values.ndim == 1 else np.empty(4, dtype=bits)
    if not out.size:
        return
    if isinstance(columns, slice):
        _gather_slice(packed, rows, columns.start, alike, by_variant, out)
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


# Packed bytes that are taken apart at a time, into memory that stays in the first-level cache.
_BYTES = 1024


@numba.njit(nogil=True, cache=True)
def _gather_slice(packed, rows, start, values, by_variant, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
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
            _look_up(codes[begin - 4 * piece : end - 4 * piece], values, by_variant, j, out[i, j : end - start])


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
