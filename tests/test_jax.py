"""Batches as JAX arrays: the same as numpy's, and JAX is left alone unless it is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy import sparse

import donorloader as dl
from donorloader.pipeline import jax_converter

jax = pytest.importorskip("jax", reason="jax is not installed here; `make test-jax` installs it and runs this")
jnp = pytest.importorskip("jax.numpy")
BCSR = pytest.importorskip("jax.experimental.sparse").BCSR

if TYPE_CHECKING:
    from _data import Store


def same(ours: Any, theirs: Any) -> None:
    """JAX's, field by field, against numpy's."""
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        if isinstance(expected, dict):
            same(ours[name], expected)
        elif isinstance(expected, np.ndarray) and expected.dtype == object:
            np.testing.assert_array_equal(ours[name], expected)
        elif expected is None or name == "obs":
            assert ours[name] is None or ours[name].equals(expected)
        else:
            got = ours[name]
            assert isinstance(got, BCSR if hasattr(expected, "indptr") else jax.Array), name
            if isinstance(got, BCSR):  # made dense by scipy: JAX would compile it for every number of values
                got = sparse.csr_matrix(tuple(map(np.asarray, (got.data, got.indices, got.indptr))), shape=got.shape)
                got = got.toarray()
            got = np.asarray(got)
            dense = expected.toarray() if hasattr(expected, "toarray") else expected
            assert got.dtype.kind == dense.dtype.kind
            assert got.dtype.itemsize == min(4, dense.dtype.itemsize), name
            np.testing.assert_array_equal(got, dense)


@pytest.mark.parametrize(("dtype", "densify"), [("int8", False), ("float64", True)])
def test_cells(store: Store, dtype: str, densify: bool) -> None:
    options = {"batch_size": 32, "obs_columns": ["cell_type"], "densify": densify, "seed": 3}
    arguments = store.cells(3).path, store.genotypes(dtype).source
    with (
        dl.DonorLoader(*arguments, to="jax", **options) as ours,
        dl.DonorLoader(*arguments, to="numpy", **options) as theirs,
    ):
        # all batches are kept, so that memory that is lent out twice would show
        for batch, expected in zip(list(ours), theirs, strict=True):
            same(batch, expected)
        state = ours.state_dict()
        assert (state["epoch"], state["batches"]) == (1, 0)


@pytest.mark.filterwarnings("ignore:Bags are read fastest")
def test_bags(store: Store) -> None:
    options = {"bags_per_batch": 4, "labels": "donor_id", "donor_covariates": ["donor_id"], "densify": True}
    arguments = store.cells(3).path, store.genotypes().source
    with (
        dl.BagLoader(*arguments, to="jax", **options) as ours,
        dl.BagLoader(*arguments, to="numpy", **options) as theirs,
    ):
        for batch, expected in zip(ours, theirs, strict=True):
            same(batch, expected)


def test_a_compiled_step_takes_them(store: Store) -> None:
    @jax.jit
    def step(weights: Any, x: Any, features: Any, donor_idx: Any) -> Any:
        return x @ weights + features[donor_idx].sum(axis=1)

    cells = store.cells(3)
    weights = jnp.arange(cells.x.shape[1], dtype=jnp.float32)
    for densify in (False, True):
        with dl.DonorLoader(cells.path, store.genotypes().source, batch_size=64, to="jax", densify=densify) as loader:
            batch = next(iter(loader))
        got = step(weights, batch["X"], batch["donor_features"].astype(jnp.float32), batch["donor_idx"])
        rows = np.asarray(batch["index"])
        expected = cells.x[rows] @ np.arange(cells.x.shape[1]) + store.genotypes().rows(cells.donor[rows]).sum(axis=1)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_numbers_that_32_bits_do_not_hold_are_refused() -> None:
    convert = jax_converter()
    assert convert(np.array([2**31 - 1])).dtype == jnp.int32
    with pytest.raises(ValueError, match=r"2147483648.*jax_enable_x64"):
        convert(np.array([0, 2**31]))
    with jax.enable_x64(True):
        assert convert(np.array([2**40])).dtype == jnp.int64


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"preload_to_gpu": True}])
def test_options_of_torch_are_refused(store: Store, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="to='torch'"):
        dl.DonorLoader(store.cells(3).path, to="jax", **options)


def test_absent_jax_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ImportError, match=r"donorloader\[jax\]"):
        dl.DonorLoader(store.cells(3).path, to="jax")
