"""Copies past the cache, and dense batches that are made with them: the same bytes as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import donorloader._vectors as vectors
from donorloader._buffers import BufferPool
from donorloader._vectors import copy_past_cache
from donorloader.cells import fill_dense, to_dense


@given(n=st.integers(0, 300), start=st.integers(0, 70), source_start=st.integers(0, 70))
def test_any_place_and_length(n: int, start: int, source_start: int) -> None:
    source = np.random.default_rng(n).integers(0, 255, 400, dtype=np.uint8)
    to = np.full(400, 255, dtype=np.uint8)
    copy_past_cache(to.ctypes.data + start, source.ctypes.data + source_start, n)
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


def test_memory_that_is_used_again() -> None:
    pool = BufferPool(keep=1)
    for seed in range(3):
        X = sp.random(1_024, 2_100, density=0.05, format="csr", random_state=seed, dtype=np.float32)
        np.testing.assert_array_equal(to_dense(X, pool), X.toarray())
