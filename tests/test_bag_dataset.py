"""Bags by number and by donor, one by one and through torch's DataLoader."""

from __future__ import annotations

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

import donorloader as dl
from _data import as_numpy

if TYPE_CHECKING:
    from _data import Store

pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")


def labels() -> pd.DataFrame:
    names = [f"d{i}" for i in range(13)]
    return pd.DataFrame({"sick": [f"s{i % 2}" for i in range(13)], "age": np.arange(13) + 20.5}, index=names)


def dataset(store: Store, n_datasets: int = 3, **options: Any) -> dl.BagDataset:
    table = {"labels": "sick", "donor_covariates": ["age"], "donor_table": labels()}
    genotypes = store.genotypes(backing="zarr").source
    return dl.BagDataset(store.cells(n_datasets).path, genotypes, **(table | options))


class TestItems:
    @pytest.mark.parametrize("densify", [False, True])
    @pytest.mark.parametrize("cell_memory", ["1KB", "512MB"])
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    def test_are_their_donors(self, store: Store, layout: str, cell_memory: str, densify: bool) -> None:
        cells, genotypes = store.cells(3, layout), store.genotypes()
        bags = dl.BagDataset(
            cells.path, genotypes.source, max_cells=None, densify=densify, cell_memory=cell_memory, obs_columns=["row"]
        )
        assert len(bags) == 13
        assert sorted(bags.donors) == sorted(set(cells.donor))
        for number, donor in enumerate(bags.donors):
            item = bags[number]
            index = item["index"].numpy()
            assert item["donor"] == donor
            assert sorted(index) == sorted(np.flatnonzero(cells.donor == donor))
            np.testing.assert_array_equal(as_numpy(item["X"]), cells.x[index])
            np.testing.assert_array_equal(as_numpy(item["donor_features"]), genotypes.rows([donor])[0])
            np.testing.assert_array_equal(item["obs"]["row"], index)

    def test_by_id(self, store: Store) -> None:
        bags = dataset(store)
        assert bags["d7"]["donor"] == "d7"
        assert bags[-1]["donor"] == bags.donors[-1]
        with pytest.raises(KeyError, match="no bag 'nobody'"):
            bags["nobody"]
        with pytest.raises(IndexError, match="13 bags"):
            bags[13]

    def test_finer_bags(self, store: Store) -> None:
        cells = store.cells(3)
        bags = dl.BagDataset(cells.path, bag_by=["donor_id", "cell_type"], max_cells=None)
        obs = cells.obs.reset_index(drop=True)
        groups = obs.groupby(["donor_id", "cell_type"]).groups
        assert {tuple(d) for d in bags.donors} == set(groups)
        for key, rows in groups.items():
            assert sorted(bags[key]["index"].tolist()) == sorted(rows)

    def test_subsets_depend_on_seed_epoch_and_bag_alone(self, store: Store) -> None:
        one, two = dataset(store, max_cells=5), dataset(store, max_cells=5)
        drawn = [one[i]["index"].tolist() for i in range(13)]
        assert [two[i]["index"].tolist() for i in reversed(range(13))] == drawn[::-1]
        one.set_epoch(1)
        assert [one[i]["index"].tolist() for i in range(13)] != drawn
        one.set_epoch(0)
        assert one["d3"]["index"].tolist() == two["d3"]["index"].tolist()
        assert all(len(rows) == len(set(rows)) <= 5 for rows in drawn)
        one.set_epoch(1)
        large = [number for number, donor in enumerate(one.donors) if (store.cells(3).donor == donor).sum() > 5]
        assert len(large) > 5
        assert all(set(one[number]["index"].tolist()) != set(drawn[number]) for number in large)

    def test_threads_may_share_it(self, store: Store) -> None:
        bags = dl.BagDataset(
            store.cells(3).path, bag_by=["donor_id", "cell_type"], obs_columns=["donor_id", "cell_type"]
        )

        def read(number: int) -> bool:
            obs = bags[number]["obs"]
            return {tuple(map(str, row)) for row in obs.to_numpy()} == {bags.donors[number]}

        with ThreadPoolExecutor(4) as pool:
            numbers = np.random.default_rng(0).integers(0, len(bags), 200)
            assert all(pool.map(read, map(int, numbers)))

    def test_a_closed_dataset_says_so(self, store: Store) -> None:
        bags = dataset(store)
        bags.close()
        with pytest.raises(ValueError, match="closed"):
            bags[0]

    def test_options_are_checked(self, store: Store) -> None:
        with pytest.raises(ValueError, match="min_cells must not exceed"):
            dataset(store, min_cells=9, max_cells=3)
        with pytest.raises(TypeError, match="must be a list of names"):
            dataset(store, obs_columns="row")
        with pytest.raises(ValueError, match="epoch must be an integer"):
            dataset(store).set_epoch(-1)

    def test_a_wrong_donor_is_noticed(self, store: Store) -> None:
        bags = dataset(store)
        bags._source.donors = np.roll(bags._source.donors, 1)
        with pytest.raises(RuntimeError, match="do not belong together"):
            bags[0]


class TestDataLoader:
    @pytest.mark.parametrize("densify", [False, True])
    def test_batches_are_those_of_a_bag_loader(self, store: Store, densify: bool) -> None:
        options: dict[str, Any] = {"max_cells": None, "densify": densify, "obs_columns": ["row"]}
        bags = dataset(store, **options)
        table = {"labels": "sick", "donor_covariates": ["age"], "donor_table": labels()}
        genotypes = store.genotypes().source
        streamed = dl.BagLoader(store.cells(3).path, genotypes, shuffle=False, bags_per_batch=4, **(table | options))
        batches = list(DataLoader(bags, batch_size=4, collate_fn=dl.collate_bags))
        with streamed:
            for batch, expected in zip(batches, streamed, strict=True):
                assert batch.keys() == expected.keys()
                for key in ("offsets", "donor_idx", "donor_features", "labels"):
                    assert torch.equal(batch[key], expected[key]), key
                    assert batch[key].dtype == expected[key].dtype
                assert list(batch["donors"]) == list(expected["donors"])
                assert torch.equal(batch["donor_covariates"]["age"], expected["donor_covariates"]["age"])
                # cells of a bag come in another order: by the row, they are the same
                order, rows = batch["index"].argsort(), expected["index"].argsort()
                assert torch.equal(batch["index"][order], expected["index"][rows])
                np.testing.assert_array_equal(as_numpy(batch["X"])[order], as_numpy(expected["X"])[rows])
                assert batch["obs"]["row"].tolist() == batch["index"].tolist()

    @pytest.mark.slow
    def test_spawned_workers(self, store: Store) -> None:
        """Two workers give what none gives, also in a second epoch for workers that live on."""
        bags = dataset(store, max_cells=6)
        settings: dict[str, Any] = {"batch_size": 3, "collate_fn": dl.collate_bags}
        workers = DataLoader(bags, num_workers=2, multiprocessing_context="spawn", persistent_workers=True, **settings)
        for epoch in (0, 1):
            bags.set_epoch(epoch)
            here, there = list(DataLoader(bags, **settings)), list(workers)
            for a, b in zip(here, there, strict=True):
                assert list(a["donors"]) == list(b["donors"])
                assert torch.equal(a["index"], b["index"])
                np.testing.assert_array_equal(as_numpy(a["X"]), as_numpy(b["X"]))
                assert torch.equal(a["donor_features"], b["donor_features"])

    def test_copies(self, store: Store) -> None:
        bags = dataset(store, max_cells=6)
        for twin in (pickle.loads(pickle.dumps(bags)), copy.deepcopy(bags)):
            assert torch.equal(twin[4]["index"], bags[4]["index"])

    @pytest.mark.parametrize("backing", ["zarr", "h5ad", "memory"])
    def test_copies_over_open_genotypes(self, store: Store, backing: str) -> None:
        """Which are opened again by their path and layer, as workers must; or copied, where they are in memory."""
        genotypes = store.genotypes(backing=backing)
        opened = dl.open_genotypes(genotypes.source)
        bags = dl.BagDataset(store.cells(3).path, opened, max_cells=6)
        twin, drawn = pickle.loads(pickle.dumps(bags)), [bags[number]["index"] for number in (0, 7)]
        opened.close()  # which the twin does not share
        for number, index in zip((0, 7), drawn, strict=True):
            assert torch.equal(twin[number]["index"], index)
            expected = genotypes.rows([twin.donors[number]])[0]
            np.testing.assert_array_equal(as_numpy(twin[number]["donor_features"]), expected)
        twin.close()

    def test_open_files_cannot_be_sent(self, store: Store) -> None:
        bags = dl.BagDataset(store.cells(3).path, dl.open_genotypes(store.genotypes(backing="backed").source))
        with pytest.raises(TypeError, match=r"handed over as an open file\. Open it by its path"):
            pickle.dumps(bags)

    def test_forked_processes_are_refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        bags = dataset(store)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="spawn"):
            bags[0]
