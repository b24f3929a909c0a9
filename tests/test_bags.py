"""Bags: each donor's cells and no others, each donor once, with its label and genotype row."""

from __future__ import annotations

import copy
import itertools
import pickle
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
from _data import CELL_TYPES, Genotypes, as_numpy, genotype_adata, write_collection, x_values
from donorloader.samplers import BagSampler, replay, request_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from _data import Store

# Bags of every kind of collection are wanted here, and most are not grouped
pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")

DISEASE = {f"d{i}": "sick" if i % 3 else "well" for i in range(13)}
SIZES = {"one": 1, "two": 2, "seven": 7, "chunk": 64, "mid": 300, "large": 1500, "huge": 5000}


def with_disease(store: Store) -> tuple[Any, Any]:
    genotypes = store.genotypes()
    adata = genotypes.source.copy()
    adata.obs["disease"] = pd.Categorical([DISEASE.get(i, "well") for i in adata.obs_names])
    adata.obs["age"] = np.arange(adata.n_obs) + 20.5
    return adata, genotypes


def donor_table() -> pd.DataFrame:
    """What a user knows of each donor, also of those in :data:`SIZES`."""
    ids = [*DISEASE, *SIZES]
    kinds = [DISEASE.get(i, ("sick", "well")[len(i) % 2]) for i in ids]
    return pd.DataFrame({"disease": pd.Categorical(kinds), "age": np.arange(len(ids)) + 20.5}, index=ids)


BY = ([], ["donor_id", "cell_type"], ["cell_type", "donor_id"])
VARIANTS: dict[str, tuple[Any, list[int]]] = {
    "all": (None, list(range(24))),
    "names": (["rs7", "rs2"], [7, 2]),
    "slice": (slice(3, 9), list(range(3, 9))),
}


@st.composite
def bag_settings(draw: st.DrawFn, donors: Sequence[str] = ("d1", "d11", "d6")) -> dict[str, Any]:
    """Options of a loader, all together; `donors` are some that have cells whatever the query."""
    options: dict[str, Any] = {
        "bags_per_batch": draw(st.sampled_from([1, 3, 8, 20])),
        "max_cells": draw(st.sampled_from([None, 1, 5, 30])),
        "window_cells": draw(st.sampled_from([1, 60, 16_384])),
        "seed": draw(st.integers(0, 3)),
        "prefetch": draw(st.sampled_from([0, 1, None])),
        "shuffle": draw(st.booleans()),
        "densify": draw(st.booleans()),
        "to": draw(st.sampled_from(["torch", "numpy"])),
        "labels": "disease",
        "donor_covariates": draw(st.sampled_from([["age"], ["disease", "age"]])),
        "obs_columns": draw(st.sampled_from([[], ["row"], ["cell_type", "row"]])),
        "cells_query": draw(st.sampled_from([None, "run != 'r1'", "cell_type == 'T'"])),
        "variants": draw(st.sampled_from(list(VARIANTS))),
        "donors": draw(st.sampled_from([None, list(donors)])),
    }
    if by := draw(st.sampled_from(BY)):
        options |= {"bag_by": by, "labels": draw(st.sampled_from(["disease", "cell_type"]))}
    if draw(st.booleans()):
        options |= {"exact_cells": draw(st.sampled_from([1, 12])), "max_cells": None}
        options["small_bags"] = draw(st.sampled_from(["resample", "drop"]))
    elif draw(st.booleans()):
        options["min_cells"] = draw(st.sampled_from([1, 4])) if options["max_cells"] != 1 else 1
        options["small_bags"] = draw(st.sampled_from(["keep", "resample", "drop"]))
    match draw(st.sampled_from(["each once", "balance", "weights"])):
        case "balance":
            options["balance"] = "disease"
        case "weights":
            options["donor_weights"] = dict(zip(donors, (1.0, 3.0, 0.0), strict=True))
    if {"balance", "donor_weights"} & options.keys():
        options["n_bags"] = draw(st.sampled_from([None, 7]))
    return options


class Naive:
    """Which bags there are, and how often each is to come, as a person would find out from the table of cells."""

    def __init__(self, obs: pd.DataFrame, options: dict[str, Any], without: Sequence[str]):
        self.by = options.get("bag_by", ["donor_id"])
        obs = obs.reset_index(drop=True)
        used = obs if options["cells_query"] is None else obs.query(options["cells_query"])
        used = used[~used["donor_id"].isin(without)]
        if options["donors"] is not None:
            used = used[used["donor_id"].astype(str).isin(options["donors"])]
        self.rows: dict[Any, set[int]] = {}
        for row, *values in used[self.by].astype(str).itertuples():
            self.rows.setdefault(tuple(values) if "bag_by" in options else values[0], set()).add(row)
        exact, low, high = (options.get(k) for k in ("exact_cells", "min_cells", "max_cells"))
        low, high = (exact, exact) if exact else (low, high)
        self.small, self.low, self.high = options.get("small_bags", "keep"), low, high
        if self.small == "drop" and low:
            self.rows = {bag: rows for bag, rows in self.rows.items() if len(rows) >= low}
        self.drawn = bool({"balance", "donor_weights"} & options.keys())
        self.n_bags = options.get("n_bags") or len(self.rows)
        if "balance" in options:
            groups = {bag: donor_table()["disease"][self.donor(bag)] for bag in self.rows}
        else:
            groups = {bag: self.donor(bag) for bag in self.rows}
        members = pd.Series(list(groups.values())).value_counts()
        weights = {bag: options.get("donor_weights", {}).get(group, 0.0) for bag, group in groups.items()}
        if "balance" in options:
            weights = dict.fromkeys(self.rows, 1.0)
        shares = {bag: weights[bag] / members[groups[bag]] for bag in self.rows}
        total = sum(shares.values())
        self.chances = {bag: share / total for bag, share in shares.items() if share} if total else {}

    def donor(self, bag: Any) -> str:
        return bag if isinstance(bag, str) else bag[self.by.index("donor_id")]

    def n_cells(self, bag: Any) -> int:
        """Cells that stand for a bag."""
        n = len(self.rows[bag])
        if self.small == "resample" and self.low:
            n = max(n, self.low)
        return min(n, self.high) if self.high else n

    def check_draws(self, draws: list[Any]) -> None:
        """Each bag once; or, drawn by weight, as often as its weight says."""
        if not self.drawn:
            assert sorted(draws) == sorted(self.rows)
            return
        counts = pd.Series(draws).value_counts()
        assert set(counts.index) <= set(self.chances)
        for bag, chance in self.chances.items():
            expected = len(draws) * chance
            assert abs(counts.get(bag, 0) - expected) <= 5 * np.sqrt(expected * (1 - chance)) + 1


def check_bags(
    cells: tuple[Path, pd.DataFrame, np.ndarray],
    G: Any,
    genotype_rows: Any,
    options: dict[str, Any],
    without: Sequence[str] = (),
) -> None:
    """Every field of every batch of a pass, against what is known of the cells: path, obs, x.

    `genotype_rows` gives the rows of some donors and columns; donors `without` them are to be left out.
    """
    path, obs, x_of_cells = cells
    variants, columns = VARIANTS[options["variants"]]
    naive, table = Naive(obs, options, without), donor_table()
    given = options | {"variants": None if G is None else variants}
    if G is None or "disease" not in G.obs:
        given["donor_table"] = table
    if not naive.rows or (naive.drawn and not naive.chances):
        with pytest.raises(ValueError, match=r"No bag is left|and not all 0"):
            dl.BagLoader(path, G, **given)
        return
    with dl.BagLoader(path, G, **given) as loader:
        batches, draws = list(loader), []
        assert len(batches) == len(loader) == -(-naive.n_bags // options["bags_per_batch"])
        for batch in batches:
            assert len(batch["donors"]) <= options["bags_per_batch"]
            offsets, index, x = (as_numpy(batch[k]) for k in ("offsets", "index", "X"))
            assert offsets[0] == 0
            assert offsets[-1] == index.size == x.shape[0]
            assert isinstance(batch["index"], torch.Tensor if options["to"] == "torch" else np.ndarray)
            np.testing.assert_array_equal(x, x_of_cells[index])
            bags = np.repeat(np.arange(offsets.size - 1), np.diff(offsets))
            np.testing.assert_array_equal(as_numpy(batch["donor_idx"]), bags)
            if options["obs_columns"]:
                assert list(batch["obs"].index) == list(index)
                assert list(batch["obs"].columns) == options["obs_columns"]
                for name in options["obs_columns"]:
                    assert batch["obs"][name].astype(str).tolist() == obs[name].astype(str).iloc[index].tolist()
            else:
                assert batch["obs"] is None
            donors = [naive.donor(bag) for bag in batch["donors"]]
            if G is None:
                assert batch["donor_features"] is None
            else:
                np.testing.assert_array_equal(as_numpy(batch["donor_features"]), genotype_rows(donors, columns))
            assert set(batch["donor_covariates"]) == set(options["donor_covariates"])
            for name, values in batch["donor_covariates"].items():
                names = loader.covariate_names[name]
                told = as_numpy(values) if names is None else names[as_numpy(values)]
                assert list(told) == list(table.loc[donors, name])
            for i, bag in enumerate(batch["donors"]):
                rows = index[offsets[i] : offsets[i + 1]]
                assert set(rows) <= naive.rows[bag]
                assert rows.size == naive.n_cells(bag)
                assert len(set(rows)) == min(rows.size, len(naive.rows[bag]))
                assert options["shuffle"] or list(rows) == sorted(rows)
                by_type = options["labels"] == "cell_type"
                label = bag[naive.by.index("cell_type")] if by_type else table.loc[donors[i], "disease"]
                assert loader.label_names[as_numpy(batch["labels"])[i]] == label
                draws.append(bag)
        assert len(draws) == naive.n_bags
        if not (options["shuffle"] or naive.drawn or "bag_by" in options):
            assert draws == sorted(naive.rows)
        assert [list(ids) for ids in loader.bag_ids(0)] == [list(batch["donors"]) for batch in batches]
        if naive.drawn and options["window_cells"] != 1:  # of which plans are long
            draws += [bag for epoch in range(1, 8) for ids in loader.bag_ids(epoch) for bag in ids]
        naive.check_draws(draws)


class TestEveryBag:
    @given(
        n_datasets=st.sampled_from([1, 3, 4]),
        layout=st.sampled_from(["csr", "dense"]),
        genotypes=st.booleans(),
        options=bag_settings(),
    )
    def test_is_its_donors(
        self, store: Store, n_datasets: int, layout: str, genotypes: bool, options: dict[str, Any]
    ) -> None:
        cells, G = store.cells(n_datasets, layout), store.genotypes()
        adata = G.source.copy()
        adata.obs = donor_table().reindex(adata.obs_names)
        check_bags((cells.path, cells.obs, cells.x), adata if genotypes else None, G.rows, options)

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
        subsets = []
        for order in orders[:2]:
            rows = np.concatenate(order).astype(int)
            subsets.append({donor: set(rows[cells.donor[rows] == donor]) for donor in set(cells.donor)})
        sizes = pd.Series(cells.donor).value_counts()
        for donor, n in sizes.items():
            assert (subsets[0][donor] == subsets[1][donor]) == (n <= 5), f"{donor} has {n} cells"
        assert (sizes > 5).sum() > 5
        assert (sizes <= 5).any()

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
        subsets: list[set[frozenset[int]]] = [set(), set()]
        for epoch in range(50):
            for request in replay(sampler, codes.size, seed=0, epoch=epoch):
                for split, (bag,) in zip(request["splits"], request["bags"], strict=True):
                    rows = request_rows(request["requests"])[split]
                    np.add.at(counts, rows, 1)
                    subsets[bag].add(frozenset(rows.tolist()))
        assert [len(different) for different in subsets] == [50, 50]
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

    def test_bags_that_are_never_drawn_need_no_label(self, store: Store) -> None:
        cells = store.cells(3)
        few = pd.Series(cells.donor).value_counts()
        few = list(few.index[few < 10])
        assert "d12" in few
        kinds = pd.Series({d: int(d[1:]) for d in DISEASE if d not in few})  # whole numbers
        options: dict[str, Any] = {
            "labels": "kind",
            "donor_covariates": ["kind"],
            "donor_table": kinds.to_frame("kind"),
        }
        with pytest.raises(ValueError, match=rf"{len(few)} have none: .*'d12'"):
            dl.BagLoader(cells.path, **options)
        for dropped in (
            {"min_cells": 10, "small_bags": "drop"},
            {"exact_cells": 10, "small_bags": "drop"},
            {"donor_weights": dict.fromkeys(kinds.index, 1)},
        ):
            with dl.BagLoader(cells.path, **options, **dropped) as loader:
                for batch in loader:
                    assert batch["labels"].tolist() == [kinds[d] for d in batch["donors"]]
                    assert batch["donor_covariates"]["kind"].tolist() == batch["labels"].tolist()
        with pytest.raises(ValueError, match="'d12'"):
            dl.BagDataset(cells.path, **options)
        dataset = dl.BagDataset(cells.path, min_cells=10, small_bags="drop", **options)
        assert [bag["label"] for bag in dataset] == [kinds[d] for d in dataset.donors]

    def test_bags_that_are_never_drawn_may_vary(self, store: Store) -> None:
        """A label of the cells is constant in those that are drawn."""
        adatas = [a.copy() for a in store.cells(3).adatas]
        for adata in adatas:
            adata.obs["kind"] = ["x" if d != "d12" else str(i % 2) for i, d in enumerate(adata.obs["donor_id"])]
        with pytest.raises(ValueError, match=r"varies in 1 of 13: 'd12' has"):
            dl.BagLoader(adatas, labels="kind")
        with dl.BagLoader(adatas, labels="kind", min_cells=5, small_bags="drop") as loader:
            assert {loader.label_names[i] for batch in loader for i in batch["labels"]} == {"x"}

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

    def test_odd_shapes_are_said(self, batch: dict[str, Any]) -> None:
        """The rule, the shape and the remedy, and not what torch, numpy or pandas come upon later."""
        n_bags, n_cells = len(batch["donors"]), batch["donor_idx"].numel()
        dense = batch | {"X": batch["X"].to_dense()}
        none = {"X": torch.zeros(0, 3), "offsets": torch.tensor([0]), "donor_idx": torch.zeros(0, dtype=torch.int64)}
        odd = [dense | {"X": dense["X"][:-1]}, dense | {"X": dense["X"][:, 0]}, dense | {"X": dense["X"][None]}, none]
        for function in (dl.pad_bags, dl.nested_bags):
            for wrong in odd:
                with pytest.raises(ValueError, match=r"one row for each cell of its bags.*got shape \("):
                    function(wrong)
            with pytest.raises(TypeError, match="takes batches of a BagLoader, got Tensor"):
                function(batch["X"])  # type: ignore[arg-type]
        for length in (9.0, True, "9", torch.tensor(9)):
            with pytest.raises(TypeError, match="length must be an integer"):
                dl.pad_bags(batch, length=length)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"below that of the longest bag, 9, got -1.*max_cells"):
            dl.pad_bags(batch, length=-1)
        for values in (torch.tensor(1.0), torch.zeros(n_bags), torch.zeros(1, n_cells)):
            with pytest.raises(ValueError, match=rf"each of the {n_cells} cells of the batch, got shape \("):
                dl.bag_reduce(values, batch, "sum")
        with pytest.raises(ValueError, match="on cpu, but are on meta"):
            dl.bag_reduce(torch.zeros(n_cells, device="meta"), batch, "sum")
        for values, error, match in (
            (torch.zeros(n_bags, 2, 3), ValueError, r"\(n_bags, k\).*got shape \(5, 2, 3\)"),
            (torch.zeros(n_bags, 1, 1), ValueError, r"\(n_bags, k\).*got shape \(5, 1, 1\)"),
            (torch.tensor(1.0), ValueError, r"each of 5 bags, got shape \(\)"),
            ([[1.0], [1.0, 2.0]], ValueError, "one array per batch, of one row per bag"),
            (torch.zeros(n_bags, 2).to_sparse(), TypeError, "dense tensor"),
        ):
            with pytest.raises(error, match=match):
                dl.collect_bags([batch], [values])  # type: ignore[list-item]
        for second in (torch.zeros(n_bags), torch.zeros(n_bags, 3)):  # would leave holes in the table
            with pytest.raises(ValueError, match=r"one k for all batches, got shape .* after \(5, 2\)"):
                dl.collect_bags([batch, batch], [torch.zeros(n_bags, 2), second])
        with pytest.raises(TypeError, match="a list with one tensor per batch, got int"):
            dl.collect_bags([batch], 3)  # type: ignore[arg-type]
        for wrong in (batch["X"], {"X": batch["X"]}):
            with pytest.raises(TypeError, match="must be those of a BagLoader"):
                dl.collect_bags([wrong], [torch.zeros(n_bags)])
        table = dl.collect_bags([batch], [torch.zeros(n_bags, 2)])
        assert list(table.columns) == ["prediction_0", "prediction_1"]

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


type Uneven = dict[tuple[int, bool], tuple[Path, pd.DataFrame, np.ndarray]]


@pytest.fixture(scope="session")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Uneven:
    """Collections of bags of 1 to 5,000 cells, by number of datasets and whether grouped: path, obs and X."""
    out: Uneven = {}
    root = tmp_path_factory.mktemp("uneven")
    for n_datasets, grouped in itertools.product((1, 2, 4), (True, False)):
        donors = np.random.default_rng(n_datasets).permutation(np.repeat(list(SIZES), list(SIZES.values())))
        parts = [np.sort(part) if grouped else part for part in np.array_split(donors, n_datasets)]
        row = np.arange(donors.size)
        obs = pd.DataFrame(
            {
                "donor_id": np.concatenate(parts).astype(object),
                "cell_type": np.array(CELL_TYPES, dtype=object)[row % 4],
                "run": np.array(["r0", "r1", "r2"], dtype=object)[row % 3],
                "row": row,
            },
            index=[f"c{i}" for i in row],
        )
        x, bounds = x_values(donors.size), np.cumsum([0, *map(len, parts)])
        adatas = [
            ad.AnnData(
                sparse.csr_matrix(x[start:stop]),
                obs=obs.iloc[start:stop].astype({"donor_id": "category", "cell_type": "category"}),
                var=pd.DataFrame(index=[f"g{g}" for g in range(x.shape[1])]),
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        path = write_collection(root / f"{n_datasets}_{grouped}.zarr", adatas, rows_per_chunk=32)
        out[n_datasets, grouped] = path, obs, x
    return out


class TestUnevenBags:
    @given(
        n_datasets=st.sampled_from([1, 2, 4]),
        grouped=st.booleans(),
        missing=st.sampled_from(["drop", "nan"]),
        cell_memory=st.sampled_from(["20KB", "200KB", "512MB"]),
        options=bag_settings(donors=("chunk", "huge", "large")),
    )
    def test_are_their_donors(
        self,
        uneven: Uneven,
        n_datasets: int,
        grouped: bool,
        missing: str,
        cell_memory: str,
        options: dict[str, Any],
    ) -> None:
        """Bags of 1 to 5,000 cells, in one read, or several, or many parts; one donor has no genotypes."""
        path, obs, x = uneven[n_datasets, grouped]
        adata, ids, values = genotype_adata(np.array([d for d in SIZES if d != "mid"], dtype=object), "float32")
        G = Genotypes(adata, ids, values, np.array(adata.var_names, dtype=object))
        options |= {"window_cells": None, "cell_memory": cell_memory, "missing_donors": missing}
        check_bags((path, obs, x), adata, G.rows, options, without=["mid"] if missing == "drop" else [])

    def test_a_donor_without_genotypes_is_an_error(self, uneven: Uneven) -> None:
        path, *_ = uneven[2, True]
        G, *_ = genotype_adata(np.array([d for d in SIZES if d != "mid"], dtype=object), "float32")
        with pytest.raises(ValueError, match="'mid'"):
            dl.BagLoader(path, G)

    def test_parts_are_shuffled(self, uneven: Uneven) -> None:
        """A bag that is read in parts is in another order each epoch, and holds each cell once."""
        path, *_ = uneven[2, True]
        with dl.BagLoader(path, donors=["huge"], max_cells=None, cell_memory="20KB") as loader:
            first, second = ([as_numpy(b["index"]) for b in loader] for _ in range(2))
        assert [rows.size for rows in first] == [5000]
        assert (first[0] != second[0]).mean() > 0.9
        assert (np.sort(first[0]) == np.sort(second[0])).all()
        assert np.unique(first[0]).size == 5000

    def test_the_notice_comes_once_for_each_loader(self, uneven: Uneven) -> None:
        """Not again for its passes, nor for its copies in other processes."""
        path = str(uneven[1, False][0])
        options: dict[str, Any] = {"max_cells": 7, "donors": ["chunk", "mid"], "cell_memory": "1KB"}

        def notices(made: Any) -> list[str]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    bags = made()
                    for epoch in range(2):
                        bags.set_epoch(epoch)
                        assert [len(bag) for bag in bags]
                    pickle.loads(pickle.dumps(bags)).close()
                    copy.deepcopy(bags).close()
                    bags.close()
            return [w.filename for w in caught if "Bags are read fastest" in str(w.message)]

        makers = [
            lambda: dl.BagLoader(path, bags_per_batch=1, **options),
            lambda: dl.BagLoader(path, bags_per_batch=1, rank=0, world_size=2, **options),
            lambda: dl.BagDataset(path, **options),
        ]
        for made in makers:
            assert notices(made) == [__file__] * 2

    def test_collections_that_are_not_grouped_are_noticed(self, uneven: Uneven) -> None:
        """Once, with the figure: how many more cells are decoded than used."""
        path, grouped = uneven[1, False][0], uneven[1, True][0]
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

    # fewer of them in a read, also by resampling, or a sample of each: by chance alone
    resampled = {"max_cells": None, "min_cells": 9, "small_bags": "resample", "window_cells": 63 * 9}
    for options in ({"window_cells": 63 * 3}, {"max_cells": 2}, resampled):
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
