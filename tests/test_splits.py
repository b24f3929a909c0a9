"""Splits: disjoint, in proportion, families whole, refused on other studies; and conditions on donors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import donorloader as dl
from _data import donor_ids, genotype_adata
from donorloader._allot import check_fractions, cut_by_hash

if TYPE_CHECKING:
    from pathlib import Path

    import anndata as ad

    from _data import Store

# Fixed for good: a split that changes between releases would put donors of the training set into the test set.
GOLDEN = ("p1", "p10", "p11", "p2", "p6", "p8")
GOLDEN_CELLS = "1000111001010110"

FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}


def table(n: int, disease: Any = None, family: Any = None) -> pd.DataFrame:
    frame = pd.DataFrame(index=[f"p{i}" for i in range(n)])
    frame["disease"] = "yes" if disease is None else disease
    frame["family"] = np.arange(n) if family is None else family
    return frame


def sets(split: dl.Splits) -> dict[str, set[str]]:
    return {name: set(selection) for name, selection in split.items()}


def cells_of_loader(loader: Any) -> tuple[set[str], np.ndarray]:
    with loader:
        rows = np.concatenate([batch["index"].numpy() for batch in loader])
        return set(loader.donors), np.sort(rows)


@st.composite
def draws(draw: Any) -> tuple[pd.DataFrame, dict[str, float], int]:
    n = draw(st.integers(3, 90))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    frame = table(
        n,
        disease=[f"s{i}" for i in rng.integers(0, draw(st.integers(1, 6)), n)],
        family=rng.integers(0, draw(st.integers(1, n)), n),
    )
    parts = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    total = sum(parts) + draw(st.sampled_from([0, 0, 7]))
    return frame, {f"part{i}": part / total for i, part in enumerate(parts)}, draw(st.integers(0, 1000))


class TestDonors:
    @settings(max_examples=30)
    @given(draws())
    def test_disjoint_and_within_one_donor_of_exact(self, drawn: Any) -> None:
        frame, fractions, seed = drawn
        try:
            split = dl.split_donors(frame, fractions=fractions, seed=seed, stratify="disease")
        except ValueError as error:
            assume("Every split needs a donor" not in str(error))
            raise
        parts = sets(split)
        assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
        for name, share in fractions.items():
            assert abs(len(parts[name]) - share * len(frame)) < 1 + 1e-9
            for stratum, members in frame.groupby("disease").groups.items():
                got = len(parts[name] & set(members))
                assert abs(got - share * len(members)) < 1 + 1e-9, (name, stratum)
        if sum(fractions.values()) > 1 - 1e-6:
            assert set().union(*parts.values()) == set(frame.index)

    @settings(max_examples=30)
    @given(draws(), st.booleans())
    @pytest.mark.filterwarnings("ignore:Groups stay together")
    def test_families_are_whole_and_no_donor_is_in_two(self, drawn: Any, stratify: bool) -> None:
        frame, fractions, seed = drawn
        options = {"stratify": "disease"} if stratify else {}
        try:
            split = dl.split_donors(frame, fractions=fractions, seed=seed, group="family", **options)
        except ValueError as error:  # only where there are fewer families than splits, or no relatives
            possible = len(fractions) <= frame["family"].nunique() < len(frame)
            assume(possible or "largest of the" not in str(error))
            raise
        parts = sets(split)
        assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
        for members in frame.groupby("family").groups.values():
            touched = [name for name, part in parts.items() if part & set(members)]
            rest = set(members) - set().union(*parts.values())
            assert len(touched) + bool(rest) == 1
        # the report is counted anew
        for row in split.report.itertuples():
            members = set(frame.index[frame["disease"] == row.stratum]) if stratify else set(frame.index)
            assert row.donors == len(parts[row.split] & members)
            assert row.share == pytest.approx(fractions[row.split] * len(members), abs=1e-3)

    def test_no_split_is_left_empty_by_families(self) -> None:
        frame = table(30, family=np.arange(30) % 10)
        frame["own"] = frame["family"].astype(
            str
        )  # every family would be in the training set, were it for strata alone
        with pytest.warns(UserWarning, match="Groups stay together"):
            split = dl.split_donors(frame, fractions=FRACTIONS, stratify="own", group="family")
        assert {name: len(part) for name, part in split.items()} == {"train": 24, "val": 3, "test": 3}

    def test_small_families_cost_no_balance(self) -> None:
        frame = table(300, disease=["case", "control", "control"] * 100, family=np.arange(300) // 2)
        split = dl.split_donors(frame, fractions=FRACTIONS, stratify="disease", group="family")
        assert split.report["off_by"].abs().max() < 2
        assert {name: len(part) for name, part in split.items()} == {"train": 240, "val": 30, "test": 30}

    def test_order_of_rows_does_not_matter_but_the_seed_does(self) -> None:
        frame = table(60, disease=list("abc") * 20)
        split = sets(dl.split_donors(frame, seed=3, stratify="disease"))
        shuffled = frame.sample(frac=1, random_state=0).astype({"disease": "category"})
        assert sets(dl.split_donors(shuffled, seed=3, stratify="disease")) == split
        assert sets(dl.split_donors(frame, seed=4, stratify="disease")) != split

    def test_golden(self) -> None:
        split = dl.split_donors(table(12), fractions={"a": 0.5, "b": 0.5}, seed=0)
        assert split["a"].donors == GOLDEN

    def test_conflict_is_told(self) -> None:
        frame = table(10, family=["big"] * 8 + ["c", "d"])
        with pytest.warns(UserWarning, match="Groups stay together, so 2 of 2 counts are off"):
            split = dl.split_donors(frame, fractions={"a": 0.5, "b": 0.5}, group="family")
        assert sorted(len(part) for part in split.values()) == [2, 8]
        assert split.report["off_by"].abs().tolist() == [3.0, 3.0]

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"fractions": {"a": 0.8, "b": 0.3}}, ValueError, ["sum to 1", "1.1"]),
            ({"fractions": {"a": 0}}, ValueError, ["above 0", "'a'"]),
            ({"fractions": [0.5, 0.5]}, TypeError, ["names of splits"]),
            ({"fractions": {}}, TypeError, ["names of splits"]),
            ({"stratify": "age"}, KeyError, ["'age'", "'disease'"]),
            ({"seed": -1}, ValueError, ["seed"]),
            ({"group": ["disease", "family"]}, TypeError, ["group one", "['disease', 'family']"]),
            ({"stratify": [1]}, TypeError, ["as text", "[1]"]),
            ({"group": "twice"}, ValueError, ["each column once", "'twice'"]),
            ({"fractions": {"a": 0.98, "b": 0.01, "c": 0.01}}, ValueError, ["needs a donor", "of 12"]),
            ({"group": "disease"}, ValueError, ["needs a donor", "'disease' has 12 donors"]),
            ({"stratify": "hole"}, ValueError, ["'hole'", "1 have none", "'p3'"]),
            ({"cells_query": "x > 1"}, ValueError, ["cells_query"]),
        ],
    )
    def test_errors(self, change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
        frame = table(12)
        frame["hole"] = ["a"] * 3 + [None] + ["a"] * 8
        frame = pd.concat([frame, pd.DataFrame({"twice": "a"}, index=frame.index)], axis=1)
        frame.insert(0, "twice", "b", allow_duplicates=True)
        with pytest.raises(error) as caught:
            dl.split_donors(frame, **change)
        assert all(word in str(caught.value) for word in words), caught.value


def with_donor_columns(store: Store) -> tuple[Any, ad.AnnData, pd.DataFrame]:
    """Cells, genotypes whose obs has the sex of donors, and what is known of them."""
    adata, ids, _ = genotype_adata(donor_ids())
    adata.obs["sex"] = np.where(np.arange(ids.size) % 2, "f", "m")
    adata.obs["age"] = np.arange(ids.size) + 40
    return store.cells(3), adata, adata.obs


class TestStudies:
    def test_columns_of_the_genotypes(self, store: Store) -> None:
        cells, genotypes, obs = with_donor_columns(store)
        split = dl.split_donors(cells.path, genotypes, fractions={"a": 0.5, "b": 0.5}, stratify="sex")
        assert set(split["a"]) | set(split["b"]) == set(cells.donor)
        halves = obs.loc[list(split["a"]), "sex"].value_counts(), obs.loc[list(split["b"]), "sex"].value_counts()
        assert abs(halves[0] - halves[1]).max() <= 1
        donors, rows = cells_of_loader(dl.DonorLoader(cells.path, genotypes, donors=split["a"], batch_size=16))
        assert donors == set(split["a"])
        np.testing.assert_array_equal(rows, cells.rows(donors=split["a"]))

    def test_columns_of_the_cells(self, store: Store) -> None:
        cells = store.cells(3)
        adatas = [a.copy() for a in cells.adatas]
        for adata in adatas:
            adata.obs["old"] = [int(str(d)[1:]) > 5 for d in adata.obs["donor_id"]]
        split = dl.split_donors(adatas, fractions={"a": 0.5, "b": 0.5}, stratify="old", group="donor_id")
        for selection in split.values():
            old = sum(int(d[1:]) > 5 for d in selection)
            assert abs(old - 3.5) < 1.1  # of 7
        with pytest.raises(ValueError, match="'cell_type' must be constant within each donor"):
            dl.split_donors(adatas, stratify="cell_type")

    def test_query_that_empties_a_donor(self, store: Store) -> None:
        """Such donors are in no split, and all splits can still be used with the query, and without."""
        cells = store.cells(3)
        query = "row < 20"
        left = set(cells.donor[cells.rows(query)])
        assert left < set(cells.donor)
        split = dl.split_donors(cells.path, fractions={"a": 0.5, "b": 0.5}, cells_query=query)
        assert set(split["a"]) | set(split["b"]) == left
        donors, rows = cells_of_loader(dl.DonorLoader(cells.path, donors=split["a"], cells_query=query, batch_size=16))
        assert donors == set(split["a"])
        np.testing.assert_array_equal(rows, cells.rows(query, split["a"]))
        # drawn without it, a donor that the query empties is left out by the loader
        split = dl.split_donors(cells.path, fractions={"a": 0.5, "b": 0.5})
        donors, _ = cells_of_loader(dl.DonorLoader(cells.path, donors=split["a"], cells_query=query, batch_size=16))
        assert donors == set(split["a"]) & left

    def test_donor_without_genotypes(self, store: Store) -> None:
        cells, genotypes, _ = with_donor_columns(store)
        absent = "d3"
        fewer = genotypes[genotypes.obs_names != absent].copy()
        with pytest.raises(ValueError, match="1 of 13 have none: 'd3'"):
            dl.split_donors(cells.path, fewer)
        with pytest.raises(ValueError, match="a value of 'sex', but 1 have none: 'd3'"):
            dl.split_donors(cells.path, fewer, missing_donors="nan", stratify="sex")
        split = dl.split_donors(
            cells.path, fewer, missing_donors="drop", stratify="sex", fractions={"a": 0.5, "b": 0.5}
        )
        assert set(split["a"]) | set(split["b"]) == set(cells.donor) - {absent}
        donors, _ = cells_of_loader(
            dl.DonorLoader(cells.path, fewer, donors=split["b"], missing_donors="drop", batch_size=16)
        )
        assert donors == set(split["b"])
        kept = dl.split_donors(cells.path, fewer, missing_donors="nan", fractions={"a": 0.5, "b": 0.5})
        assert set(kept["a"]) | set(kept["b"]) == set(cells.donor)

    @pytest.mark.filterwarnings("ignore:Bags are read fastest")
    def test_other_studies_are_refused(self, store: Store) -> None:
        cells = store.cells(3)
        split = dl.split_donors(cells.path)
        fewer = [a[a.obs["donor_id"] != "d2"].copy() for a in cells.adatas]
        more = [a.copy() for a in cells.adatas]
        more[0].obs["donor_id"] = more[0].obs["donor_id"].astype(str).where(np.arange(more[0].n_obs) > 1, "new")
        for other, word in ((fewer, "'d2'"), (more, "'new'")):
            for front_door in (dl.DonorLoader, dl.BagLoader, dl.BagDataset):
                with pytest.raises(ValueError, match="used on what it was drawn from") as caught:
                    front_door(other, donors=split["train"])
                assert word in str(caught.value)
        with dl.DonorLoader(fewer, donors=[d for d in split["train"] if d != "d2"]):
            pass

    def test_of_a_table_donors_may_lack_cells(self, store: Store) -> None:
        cells = store.cells(3)
        everyone = pd.DataFrame(index=[*sorted(set(cells.donor)), "x1", "x2"])
        split = dl.split_donors(everyone, fractions={"a": 0.9, "b": 0.1})
        donors, _ = cells_of_loader(dl.DonorLoader(cells.path, donors=split["a"], batch_size=32))
        assert donors == set(split["a"]) & set(cells.donor)
        few = dl.split_donors(everyone.iloc[1:], fractions={"a": 1})
        with pytest.raises(ValueError, match="drawn from"):
            dl.DonorLoader(cells.path, donors=few["a"])

    @pytest.mark.filterwarnings("ignore:Bags are read fastest")
    def test_bags(self, store: Store) -> None:
        cells = store.cells(3)
        split = dl.split_donors(cells.path, fractions={"a": 0.5, "b": 0.5})
        with dl.BagLoader(cells.path, donors=split["b"], bags_per_batch=4) as loader:
            assert set(np.concatenate([batch["donors"] for batch in loader])) == set(split["b"])
        dataset = dl.BagDataset(cells.path, donors=split["b"])
        assert set(dataset.donors) == set(split["b"])
        dataset.close()


class TestSaved:
    def test_there_and_back(self, store: Store, tmp_path: Path) -> None:
        cells = store.cells(3)
        for split in (dl.split_donors(cells.path, seed=5), dl.split_cells(cells.path, seed=5)):
            split.to_json(tmp_path / "split.json")
            again = dl.Splits.from_json(tmp_path / "split.json")
            assert dict(again) == dict(split)
            selection = split["val"]
            assert type(selection).from_json(selection.to_json()) == selection
            assert len(selection.to_json()) < 2000

    def test_changed_ones_are_refused(self, store: Store) -> None:
        text = dl.split_donors(store.cells(3).path)["train"].to_json()
        content = json.loads(text)
        content["donors"] = content["donors"][1:]
        with pytest.raises(ValueError, match="was changed"):
            dl.DonorSelection.from_json(json.dumps(content))
        with pytest.raises(ValueError, match="DonorSelection, not a CellSelection"):
            dl.CellSelection.from_json(text)
        with pytest.raises(ValueError, match="not valid"):
            dl.DonorSelection.from_json("{")
        with pytest.raises(ValueError, match="not a donorloader-selection"):
            dl.DonorSelection.from_json("{}")
        with pytest.raises(ValueError, match="not whole"):
            dl.DonorSelection.from_json(json.dumps({k: v for k, v in content.items() if k != "others"}))
        splits = json.loads(dl.split_donors(store.cells(3).path).to_json())
        train, test = splits["selections"][0], splits["selections"][2]
        moved = test["donors"][0]
        train["donors"], train["others"] = [*train["donors"], moved], [d for d in train["others"] if d != moved]
        with pytest.raises(ValueError, match=f"donors once, but these were changed: '{moved}'"):
            dl.Splits.from_json(json.dumps(splits))
        test["split"] = "train"
        with pytest.raises(ValueError, match="splits once, but these were changed: 'train'"):
            dl.Splits.from_json(json.dumps(splits))


class TestCells:
    @settings(max_examples=30)
    @given(st.integers(0, 50), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
    def test_each_donor_is_cut_within_one_cell(self, seed: int, parts: list[int], rest: bool) -> None:
        codes = np.random.default_rng(seed).integers(-1, 9, 300)
        shares = check_fractions({f"s{i}": part / (sum(parts) + 3 * rest) for i, part in enumerate(parts)})
        place = cut_by_hash(codes, shares, seed)
        assert (place[codes < 0] == len(shares)).all()
        for donor in range(9):
            counts = np.bincount(place[codes == donor], minlength=len(shares) + 1)
            for count, share in zip(counts, [*shares.values(), 1 - sum(shares.values())], strict=True):
                assert abs(count - share * (codes == donor).sum()) <= 1

    def test_loaders_take_their_cells(self, store: Store) -> None:
        cells = store.cells(3)
        split = dl.split_cells(cells.path, fractions=FRACTIONS, seed=2)
        seen = {
            name: cells_of_loader(dl.DonorLoader(cells.path, store.genotypes().source, donors=part, batch_size=16))[1]
            for name, part in split.items()
        }
        np.testing.assert_array_equal(np.sort(np.concatenate(list(seen.values()))), np.arange(cells.n_obs))
        assert {name: rows.size for name, rows in seen.items()} == dict(split.report.groupby("split")["cells"].sum())
        queried = cells_of_loader(dl.DonorLoader(cells.path, donors=split["train"], cells_query="row < 90"))[1]
        np.testing.assert_array_equal(queried, seen["train"][seen["train"] < 90])
        assert "Donors leak" in dl.split_cells.__doc__

    def test_any_seed_and_no_empty_split(self, store: Store) -> None:
        cells = store.cells(3)
        rows = [cut_by_hash(np.zeros(99, int), check_fractions(FRACTIONS), s) for s in (1, 2**64 + 1, 2**70, 2**71)]
        assert len({row.tobytes() for row in rows}) == 4
        large = dl.split_cells(cells.path, seed=2**70)
        assert cells_of_loader(dl.DonorLoader(cells.path, donors=large["val"]))[1].size
        with pytest.raises(ValueError, match="'val' would have none of 181 cells of 13 donors"):
            dl.split_cells(cells.path, fractions={"train": 0.9, "val": 0.00001})
        with pytest.raises(ValueError, match=r"at least a millionth, but that of 'val' is 1e-09"):
            dl.split_cells(cells.path, fractions={"train": 0.9, "val": 1e-9})

    def test_another_order_is_refused(self, store: Store) -> None:
        split = dl.split_cells(store.cells(3).path)
        with pytest.raises(ValueError, match="the collection it was drawn from"):
            dl.DonorLoader(store.cells(3).adatas[::-1], donors=split["train"])
        with pytest.raises(ValueError, match="the collection it was drawn from"):
            dl.DonorLoader(store.cells(1).path, donors=split["train"])

    def test_hash_is_for_good(self) -> None:
        place = cut_by_hash(np.repeat([0, 1], 8), check_fractions({"a": 0.5, "b": 0.5}), 7)
        assert "".join(map(str, place)) == GOLDEN_CELLS


def _renumbered(table: pd.DataFrame) -> pd.Series:
    table.index = pd.RangeIndex(len(table))
    return table["age"] > 45


class TestConditions:
    @pytest.mark.filterwarnings("ignore:Bags are read fastest")
    @pytest.mark.parametrize(
        "condition",
        [
            "age > 45 and sex == 'f'",
            lambda t: (t["age"] > 45) & (t["sex"] == "f"),
            lambda t: [a > 45 and s == "f" for a, s in zip(t.age, t.sex, strict=True)],
        ],
    )
    def test_on_columns_of_the_genotypes(self, store: Store, condition: Any) -> None:
        cells, genotypes, obs = with_donor_columns(store)
        wanted = set(obs.index[(obs["age"] > 45) & (obs["sex"] == "f")]) & set(cells.donor)
        for front_door in (dl.DonorLoader, dl.BagLoader):
            with front_door(cells.path, genotypes, donors=condition) as loader:
                assert set(loader.donors) == wanted

    @pytest.mark.parametrize(
        "condition",
        [
            "age.sort_values() > 45",
            lambda t: t.sort_values("age")["age"] > 45,
            lambda t: (t["age"] > 45).sample(frac=1),
        ],
    )
    def test_what_a_condition_sorts_is_read_by_id(self, store: Store, condition: Any) -> None:
        cells, genotypes, obs = with_donor_columns(store)
        with dl.DonorLoader(cells.path, genotypes, donors=condition) as loader:
            assert set(loader.donors) == set(obs.index[obs["age"] > 45]) & set(cells.donor)
        query = "row.sort_values(ascending=False) < 60"  # and so of cells
        assert (cells_of_loader(dl.DonorLoader(cells.path, cells_query=query))[1] < 60).all()

    @pytest.mark.parametrize(
        "condition", [lambda t: t.reset_index()["age"] > 45, lambda t: _renumbered(t), lambda t: t["age"][1:] > 45]
    )
    def test_other_rows_than_those_of_the_table(self, store: Store, condition: Any) -> None:
        cells, genotypes, _ = with_donor_columns(store)
        with pytest.raises(ValueError, match=r"leave (rows|the table)|must leave the table"):
            dl.DonorLoader(cells.path, genotypes, donors=condition)

    def test_on_numbers_of_cells(self, store: Store) -> None:
        cells = store.cells(3)
        query = "cell_type == 'B'"
        counts = pd.Series(cells.donor[cells.rows(query)]).value_counts()
        for condition in ("n_cells >= 4", lambda t: t["n_cells"] >= 4):
            with dl.DonorLoader(cells.path, donors=condition, cells_query=query) as loader:
                assert set(loader.donors) == set(counts.index[counts >= 4])

    @pytest.mark.parametrize(
        ("condition", "error", "words"),
        [
            ("d1", TypeError, ["['d1']"]),
            ("age + 1", ValueError, ["one bool per donor"]),
            ("size > 1", KeyError, ["size", "'age'"]),
            ("age >", ValueError, ["cannot be evaluated"]),
            ("age > 1000", ValueError, ["No donor satisfies"]),
            ("row > 3", ValueError, ["constant within each donor"]),
            (lambda t: t["age"], ValueError, ["one bool per donor"]),
            (lambda t: [True], ValueError, ["13 in all", "(1,)"]),
        ],
    )
    def test_errors(self, store: Store, condition: Any, error: type[Exception], words: list[str]) -> None:
        cells, genotypes, _ = with_donor_columns(store)
        with pytest.raises(error) as caught:
            dl.DonorLoader(cells.path, genotypes, donors=condition)
        assert all(word in str(caught.value) for word in words), caught.value

    def test_all_splits_at_once(self, store: Store) -> None:
        with pytest.raises(TypeError, match=r"split\['train'\]"):
            dl.DonorLoader(store.cells(3).path, donors=dl.split_donors(store.cells(3).path))
