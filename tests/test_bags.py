"""Bags: each donor's cells and no others, each donor once, with its label and genotype row."""

from __future__ import annotations

import itertools
import warnings
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

import donorloader as dl
from _data import as_numpy, genotype_adata, write_collection, x_values
from donorloader.samplers import BagSampler, replay, request_rows

if TYPE_CHECKING:
    from pathlib import Path

    from _data import Store

# Bags of every kind of collection are wanted here, and most are not grouped
pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")

DISEASE = {f"d{i}": "sick" if i % 3 else "well" for i in range(13)}


def with_disease(store: Store) -> tuple[Any, Any]:
    genotypes = store.genotypes()
    adata = genotypes.source.copy()
    adata.obs["disease"] = pd.Categorical([DISEASE.get(i, "well") for i in adata.obs_names])
    adata.obs["age"] = np.arange(adata.n_obs) + 20.5
    return adata, genotypes


@st.composite
def bag_settings(draw: st.DrawFn) -> dict[str, Any]:
    options: dict[str, Any] = {
        "bags_per_batch": draw(st.sampled_from([1, 3, 8, 20])),
        "max_cells": draw(st.sampled_from([None, 1, 5, 30])),
        "window_cells": draw(st.sampled_from([1, 60, 16_384])),
        "seed": draw(st.integers(0, 3)),
        "prefetch": draw(st.sampled_from([0, 1, None])),
        "shuffle": draw(st.booleans()),
        "densify": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options |= {"exact_cells": draw(st.sampled_from([1, 12])), "max_cells": None}
        options["small_bags"] = draw(st.sampled_from(["resample", "drop"]))
    elif draw(st.booleans()):
        options["min_cells"] = draw(st.sampled_from([1, 4])) if options["max_cells"] != 1 else 1
        options["small_bags"] = draw(st.sampled_from(["keep", "resample", "drop"]))
    return options


class TestEveryBag:
    @given(n_datasets=st.sampled_from([1, 3, 4]), layout=st.sampled_from(["csr", "dense"]), options=bag_settings())
    def test_is_its_donors(self, store: Store, n_datasets: int, layout: str, options: dict[str, Any]) -> None:
        cells = store.cells(n_datasets, layout)
        G, genotypes = with_disease(store)
        sizes = pd.Series(cells.donor).value_counts()
        exact, low, high = (options.get(k) for k in ("exact_cells", "min_cells", "max_cells"))
        low, high = (exact, exact) if exact else (low, high)
        expected = {
            donor: n for donor, n in sizes.items() if not (options.get("small_bags") == "drop" and low and n < low)
        }
        with dl.BagLoader(cells.path, G, labels="disease", donor_covariates=["age"], **options) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
            seen = []
            for batch in batches:
                assert len(batch["donors"]) <= options["bags_per_batch"]
                offsets, index, x = (as_numpy(batch[k]) for k in ("offsets", "index", "X"))
                assert offsets[0] == 0
                assert offsets[-1] == index.size == x.shape[0]
                np.testing.assert_array_equal(x, cells.x[index])
                np.testing.assert_array_equal(as_numpy(batch["donor_features"]), genotypes.rows(batch["donors"]))
                np.testing.assert_array_equal(
                    as_numpy(batch["donor_idx"]), np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
                )
                for i, donor in enumerate(batch["donors"]):
                    rows = index[offsets[i] : offsets[i + 1]]
                    assert set(cells.donor[rows]) == {donor}
                    size = min(sizes[donor], high) if high else sizes[donor]
                    if options.get("small_bags") == "resample" and low:
                        size = max(size, low)
                    assert rows.size == size
                    assert len(set(rows)) == min(size, sizes[donor])
                    assert loader.label_names[batch["labels"][i]] == DISEASE[donor]
                    assert batch["donor_covariates"]["age"][i] == G.obs.loc[donor, "age"]
                    seen.append(donor)
            assert sorted(seen) == sorted(expected)

    def test_same_seed_and_epoch_same_bags(self, store: Store) -> None:
        cells = store.cells(3)
        loaders = [dl.BagLoader(cells.path, max_cells=5, prefetch=p) for p in (0, None)]
        orders = []
        for loader in loaders:
            for epoch in (0, 1):
                loader.set_epoch(epoch)
                orders.append([as_numpy(b["index"]).tolist() for b in loader])
            next(iter(loader))
            loader.set_epoch(0)
            assert [as_numpy(b["index"]).tolist() for b in loader] == orders[-2]
            loader.close()
        assert orders[0] == orders[2]
        assert orders[1] == orders[3]
        assert orders[0] != orders[1]

    def test_finer_bags(self, store: Store) -> None:
        cells = store.cells(3)
        by = ["donor_id", "cell_type"]
        with dl.BagLoader(cells.path, store.genotypes().source, bag_by=by, max_cells=None) as loader:
            seen = {}
            for batch in loader:
                offsets, index = as_numpy(batch["offsets"]), as_numpy(batch["index"])
                for i, bag in enumerate(batch["donors"]):
                    seen[bag] = sorted(index[offsets[i] : offsets[i + 1]].tolist())
        obs = cells.obs.reset_index(drop=True)
        expected = {key: sorted(rows.tolist()) for key, rows in obs.groupby(by).groups.items()}
        assert seen == expected

    def test_every_cell_is_seen_over_epochs(self) -> None:
        """Subsets are uniform: a chi-square of the counts of each cell over 50 epochs."""
        codes = np.repeat([0, 1], [90, 30])
        sampler = BagSampler(codes, max_cells=20, bags_per_batch=1, rng=np.random.default_rng(0))
        counts = np.zeros(codes.size)
        for epoch in range(50):
            for request in replay(sampler, codes.size, seed=0, epoch=epoch):
                for split in request["splits"]:
                    np.add.at(counts, request_rows(request["requests"])[split], 1)
        for bag, chance in ((0, 20 / 90), (1, 20 / 30)):
            observed, expected = counts[codes == bag], 50 * chance
            assert observed.min() > 0
            statistic = ((observed - expected) ** 2 / (expected * (1 - chance))).sum()
            n = observed.size
            assert abs(statistic - n) < 5 * np.sqrt(2 * n)

    def test_balanced_labels(self, store: Store) -> None:
        G, _ = with_disease(store)
        with dl.BagLoader(
            store.cells(3).path, G, labels="disease", balance="disease", n_bags=400, max_cells=1
        ) as loader:
            labels = np.concatenate([as_numpy(b["labels"]) for b in loader])
        assert labels.size == 400
        assert 150 < labels.sum() < 250

    def test_balance_counts_the_bags_that_are_drawn(self, store: Store) -> None:
        """Bags that are too small to be drawn say nothing of the others."""
        sizes = pd.Series(store.cells(3).donor).value_counts()
        large = sizes.index[sizes >= 10]
        table = pd.DataFrame({"kind": ["a" if d in (large[0], *sizes.index[sizes < 10]) else "b" for d in sizes.index]})
        table.index = sizes.index
        with dl.BagLoader(
            store.cells(3).path,
            labels="kind",
            donor_table=table,
            balance="kind",
            min_cells=10,
            small_bags="drop",
            n_bags=600,
        ) as loader:
            labels = np.concatenate([as_numpy(b["labels"]) for b in loader])
        assert (sizes < 10).sum() > 1
        assert 240 < labels.sum() < 360

    def test_weights_are_of_donors_not_of_their_bags(self, store: Store) -> None:
        with dl.BagLoader(
            store.cells(3).path, bag_by=["donor_id", "cell_type"], donor_weights={"d1": 1, "d12": 1}, n_bags=1000
        ) as loader:
            donors = pd.Series([bag[0] for ids in loader.bag_ids(0) for bag in ids]).value_counts()
        assert len({bag for ids in loader.bag_ids(0) for bag in ids if bag[0] == "d1"}) > 1
        assert 400 < donors["d1"] < 600

    def test_weights_by_id(self, store: Store) -> None:
        with dl.BagLoader(store.cells(3).path, donor_weights={"d1": 1, "d5": 3}, n_bags=100, max_cells=2) as loader:
            donors = pd.Series([d for b in loader for d in b["donors"]]).value_counts()
        assert set(donors.index) == {"d1", "d5"}
        assert donors["d5"] > donors["d1"]


class TestLabels:
    def test_of_cells_where_constant(self, store: Store) -> None:
        adatas = [a.copy() for a in store.cells(3).adatas]
        for adata in adatas:
            adata.obs["disease"] = [DISEASE[str(d)] for d in adata.obs["donor_id"]]
        with dl.BagLoader(adatas, labels="disease") as loader:
            for batch in loader:
                assert [loader.label_names[i] for i in batch["labels"]] == [DISEASE[d] for d in batch["donors"]]

    def test_varying_labels_name_a_donor(self, store: Store) -> None:
        with pytest.raises(ValueError, match=r"varies in .*'d\d+' has .*bag_by"):
            dl.BagLoader(store.cells(3).path, labels="cell_type")

    def test_of_a_donor_table(self, store: Store) -> None:
        table = pd.DataFrame({"score": np.arange(13.0)}, index=[f"d{i}" for i in range(13)])
        with dl.BagLoader(store.cells(3).path, labels="score", donor_table=table) as loader:
            assert loader.label_names is None
            for batch in loader:
                assert batch["labels"].dtype == torch.float32
                assert [f"d{int(v)}" for v in batch["labels"]] == list(batch["donors"])

    def test_a_donor_without_label(self, store: Store) -> None:
        table = pd.DataFrame({"score": np.arange(12.0)}, index=[f"d{i}" for i in range(12)])
        with pytest.raises(ValueError, match="'d12'"):
            dl.BagLoader(store.cells(3).path, labels="score", donor_table=table)

    @pytest.mark.parametrize("place", ["donor table", "genotypes", "cells"])
    def test_codes_do_not_depend_on_the_donors_chosen(self, store: Store, place: str) -> None:
        """A split without any "a" must not take its "b" for code 0."""
        kinds = {f"d{i}": "ab"[i % 2] for i in range(13)}
        G, cells, options = None, store.cells(3).path, {}
        if place == "donor table":
            options["donor_table"] = pd.DataFrame({"kind": kinds})
        elif place == "genotypes":
            G, _ = with_disease(store)
            G.obs["kind"] = [kinds.get(i, "b") for i in G.obs_names]
        else:
            cells = [a.copy() for a in store.cells(3).adatas]
            for adata in cells:
                adata.obs["kind"] = [kinds[str(d)] for d in adata.obs["donor_id"]]
        for donors in (None, ["d1", "d3"], ["d1", "d2"]):
            with dl.BagLoader(cells, G, labels="kind", donors=donors, **options) as loader:
                assert list(loader.label_names) == ["a", "b"]
                for batch in loader:
                    assert batch["labels"].tolist() == ["ab".index(kinds[d]) for d in batch["donors"]]

    def test_a_table_without_ids_is_refused(self, store: Store) -> None:
        """Integer ids would match the numbers of its rows."""
        table = pd.DataFrame({"donor_id": range(13), "kind": range(13)})
        with pytest.raises(ValueError, match=r"set_index\('donor_id'\)"):
            dl.BagLoader(store.cells(3).path, labels="kind", donor_table=table)

    @pytest.mark.parametrize(
        ("values", "error", "match"),
        [
            ([20240100 + i for i in range(13)], ValueError, "float32, which has no .*20240101"),
            ([1e300] * 13, ValueError, "float32, which has no .*1e"),
            ([1j] * 13, TypeError, "complex"),
            (pd.date_range("2024-01-01", periods=13), TypeError, "datetime.*dates to days"),
        ],
    )
    def test_numbers_that_would_become_others(self, store: Store, values: Any, error: Any, match: str) -> None:
        table = pd.DataFrame({"kind": values}, index=[f"d{i}" for i in range(13)])
        with pytest.raises(error, match=match):
            dl.BagLoader(store.cells(3).path, labels="kind", donor_table=table)

    def test_covariates_say_what_their_codes_stand_for(self, store: Store) -> None:
        ids = [f"d{i}" for i in range(13)]
        table = pd.DataFrame({"age": pd.Series([70.5, *range(12)], dtype=object).array, "sex": list("mfmfmfmfmfmfm")})
        table.index = pd.Index(ids)
        with dl.BagLoader(store.cells(3).path, donor_table=table, donor_covariates=["age", "sex"]) as loader:
            assert loader.covariate_names["age"] is None
            assert list(loader.covariate_names["sex"]) == ["f", "m"]
            for batch in loader:
                covariates = batch["donor_covariates"]
                assert covariates["age"].tolist() == [table.loc[d, "age"] for d in batch["donors"]]
                assert covariates["sex"].tolist() == ["fm".index(table.loc[d, "sex"]) for d in batch["donors"]]

    def test_no_such_column(self, store: Store) -> None:
        with pytest.raises(KeyError, match="'nothing' is a column of neither"):
            dl.BagLoader(store.cells(3).path, labels="nothing")


class TestTensors:
    @pytest.fixture
    def batch(self, store: Store) -> dict[str, Any]:
        with dl.BagLoader(store.cells(3).path, max_cells=9, bags_per_batch=5) as loader:
            return next(iter(loader))

    def test_pad_and_nest(self, batch: dict[str, Any]) -> None:
        x, mask = dl.pad_bags(batch)
        nested = dl.nested_bags(batch)
        dense = batch["X"].to_dense()
        for i, (start, stop) in enumerate(zip(batch["offsets"][:-1], batch["offsets"][1:], strict=True)):
            bag = dense[start:stop]
            assert torch.equal(x[i][mask[i]], bag)
            assert mask[i].sum() == stop - start
            assert not x[i][~mask[i]].any()
            assert torch.equal(nested[i], bag)

    @pytest.mark.parametrize("how", ["mean", "sum", "max", "softmax"])
    @pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
    def test_reduce_equals_padded(self, batch: dict[str, Any], how: Any, shape: tuple[int, ...]) -> None:
        """Values and gradients equal those of a masked loop over bags."""
        n = batch["donor_idx"].numel()
        values = torch.randn(n, *shape, dtype=torch.float64, requires_grad=True)
        twin = values.detach().clone().requires_grad_()
        got = dl.bag_reduce(values, batch, how)
        parts = torch.split(twin, batch["offsets"].diff().tolist())
        reduce = {
            "mean": lambda p: p.mean(0),
            "sum": lambda p: p.sum(0),
            "max": lambda p: p.amax(0),
            "softmax": lambda p: torch.softmax(p, 0),
        }[how]
        expected = (torch.cat if how == "softmax" else torch.stack)([reduce(p) for p in parts])
        torch.testing.assert_close(got, expected)
        weights = torch.randn_like(expected)
        (got * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(values.grad, twin.grad)

    @pytest.mark.parametrize("how", ["mean", "sum", "max", "softmax"])
    def test_gradients_equal_padded_and_masked(self, how: Any) -> None:
        """Also with zeros, ties and bags of one: counts, and what ReLU gives, are full of them."""
        sizes = [3, 1, 4, 2, 3]
        offsets = torch.tensor([0, *np.cumsum(sizes)])
        bags = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        batch = {"X": torch.zeros(len(bags), 1), "offsets": offsets, "donor_idx": bags}
        numbers = [-1.0, 0, -2, 0, 0, 0, -2, -2, 5, 5, -1, -1, 0]
        values = torch.tensor(numbers, dtype=torch.float64, requires_grad=True)
        twin = values.detach().clone().requires_grad_()
        mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        hidden = {"sum": 0.0, "mean": 0.0}.get(how, -torch.inf)
        padded = torch.full(mask.shape, hidden, dtype=torch.float64).masked_scatter(mask, twin)
        expected = {
            "mean": lambda: padded.sum(1) / mask.sum(1),
            "sum": lambda: padded.sum(1),
            "max": lambda: padded.amax(1),
            "softmax": lambda: torch.softmax(padded, 1)[mask],
        }[how]()
        got = dl.bag_reduce(values, batch, how)
        torch.testing.assert_close(got, expected)
        weights = torch.arange(1.0, got.numel() + 1, dtype=torch.float64)
        (got * weights).sum().backward()
        (expected * weights).sum().backward()
        torch.testing.assert_close(values.grad, twin.grad)

    def test_collect(self, store: Store) -> None:
        with dl.BagLoader(store.cells(3).path, bags_per_batch=5) as loader:
            batches = list(loader)
        table = dl.collect_bags(batches, [torch.tensor([float(d[1:]) for d in b["donors"]]) for b in batches])
        assert sorted(table.index) == sorted(f"d{i}" for i in range(13))
        assert all(float(donor[1:]) == value for donor, value in table["prediction"].items())

    def test_what_cannot_be_used_is_said(self, store: Store, batch: dict[str, Any]) -> None:
        with dl.BagLoader(store.cells(3).path, to="numpy") as loader:
            arrays = next(iter(loader))
        for function in (dl.pad_bags, dl.nested_bags, dl.to_torchmil):
            with pytest.raises(TypeError, match="load with to='torch'"):
                function(arrays)
        with pytest.raises(TypeError, match="load with to='torch'"):
            dl.bag_reduce(torch.zeros(3), arrays, "sum")
        with pytest.raises(TypeError, match="densify=True"):
            dl.bag_reduce(batch["X"], batch, "sum")
        with pytest.raises(ValueError, match="no batch"):
            dl.collect_bags([], [])
        with pytest.raises(TypeError, match="donor_table must be a DataFrame"):
            dl.BagLoader(store.cells(3).path, labels="kind", donor_table={"d1": 1})

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
    def test_reduce_integers(self, batch: dict[str, Any], dtype: torch.dtype) -> None:
        """As torch reduces them: sums in int64, means and softmax in float."""
        values = (torch.arange(batch["donor_idx"].numel()) % 3 * 100).to(dtype)
        parts = torch.split(values, batch["offsets"].diff().tolist())
        expected = {
            "sum": torch.stack([part.sum() for part in parts]),
            "mean": torch.stack([part.float().mean() for part in parts]),
            "max": torch.stack([part.max() for part in parts]),
            "softmax": torch.cat([torch.softmax(part.float(), 0) for part in parts]),
        }
        for how, value in expected.items():
            got = dl.bag_reduce(values, batch, how)  # type: ignore[arg-type]
            torch.testing.assert_close(got, value)

    def test_half_precision(self, batch: dict[str, Any]) -> None:
        """What autocast gives: predictions in bfloat16; and cells in types that numpy or numba lack."""
        for dtype in (torch.bfloat16, torch.float16):
            half = batch | {"X": batch["X"].to_dense().to(dtype)}
            sparse_half = batch | {"X": half["X"].to_sparse_csr()}
            expected, _ = dl.pad_bags(batch)
            for each in (half, sparse_half):
                x, _ = dl.pad_bags(each)
                assert torch.equal(x, expected.to(dtype))
            table = dl.collect_bags([batch], [torch.ones(len(batch["donors"]), dtype=dtype)])
            assert table["prediction"].tolist() == [1.0] * len(batch["donors"])

    def test_collect_refuses_what_it_cannot_tell(self, store: Store) -> None:
        bags = dl.BagDataset(store.cells(3).path)
        batches = torch.utils.data.DataLoader(bags, batch_size=5, shuffle=True, collate_fn=dl.collate_bags)
        with pytest.raises(TypeError, match=r"as a list.*not a DataLoader"):
            dl.collect_bags(batches, [torch.zeros(5)] * 3)
        with dl.BagLoader(store.cells(3).path, bags_per_batch=5) as loader:
            with pytest.raises(RuntimeError, match="not come to its end"):
                dl.collect_bags(loader, [])
            numbers = [torch.tensor([float(d[1:]) for d in b["donors"]]) for b in loader]
            loader.set_epoch(7)  # of a pass to come
            table = dl.collect_bags(loader, numbers)
            assert all(float(donor[1:]) == value for donor, value in table["prediction"].items())
            next(iter(loader))
            with pytest.raises(RuntimeError, match="not come to its end"):
                dl.collect_bags(loader, numbers)

    def test_collect_from_the_loader(self, store: Store) -> None:
        """By the order of the pass that was predicted, which the next one does not have."""

        def number(batch: dict[str, Any]) -> torch.Tensor:
            return torch.tensor([float(d[1:]) for d in batch["donors"]])

        with dl.BagLoader(store.cells(3).path, bags_per_batch=5, cell_memory="1KB") as loader:
            for _ in range(2):
                tables = [
                    dl.collect_bags(loader, [number(batch) for batch in loader]),
                    dl.collect_bags(loader, (number(batch) for batch in loader)),
                ]
                for table in tables:
                    assert sorted(table.index) == sorted(f"d{i}" for i in range(13))
                    assert all(float(donor[1:]) == value for donor, value in table["prediction"].items())
            assert [list(ids) for ids in loader.bag_ids(7)] != [list(ids) for ids in loader.bag_ids(8)]
            with pytest.raises(ValueError, match="each of 3 batches, got 1"):
                dl.collect_bags(loader, [torch.zeros(5)])
            with pytest.raises(ValueError, match=r"each of 5 bags, got shape \(4,\)"):
                dl.collect_bags(loader, [torch.zeros(4)] * 3)

    def test_torchmil_dict(self, store: Store) -> None:
        G, _ = with_disease(store)
        with dl.BagLoader(store.cells(3).path, G, labels="disease") as loader:
            batch = next(iter(loader))
        out = dl.to_torchmil(batch)
        assert set(out) == {"X", "mask", "Y"}
        assert torch.equal(out["Y"], batch["labels"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"exact_cells": 5, "min_cells": 3}, "exact_cells sets max_cells and min_cells both"),
        ({"exact_cells": 5, "max_cells": 3}, "leave max_cells=3 out"),
        ({"max_cells": 10.0}, "max_cells must be an integer"),
        ({"max_cells": float("inf")}, "max_cells must be an integer"),
        ({"max_cells": "all"}, "max_cells must be an integer"),
        ({"bags_per_batch": 8.0}, "bags_per_batch must be an integer"),
        ({"donor_weights": {1: 1.0, "1": 1.0}}, "more than once"),
        ({"min_cells": 9, "max_cells": 3}, "min_cells must not exceed max_cells"),
        ({"small_bags": "drop"}, "needs min_cells"),
        ({"small_bags": "lose", "min_cells": 3}, "small_bags must be"),
        ({"min_cells": 10_000, "small_bags": "drop", "max_cells": None}, "No bag is left"),
        ({"bags_per_batch": 0}, "bags_per_batch must be an integer of at least 1"),
        ({"n_bags": 4}, "needs weights"),
        ({"bag_by": ["donor_id", "donor_id"]}, "each column once"),
        ({"bag_by": ["cell_type"]}, "must contain the donor column"),
        ({"balance": "cell_type", "donor_weights": {"d1": 1}}, "give one"),
        ({"donor_weights": {"d1": -1.0}}, "at least 0"),
        ({"donor_weights": {"d1": 1.0, "who": 1.0}}, "no cells in use: 'who'"),
    ],
)
def test_options_are_checked(store: Store, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        dl.BagLoader(store.cells(3).path, **options)


SIZES = {"one": 1, "two": 2, "seven": 7, "chunk": 64, "mid": 300, "large": 1500, "huge": 5000}


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], tuple[Path, np.ndarray]]:
    """Collections of bags of 1 to 5,000 cells, by number of datasets and whether grouped, and the donor of each row."""
    out = {}
    root = tmp_path_factory.mktemp("uneven")
    for n_datasets, grouped in itertools.product((1, 2, 4), (True, False)):
        donors = np.random.default_rng(n_datasets).permutation(np.repeat(list(SIZES), list(SIZES.values())))
        parts = [np.sort(part) if grouped else part for part in np.array_split(donors, n_datasets)]
        donors, start, adatas = np.concatenate(parts).astype(object), 0, []
        for part in parts:
            obs = pd.DataFrame({"donor_id": pd.Categorical(part)}, index=[f"c{start + i}" for i in range(part.size)])
            X = sparse.csr_matrix(x_values(part.size, start=start))
            adatas.append(ad.AnnData(X, obs=obs, var=pd.DataFrame(index=[f"g{g}" for g in range(X.shape[1])])))
            start += part.size
        path = write_collection(root / f"{n_datasets}_{grouped}.zarr", adatas, rows_per_chunk=32)
        out[n_datasets, grouped] = path, donors
    return out


class TestUnevenBags:
    @given(
        n_datasets=st.sampled_from([1, 2, 4]),
        grouped=st.booleans(),
        missing=st.sampled_from(["drop", "nan"]),
        cell_memory=st.sampled_from(["20KB", "200KB", "512MB"]),
        options=bag_settings(),
    )
    def test_are_their_donors(
        self,
        uneven: dict[tuple[int, bool], tuple[Path, np.ndarray]],
        n_datasets: int,
        grouped: bool,
        missing: str,
        cell_memory: str,
        options: dict[str, Any],
    ) -> None:
        """Bags of 1 to 5,000 cells, in one read, or several, or many parts; one donor has no genotypes."""
        path, donors = uneven[n_datasets, grouped]
        G, ids, values = genotype_adata(np.array([d for d in SIZES if d != "mid"], dtype=object), "float32")
        options |= {"window_cells": None, "cell_memory": cell_memory, "missing_donors": missing}
        exact, low, high = (options.get(k) for k in ("exact_cells", "min_cells", "max_cells"))
        low, high = (exact, exact) if exact else (low, high)
        expected = {d for d, n in SIZES.items() if not (options.get("small_bags") == "drop" and low and n < low)}
        if missing == "drop":
            expected.discard("mid")
        where = {donor: row for row, donor in enumerate(ids)}
        with dl.BagLoader(path, G, **options) as loader:
            seen = []
            for batch in loader:
                offsets, index, x = (as_numpy(batch[k]) for k in ("offsets", "index", "X"))
                np.testing.assert_array_equal(x, np.concatenate([x_values(1, start=row) for row in index]))
                for i, donor in enumerate(batch["donors"]):
                    rows = index[offsets[i] : offsets[i + 1]]
                    assert set(donors[rows]) == {donor}
                    size = min(SIZES[donor], high) if high else SIZES[donor]
                    if options.get("small_bags") == "resample" and low:
                        size = max(size, low)
                    assert rows.size == size
                    assert len(set(rows)) == min(size, SIZES[donor])
                    row = values[where[donor]] if donor in where else np.full(values.shape[1], np.nan)
                    np.testing.assert_array_equal(as_numpy(batch["donor_features"][i]), row)
                    seen.append(donor)
        assert sorted(seen) == sorted(expected)

    def test_a_donor_without_genotypes_is_an_error(self, uneven: Any) -> None:
        path, _ = uneven[2, True]
        G, *_ = genotype_adata(np.array([d for d in SIZES if d != "mid"], dtype=object), "float32")
        with pytest.raises(ValueError, match="'mid'"):
            dl.BagLoader(path, G)

    def test_parts_are_shuffled(self, uneven: Any) -> None:
        """A bag that is read in parts is in another order each epoch, and holds each cell once."""
        path, _ = uneven[2, True]
        with dl.BagLoader(path, donors=["huge"], max_cells=None, cell_memory="20KB") as loader:
            first, second = ([as_numpy(b["index"]) for b in loader] for _ in range(2))
        assert [rows.size for rows in first] == [5000]
        assert (first[0] != second[0]).mean() > 0.9
        assert (np.sort(first[0]) == np.sort(second[0])).all()
        assert np.unique(first[0]).size == 5000

    def test_collections_that_are_not_grouped_are_noticed(self, uneven: Any) -> None:
        """Once, with the figure: how many more cells are decoded than used."""
        (path, _), (grouped, _) = uneven[1, False], uneven[1, True]
        with pytest.warns(UserWarning, match=r"fastest.*: (\d+\.\d) times.*groupby='donor_id'") as caught:
            dl.BagLoader(path, max_cells=7, bags_per_batch=1, window_cells=7).close()
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for donors in (None, ["mid", "huge"]):  # cells of others may lie between those in use
                dl.BagLoader(grouped, donors=donors, max_cells=7, bags_per_batch=1, window_cells=7).close()


def test_reads_obey_window_cells() -> None:
    """Windows hold the batches that fit; a batch that does not is read in parts."""
    codes = np.concatenate([np.zeros(5000, dtype=int), np.repeat(np.arange(1, 101), 20)])
    sampler = BagSampler(codes, bags_per_batch=2, window_cells=400, rng=np.random.default_rng(0))
    parts = 0
    for request in replay(sampler, codes.size, seed=0, epoch=0):
        assert sum(map(len, request["splits"])) <= 400
        parts += "part_of" in request
    assert parts == -(-5020 // 400)


def test_small_bags_that_lie_side_by_side_are_read_together() -> None:
    """Two by two, in an order that is otherwise random: each bag anywhere, and no two batches alike for that."""
    n = 403
    codes = np.repeat(np.random.default_rng(0).permutation(n), 3)  # not the order of their numbers
    place_of = {bag: i for i, bag in enumerate(codes[::3].tolist())}
    sampler = BagSampler(codes, max_cells=None, bags_per_batch=8)
    starts, together, in_a_batch = np.zeros(4), 0, 0
    for epoch in range(60):
        batches = [
            bags.tolist() for request in replay(sampler, codes.size, seed=0, epoch=epoch) for bags in request["bags"]
        ]
        order = np.array([place_of[bag] for batch in batches for bag in batch])
        assert sorted(order) == list(range(n))
        starts += np.histogram(np.flatnonzero(order < n // 4), bins=4, range=(0, n))[0]
        where = np.argsort(order)
        pairs = where[: n - 1].reshape(-1, 2)
        together += (pairs[:, 0] // 64 == pairs[:, 1] // 64).sum()
        in_a_batch += (pairs[:, 0] // 8 == pairs[:, 1] // 8).sum()
    assert together / (60 * (n // 2)) > 0.9
    assert 0.05 < in_a_batch / (60 * (n // 2)) < 0.15
    expected = starts.sum() / 4
    assert ((starts - expected) ** 2 / expected).sum() < 30  # pairs come together, so twice what chi-square allows

    # fewer of them in a read, or a sample of each: by chance alone
    for options in ({"window_cells": 63 * 3}, {"max_cells": 2}):
        sampler = BagSampler(codes, bags_per_batch=8, **options)
        request = np.concatenate([b for r in replay(sampler, codes.size, seed=0, epoch=0) for b in r["bags"]])
        where = np.argsort([place_of[bag] for bag in request.tolist()])
        pairs = where[: n - 1].reshape(-1, 2)
        assert (pairs[:, 0] // 64 == pairs[:, 1] // 64).mean() < 0.3


def test_one_cell_donor_and_no_genotypes() -> None:
    adata = ad.AnnData(
        sparse.csr_matrix(np.arange(12, dtype=np.float32).reshape(4, 3)),
        obs=pd.DataFrame({"donor_id": ["a", "b", "b", "b"]}, index=list("wxyz")),
    )
    with dl.BagLoader(adata, bags_per_batch=1, shuffle=False) as loader:
        first, second = loader
    assert list(first["donors"]) == ["a"]
    assert first["X"].shape == (1, 3)
    assert first["donor_features"] is None
    assert second["index"].tolist() == [1, 2, 3]
