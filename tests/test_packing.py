"""Two bits a call: what is packed comes back, and any selection is numpy's of the unpacked matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from donorloader.genotypes import _unpacking
from donorloader.genotypes._packing import pack_rows, pack_variants, packed_width, turn_packed
from donorloader.genotypes._unpacking import gather_packed, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

SHAPES = st.tuples(st.integers(1, 80), st.integers(1, 200))


def calls_of(shape: tuple[int, int], seed: int, *, all_missing: bool = False) -> NDArray[np.int8]:
    if all_missing:
        return np.full(shape, -1, dtype=np.int8)
    return np.random.default_rng(seed).integers(-1, 3, shape, dtype=np.int8)


def naive_pack(calls: NDArray[np.int8]) -> NDArray[np.uint8]:
    out = np.zeros((calls.shape[0], -(-calls.shape[1] // 4)), dtype=np.uint8)
    for (i, j), call in np.ndenumerate(calls):
        out[i, j // 4] |= (3 if call < 0 else int(call)) << 2 * (j % 4)
    return out


@given(shape=SHAPES, seed=st.integers(0, 2**31), all_missing=st.booleans())
def test_packed_bytes_are_the_documented_ones(shape: tuple[int, int], seed: int, all_missing: bool) -> None:
    calls = calls_of(shape, seed, all_missing=all_missing)
    expected = naive_pack(calls)
    np.testing.assert_array_equal(pack_rows(calls), expected)
    # variant by variant, into part of wider rows, whose other bytes stay
    wide = np.full((shape[0], expected.shape[1] + 5), 255, dtype=np.uint8)
    pack_variants(np.ascontiguousarray(calls.T), wide[:, 3 : 3 + expected.shape[1]])
    np.testing.assert_array_equal(wide[:, 3:-2], expected)
    assert (wide[:, :3] == 255).all()
    assert (wide[:, -2:] == 255).all()
    np.testing.assert_array_equal(unpack(expected, slice(0, shape[1])), calls)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (1, 5), (3, 1), (8, 32), (9, 33), (64, 4096), (65, 8195), (7, 4099)])
def test_shapes_at_the_edges_of_the_blocks(shape: tuple[int, int]) -> None:
    calls = calls_of(shape, 7)
    out = np.empty((shape[0], packed_width(shape[1])), dtype=np.uint8)
    pack_variants(np.asfortranarray(calls).T, out)
    np.testing.assert_array_equal(out, pack_rows(calls))
    np.testing.assert_array_equal(unpack(out, slice(0, shape[1])), calls)


EDGES = st.sampled_from([1, 3, 4, 5, 31, 32, 33, 64, 65]) | st.integers(1, 140)


@settings(max_examples=30)
@given(n_donors=EDGES, n_variants=EDGES, seed=st.integers(0, 2**31))
@example(n_donors=33, n_variants=65, seed=0)
@example(n_donors=65, n_variants=33, seed=0)
@example(n_donors=32, n_variants=64, seed=0)
@example(n_donors=31, n_variants=31, seed=0)
def test_packed_variants_are_turned(n_donors: int, n_variants: int, seed: int) -> None:
    calls = calls_of((n_donors, n_variants), seed)
    by_variant = pack_rows(np.ascontiguousarray(calls.T))
    if n_donors % 4:  # calls past the last donor
        garbage = np.random.default_rng(seed).integers(0, 256, n_variants, dtype=np.uint8)
        by_variant[:, -1] |= garbage << np.uint8(2 * (n_donors % 4))
    given_bytes, expected = by_variant.copy(), pack_rows(calls)
    # into part of wider rows, whose other bytes stay
    wide = np.full((n_donors, expected.shape[1] + 5), 0xA5, dtype=np.uint8)
    turn_packed(by_variant, wide[:, 3:-2], n_donors)
    np.testing.assert_array_equal(wide[:, 3:-2], expected)
    assert (wide[:, [0, 1, 2, -2, -1]] == 0xA5).all()
    np.testing.assert_array_equal(by_variant, given_bytes)
    # from bytes that do not lie one after the other
    out = np.empty_like(expected)
    turn_packed(np.repeat(by_variant, 2, axis=1)[:, ::2], out, n_donors)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("n_donors", "width", "out"), [(5, 1, (5, 3)), (5, 3, (5, 3)), (5, 2, (4, 3)), (5, 2, (5, 2)), (9, 2, (5, 3))]
)
def test_packed_variants_of_another_shape(n_donors: int, width: int, out: tuple[int, int]) -> None:
    place = np.zeros(out, dtype=np.uint8)
    with pytest.raises(ValueError, match=rf"9 variants and {n_donors} donors"):
        turn_packed(np.full((9, width), 255, dtype=np.uint8), place, n_donors)
    assert not place.any()


@pytest.mark.parametrize("missing", [-1, -9, -127, -128])
def test_any_negative_call_is_missing(missing: int) -> None:
    calls = np.tile(np.array([0, missing, 2, 1, missing], dtype=np.int8), (40, 9))
    out = np.empty((40, packed_width(45)), dtype=np.uint8)
    pack_variants(np.ascontiguousarray(calls.T), out)
    for packed in (out, pack_rows(calls)):
        np.testing.assert_array_equal(unpack(packed, slice(0, 45)), np.maximum(calls, -1))


@pytest.mark.parametrize("call", [3, 4, 5, 6, 7, 8, 16, 32, 64, 127])
@pytest.mark.parametrize("where", [(0, 0), (7, 31), (8, 32), (11, 40)])
def test_larger_calls_are_refused(call: int, where: tuple[int, int]) -> None:
    calls = calls_of((12, 41), 1)
    calls[where] = call
    with pytest.raises(ValueError, match=r"0, 1, 2 or missing"):
        pack_rows(calls)
    with pytest.raises(ValueError, match=r"0, 1, 2 or missing"):
        pack_variants(np.ascontiguousarray(calls.T), np.empty((12, 11), dtype=np.uint8))


@given(data=st.data(), shape=SHAPES, seed=st.integers(0, 2**31), dtype=st.sampled_from(["i1", "f2", "f4", "f8", "i8"]))
def test_any_selection_is_that_of_numpy(data: Any, shape: tuple[int, int], seed: int, dtype: str) -> None:
    calls = calls_of(shape, seed)
    packed = pack_rows(calls)
    rows = np.asarray(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=90)), dtype=np.int64)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, shape[1]))
        columns: Any = slice(start, data.draw(st.integers(start, shape[1])))
    else:
        columns = np.asarray(data.draw(st.lists(st.integers(0, shape[1] - 1), max_size=60)), dtype=np.int64)
    chosen = calls[rows][:, columns]
    values = np.array([10, 11, 12, 13]).astype(dtype)
    out = np.empty(chosen.shape, dtype=dtype)
    gather_packed(packed, rows, columns, values, out)
    np.testing.assert_array_equal(out, values[chosen % 4])
    for at in range(0, 32, out.itemsize):  # where large arrays begin among vectors
        memory = np.full(out.nbytes + 128, 0xA5, dtype=np.uint8)
        start = -memory.ctypes.data % 32 + at
        there = memory[start : start + out.nbytes].view(dtype).reshape(out.shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_unpacking, "LARGE", 0)
            gather_packed(packed, rows, columns, values, there)
        np.testing.assert_array_equal(there, out)
        assert (memory[:start] == 0xA5).all()
        assert (memory[start + out.nbytes :] == 0xA5).all()

    by_variant = np.random.default_rng(seed).integers(-100, 100, (4, chosen.shape[1])).astype(dtype)
    gather_packed(packed, rows, columns, by_variant, out)
    np.testing.assert_array_equal(out, np.take_along_axis(by_variant, chosen % 4, axis=0))


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_views_of_larger_arrays(dtype: Any) -> None:
    calls = calls_of((9, 203), 1)
    wide = np.full((9, 80), 0xFF, dtype=np.uint8)
    wide[:, 5 : 5 + packed_width(203)] = pack_rows(calls)
    values, rows = np.array([0, 1, 2, 7]).astype(dtype), np.array([8, 0, 3])
    for packed in (wide[:, 5 : 5 + packed_width(203)], np.asfortranarray(pack_rows(calls))):
        for large in (0, 1 << 30):
            out = np.zeros((3, 300), dtype=dtype)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_unpacking, "LARGE", large)
                gather_packed(packed, rows, slice(1, 203), values, out[:, 50:252])
            np.testing.assert_array_equal(out[:, 50:252], values[calls[rows][:, 1:] % 4])
            assert not out[:, :50].any()
            assert not out[:, 252:].any()


@pytest.mark.parametrize("columns", [slice(0, 20_001), slice(4_095, 12_289), slice(3, 4_100), np.arange(20_000, 2, -3)])
def test_rows_longer_than_the_scratch(columns: Any) -> None:
    calls = calls_of((3, 20_001), 5)
    rows = np.array([2, 0, 2, 1])
    chosen = calls[rows][:, columns]
    out = np.empty(chosen.shape, dtype=np.float32)
    values = np.array([0, 1, 2, np.nan], dtype=np.float32)
    gather_packed(pack_rows(calls), rows, columns, values, out)
    np.testing.assert_array_equal(out, values[chosen % 4])


def test_large_gathers_are_compiled_with_small_ones() -> None:
    """A loader gathers one row when it is made, so that none of its steps pays for a compilation."""
    packed, values = pack_rows(calls_of((1, 40), 1)), np.array([0, 1, 2, -1], dtype=np.int8)
    for large in (1 << 30, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_unpacking, "LARGE", large)
            gather_packed(packed, np.zeros(1, dtype=np.int64), slice(0, 40), values, np.empty((1, 40), dtype=np.int8))
        compiled = len(_unpacking._gather_slice.signatures)
        if large:
            first = compiled
    assert compiled == first
