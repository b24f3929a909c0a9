"""Copies by address, past the cache or not, and dense batches that are made with them: the bytes they should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import donorloader._vectors as vectors
import donorloader.cells._stream as _stream
from donorloader._buffers import BufferPool
from donorloader._vectors import copy_bytes, copy_past_cache
from donorloader.cells import fill_dense, to_dense


@pytest.mark.parametrize("copy", [copy_bytes, copy_past_cache])
@given(n=st.integers(0, 300), start=st.integers(0, 70), source_start=st.integers(0, 70))
def test_any_place_and_length(copy: Any, n: int, start: int, source_start: int) -> None:
    source = np.random.default_rng(n).integers(0, 255, 400, dtype=np.uint8)
    to = np.full(400, 255, dtype=np.uint8)
    copy(to.ctypes.data + start, source.ctypes.data + source_start, n)
    np.testing.assert_array_equal(to[start : start + n], source[source_start : source_start + n])
    assert (to[:start] == 255).all()
    assert (to[start + n :] == 255).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int16])
@pytest.mark.parametrize("shape", [(1_100, 2_051), (3, 1_500_003)])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_large_dense_batches(dtype: Any, shape: tuple[int, int], index: Any) -> None:
    X = sp.random(*shape, density=0.02, format="csr", random_state=1)
    X.data = np.arange(1, X.nnz + 1).astype(dtype)
    X.indices, X.indptr = X.indices.astype(index), X.indptr.astype(index)
    X.indices[X.indptr[1]] = X.indices[X.indptr[1] + 1]  # a column stored twice, which adds up
    out = np.full(shape, 7, dtype=dtype)
    if dtype != np.int16:
        assert out.nbytes >= vectors.LARGE
    fill_dense(X.data, X.indices, X.indptr, out)
    np.testing.assert_array_equal(out, X.toarray())
    out[:] = 7
    fill_dense(X.data, X.indices, X.indptr[1:], out[1:])
    np.testing.assert_array_equal(out[1:], X.toarray()[1:])
    assert (out[0] == 7).all()


@pytest.mark.parametrize("at", [0, 4, 8, 20])
@pytest.mark.parametrize("n_columns", [1, 7, 511, 512, 521, 5_005])
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint16, np.uint64])
def test_columns_in_any_order(monkeypatch: pytest.MonkeyPatch, at: int, n_columns: int, index: Any) -> None:
    """Rows with ascending columns, without any, with all, and with columns in no order, next to each other."""
    monkeypatch.setattr(_stream, "LARGE", 0)
    rng = np.random.default_rng(n_columns + at)
    X = sp.random(40, n_columns, density=0.3, format="csr", random_state=rng, dtype=np.float32)
    X = sp.vstack([X, sp.csr_matrix((2, n_columns), dtype=np.float32), np.ones((2, n_columns), np.float32), X]).tocsr()
    indices, data = X.indices.astype(index), X.data.copy()
    for i in range(0, X.shape[0], 2):
        row = slice(X.indptr[i], X.indptr[i + 1])
        order = rng.permutation(row.stop - row.start)
        indices[row], data[row] = indices[row][order], data[row][order]
    memory = np.full(4 * X.shape[0] * n_columns + 256, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + at
    stop = start + 4 * X.shape[0] * n_columns
    out = memory[start:stop].view(np.float32).reshape(X.shape)
    fill_dense(data, indices, X.indptr, out)
    np.testing.assert_array_equal(out, X.toarray())
    assert (memory[:start] == 0xA5).all()
    assert (memory[stop:] == 0xA5).all()


def test_memory_that_is_used_again() -> None:
    pool = BufferPool(keep=1)
    for seed in range(3):
        X = sp.random(1_024, 2_100, density=0.05, format="csr", random_state=seed, dtype=np.float32)
        np.testing.assert_array_equal(to_dense(X, pool), X.toarray())
