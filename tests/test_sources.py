"""Sources that differ from the usual in ways that must not change a value, a cell or an order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.abc import Sampler
from scipy import sparse

import donorloader as dl
from _data import as_numpy, write_collection
from donorloader.samplers import replay, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from annbatch.types import LoadRequest

    from _data import Store


def cells(n: int = 40, **obs: Any) -> ad.AnnData:
    table = {"donor_id": [f"d{i % 4}" for i in range(n)]} | obs
    x = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    return ad.AnnData(sparse.csr_matrix(x), obs=pd.DataFrame(table, index=[f"c{i}" for i in range(n)]))


def test_a_collection_of_genotypes_with_variants_in_two_orders(store: Store, tmp_path: Path) -> None:
    """Its rows would be read under the names of the first dataset."""
    G = store.genotypes().source
    path = write_collection(tmp_path / "g.zarr", [G[:6].copy(), G[6:, ::-1].copy()], rows_per_chunk=3)
    with pytest.raises(ValueError, match=r"same variants in the same order.*dataset_1"):
        dl.open_genotypes(path)


@pytest.mark.parametrize("dtype", [">f4", ">i2", "<f4"])
def test_genotypes_of_either_byte_order(store: Store, dtype: str) -> None:
    G = ad.AnnData((np.arange(8).reshape(4, 2) + 1).astype(dtype), obs=pd.DataFrame(index=[f"d{i}" for i in range(4)]))
    with dl.DonorLoader(cells(), G, batch_size=8) as loader:
        for batch in loader:
            rows = [int(d[1:]) for d in batch["unique_donors"]]
            np.testing.assert_array_equal(as_numpy(batch["donor_features"]), np.arange(8).reshape(4, 2)[rows] + 1)


class TestOrderedCategories:
    """A false order would make `cells_query` choose other cells."""

    def prepared(self, tmp_path: Path, first: list[str], second: list[str]) -> dl.Study:
        parts = []
        for levels in (first, second):
            stage = pd.Categorical(np.resize(levels, 40), categories=levels, ordered=True)
            parts.append(cells(stage=stage))
        return dl.prepare(parts, out=tmp_path / "study")

    def test_are_kept_where_they_agree(self, tmp_path: Path) -> None:
        study = self.prepared(tmp_path, ["low", "mid", "high"], ["low", "high"])
        with dl.DonorLoader(study, cells_query="stage >= 'mid'", obs_columns=["stage"]) as loader:
            found = pd.concat([batch["obs"] for batch in loader])["stage"]
        assert len(found) == 40 - 14 + 20
        assert set(found) == {"mid", "high"}
        assert list(found.cat.categories) == ["low", "mid", "high"]

    def test_are_dropped_where_they_do_not(self, tmp_path: Path) -> None:
        study = self.prepared(tmp_path, ["low", "mid", "high"], ["high", "low"])
        with dl.DonorLoader(study, obs_columns=["stage"]) as loader:
            assert not next(iter(loader))["obs"]["stage"].cat.ordered


class Own(Sampler):
    """One batch of random rows; subclasses say from where the randomness comes."""

    batch_size = 6
    shuffle = True

    def n_batches(self, n_obs: int) -> int:
        return 1

    def validate(self, n_obs: int) -> None:
        pass

    def rows(self, n_obs: int) -> Any:
        raise NotImplementedError

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        yield {"requests": np.asarray(self.rows(n_obs)), "splits": [np.arange(6)]}


class OfTorch(Own):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def rows(self, n_obs: int) -> Any:
        return torch.randperm(n_obs, generator=self.generator)[:6].numpy()


class OfEpoch(Own):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def rows(self, n_obs: int) -> Any:
        return np.random.default_rng(self.epoch).permutation(n_obs)[:6]


@pytest.mark.parametrize("sampler", [OfTorch(), OfEpoch()], ids=["torch", "set_epoch"])
def test_other_samplers_follow_the_epoch(sampler: Sampler) -> None:
    order = [[request_rows(r["requests"]).tolist() for r in replay(sampler, 1000, seed=0, epoch=e)] for e in (0, 0, 1)]
    assert order[0] == order[1]
    assert order[0] != order[2]


def test_a_donor_data_under_another_name(tmp_path: Path) -> None:
    """What a store is, is in the store, not in its name."""
    import zarr

    group = zarr.open_group(str(tmp_path / "renamed.zarr"), mode="w", zarr_format=3)
    ad.io.write_elem(group, "C", cells())
    G = ad.AnnData(np.arange(8, dtype=np.int8).reshape(4, 2), obs=pd.DataFrame(index=[f"d{i}" for i in range(4)]))
    ad.io.write_elem(group, "G", G)
    group.attrs.update({"encoding-type": "donordata", "donor_id": "donor_id"})
    with dl.DonorLoader(tmp_path / "renamed.zarr") as loader:
        assert next(iter(loader))["donor_features"].shape == (4, 2)


class TestQueries:
    def test_read_the_columns_that_they_name(self) -> None:
        first, second = cells(ct=["B"] * 40, B=1), cells(ct=["B"] * 40)
        with dl.DonorLoader([first, second], cells_query="ct == 'B'") as loader:
            assert loader.n_obs == 80

    def test_names_in_backticks(self) -> None:
        adata = cells(**{"n counts": np.arange(40)})
        with dl.DonorLoader(adata, cells_query="`n counts` < 7") as loader:
            assert loader.n_obs == 7


@pytest.mark.parametrize("other", [pd.Categorical(["1"] * 40), pd.Categorical([1] * 40)])
def test_categories_of_other_types(other: Any) -> None:
    parts = [cells(ct=pd.Categorical([np.nan] * 40)), cells(ct=other)]
    with dl.DonorLoader(parts, obs_columns=["ct"]) as loader:
        obs = pd.concat([batch["obs"] for batch in loader]).sort_index()
    assert obs["ct"][:40].isna().all()
    assert (obs["ct"][40:].astype(str) == "1").all()


def test_a_float_among_ids_is_refused() -> None:
    """As the text of 1.0 is not that of 1, but their hashes are equal."""
    mixed = pd.Series(np.resize(np.array([1, 1.0, "1"], dtype=object), 40), dtype=object)
    adata = cells()
    adata.obs["donor_id"] = mixed.to_numpy()
    with pytest.raises(TypeError, match=r"text or integers.*float"):
        dl.DonorLoader(adata)
    with pytest.raises(TypeError, match=r"donors holds float"):
        dl.DonorLoader(cells(), donors=[1.0, "d1"])
