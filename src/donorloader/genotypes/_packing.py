"""Hard calls packed at two bits each.

A byte holds four calls of one donor, the first in its lowest two bits: call `j` of a row is
``(row[j // 4] >> 2 * (j % 4)) & 3``. The codes 0, 1 and 2 are counts of the counted allele, 3 is a missing call; bits
past the last variant are 0. The format is that of docs/format.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["pack_rows", "pack_variants", "packed_width", "turn_packed"]


def packed_width(n_variants: int) -> int:
    """Bytes of a packed row."""
    return -(-n_variants // 4)


def pack_rows(calls: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack donor-major calls.

    Parameters
    ----------
    calls
        (n_donors, n_variants) int8: 0, 1 or 2, or negative where missing.

    Returns
    -------
    (n_donors, packed_width(n_variants)) uint8.

    Raises
    ------
    ValueError
        If a call is above 2.
    """
    calls = np.ascontiguousarray(calls, dtype=np.int8)
    out = np.empty((calls.shape[0], packed_width(calls.shape[1])), dtype=np.uint8)
    _refuse(_pack_rows(calls, out))
    return out


def pack_variants(calls: NDArray[np.int8], out: NDArray[np.uint8]) -> None:
    """Pack variant-major calls into the columns of donor-major rows.

    Parameters
    ----------
    calls
        (n_variants, n_donors) int8: 0, 1 or 2, or negative where missing.
    out
        (n_donors, packed_width(n_variants)) uint8, written. A view of wider rows will do.

    Raises
    ------
    ValueError
        If a call is above 2.
    """
    calls = np.ascontiguousarray(calls, dtype=np.int8)
    m, n = calls.shape
    if out.shape != (n, packed_width(m)):
        raise ValueError(f"out must be {(n, packed_width(m))}, got {out.shape}.")
    words, out_words = _by_eight(calls[:, : n // 8 * 8]), _by_eight(out[:, : m // 32 * 8])
    _refuse(_pack_variants(calls, words, out, out_words))


def turn_packed(by_variant: NDArray[np.uint8], out: NDArray[np.uint8], n_donors: int) -> None:
    """Turn packed variant-major calls into the columns of packed donor-major rows.

    A quarter of the bytes of :func:`pack_variants` to read, and no call is looked at alone.

    Parameters
    ----------
    by_variant
        (n_variants, packed_width(n_donors)) uint8: a variant is a row, packed as a donor is. Calls past the last donor
        may be any.
    out
        (n_donors, packed_width(n_variants)) uint8, written. A view of wider rows will do.
    n_donors
        Donors of a variant.
    """
    m = by_variant.shape[0]
    if by_variant.shape[1] != packed_width(n_donors) or out.shape != (n_donors, packed_width(m)):
        raise ValueError(
            f"Calls of {m:,} variants and {n_donors:,} donors are {(m, packed_width(n_donors))} bytes and become "
            f"{(n_donors, packed_width(m))}, got {by_variant.shape} and {out.shape}."
        )
    by_variant = np.ascontiguousarray(by_variant)
    words, out_words = _by_eight(by_variant[:, : n_donors // 32 * 8]), _by_eight(out[:, : m // 32 * 8])
    _turn_packed(by_variant, words, out, out_words)


def _by_eight(array: NDArray[Any]) -> NDArray[np.uint64]:
    """The same memory, by eight bytes of a row, wherever these lie: on x86 and ARM, words need not be aligned."""
    shape = (array.shape[0], array.shape[1] // 8)
    if 0 in shape:
        return np.empty(shape, dtype=np.uint64)
    return np.lib.stride_tricks.as_strided(array[:, :8].view(np.uint64), shape, (array.strides[0], 8))


def _refuse(bad: int) -> None:
    if bad:
        raise ValueError("Packed calls are 0, 1, 2 or missing, but some are larger. Store these as a plain matrix.")


# Eight calls, or packed bytes, side by side in one 64-bit word: the lanes below never carry into each other.
_ONES = np.uint64(0x0101010101010101)
_THREES = np.uint64(0x0303030303030303)
_HIGH = np.uint64(0x7C7C7C7C7C7C7C7C)  # bits that calls up to 3 leave clear
_U1, _U2, _U7, _FULL = np.uint64(1), np.uint64(2), np.uint64(7), np.uint64(0xFF)
_EVEN_2, _EVEN_4 = np.uint64(0x3333333333333333), np.uint64(0x0F0F0F0F0F0F0F0F)
_EVEN_8, _EVEN_16, _EVEN_32 = (
    np.uint64(0x00FF00FF00FF00FF),
    np.uint64(0x0000FFFF0000FFFF),
    np.uint64(0x00000000FFFFFFFF),
)
_S2, _S4, _S8, _S16, _S32 = np.uint64(2), np.uint64(4), np.uint64(8), np.uint64(16), np.uint64(32)


@numba.njit(nogil=True, cache=True, inline="always")
def _code(call):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    return 3 if call < 0 else call & 3


@numba.njit(nogil=True, cache=True)
def _pack_rows(calls, out):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    n, m = calls.shape
    bad = False
    for i in range(n):
        row = calls[i]
        for b in range(m // 4):
            c0, c1, c2, c3 = row[4 * b], row[4 * b + 1], row[4 * b + 2], row[4 * b + 3]
            bad |= max(max(c0, c1), max(c2, c3)) > 2
            out[i, b] = _code(c0) | _code(c1) << 2 | _code(c2) << 4 | _code(c3) << 6
        if m % 4:
            byte = 0
            for j in range(m // 4 * 4, m):
                bad |= row[j] > 2
                byte |= _code(row[j]) << 2 * (j % 4)
            out[i, m // 4] = byte
    return bad


@numba.njit(nogil=True, cache=True, inline="always")
def _turn_bytes(block):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Transpose 8 × 8 bytes, a word being a row: swap neighbours at distance 1, 2 and 4."""
    for b in range(0, 8, 2):
        x, y = block[b], block[b + 1]
        block[b] = (x & _EVEN_8) | ((y & _EVEN_8) << _S8)
        block[b + 1] = ((x >> _S8) & _EVEN_8) | (y & ~_EVEN_8)
    for b in (0, 1, 4, 5):
        x, y = block[b], block[b + 2]
        block[b] = (x & _EVEN_16) | ((y & _EVEN_16) << _S16)
        block[b + 2] = ((x >> _S16) & _EVEN_16) | (y & ~_EVEN_16)
    for b in range(4):
        x, y = block[b], block[b + 4]
        block[b] = (x & _EVEN_32) | (y << _S32)
        block[b + 4] = (x >> _S32) | (y & ~_EVEN_32)


@numba.njit(nogil=True, cache=True)
def _pack_variants(calls, words, out, out_words):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Pack 32 variants × 8 donors at a time: `words` and `out_words` are `calls` and `out` by eight bytes."""
    m, n = calls.shape
    lanes, groups = words.shape[1], out_words.shape[1]
    bad = np.uint64(0)
    block = np.empty(8, dtype=np.uint64)
    for group in range(groups):
        for lane in range(lanes):
            for b in range(8):
                packed = np.uint64(0)
                shift = np.uint64(0)
                for k in range(4):
                    word = words[32 * group + 4 * b + k, lane]
                    negative = ((word >> _U7) & _ONES) * _FULL
                    bad |= ((word & _HIGH) | (word & (word >> _U1) & _ONES)) & ~negative
                    packed |= ((word | negative) & _THREES) << shift
                    shift += _U2
                block[b] = packed
            _turn_bytes(block)
            for k in range(8):
                out_words[8 * lane + k, group] = block[k]
    # what is left over on either side, one call at a time
    too_large = bad != 0
    for b in range(out.shape[1]):
        for i in range(8 * lanes if b < 8 * groups else 0, n):
            byte = 0
            for k in range(min(4, m - 4 * b)):
                call = calls[4 * b + k, i]
                too_large |= call > 2
                byte |= _code(call) << 2 * k
            out[i, b] = byte
    return too_large


@numba.njit(nogil=True, cache=True)
def _turn_packed(by_variant, words, out, out_words):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Turn 32 variants × 32 donors at a time: `words` and `out_words` are the two matrices by eight bytes."""
    m, n = by_variant.shape[0], out.shape[0]
    lanes, groups = words.shape[1], out_words.shape[1]
    # four blocks of 8 × 8 bytes: of donors 0, 4, 8, …, of donors 1, 5, 9, … and so on; a row is four variants
    blocks = np.empty((4, 8), dtype=np.uint64)
    for group in range(groups):
        for lane in range(lanes):
            for b in range(8):
                # in each of the eight bytes, transpose 4 × 4 calls: swap neighbours at distance 1 and 2
                v = 32 * group + 4 * b
                w, x, y, z = words[v, lane], words[v + 1, lane], words[v + 2, lane], words[v + 3, lane]
                w, x = (w & _EVEN_2) | ((x & _EVEN_2) << _S2), ((w >> _S2) & _EVEN_2) | (x & ~_EVEN_2)
                y, z = (y & _EVEN_2) | ((z & _EVEN_2) << _S2), ((y >> _S2) & _EVEN_2) | (z & ~_EVEN_2)
                blocks[0, b] = (w & _EVEN_4) | ((y & _EVEN_4) << _S4)
                blocks[1, b] = (x & _EVEN_4) | ((z & _EVEN_4) << _S4)
                blocks[2, b] = ((w >> _S4) & _EVEN_4) | (y & ~_EVEN_4)
                blocks[3, b] = ((x >> _S4) & _EVEN_4) | (z & ~_EVEN_4)
            for j in range(4):
                block = blocks[j]
                _turn_bytes(block)
                for k in range(8):
                    out_words[32 * lane + 4 * k + j, group] = block[k]
    # what is left over on either side, one call at a time
    for b in range(out.shape[1]):
        for i in range(32 * lanes if b < 8 * groups else 0, n):
            byte = 0
            for k in range(min(4, m - 4 * b)):
                byte |= (by_variant[4 * b + k, i // 4] >> 2 * (i % 4) & 3) << 2 * k
            out[i, b] = byte
