"""Every bad input is refused with the rule, the value that breaks it, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import zarr
from annbatch import DatasetCollection
from scipy import sparse

import donorloader as dl
from _data import N_GENES, as_numpy, donor_ids, genotype_adata, make_cells, write_collection, x_values

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from _data import Store


def cells_of(donors: Any, *, n_genes: int = N_GENES, column: str = "donor_id") -> ad.AnnData:
    """Cells in memory with a donor column as given."""
    obs = pd.DataFrame({column: donors}, index=[f"cell{i}" for i in range(len(donors))])
    return ad.AnnData(
        X=sparse.csr_matrix(x_values(len(donors))[:, :n_genes]),
        obs=obs,
        var=pd.DataFrame(index=[f"gene{g}" for g in range(n_genes)]),
    )


def genotypes_of(ids: Any) -> ad.AnnData:
    """Genotypes in memory of donors as given."""
    return ad.AnnData(
        X=np.ones((len(ids), 4), dtype=np.int8),
        obs=pd.DataFrame(index=pd.Index([str(i) for i in ids])),
        var=pd.DataFrame(index=[f"rs{v}" for v in range(4)]),
    )


def message(error: type[Exception] | tuple[type[Exception], ...], action: Callable[[], Any]) -> str:
    """The text of the error that an action must raise, notes included."""
    with pytest.raises(error) as caught:
        action()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def assert_says(text: str, *parts: str) -> None:
    for part in parts:
        assert part.casefold() in text.casefold(), f"{part!r} is not in: {text}"


class TestDonorColumn:
    def test_absent(self, store: Store) -> None:
        for cells in (store.cells(3).path, store.cells(3).adatas):
            text = message(
                KeyError, lambda cells=cells: dl.DonorLoader(cells, store.genotypes().source, donor_key="patient")
            )
            assert_says(text, "patient", "cell_type", "donor_id", "donor_key")

    def test_absent_in_one_dataset(self, store: Store, tmp_path: Path) -> None:
        adatas = [a.copy() for a in store.cells(3).adatas]
        del adatas[1].obs["donor_id"]
        path = write_collection(tmp_path / "cells.zarr", adatas)
        assert_says(message(KeyError, lambda: dl.DonorLoader(path, store.genotypes().source)), "donor_id", "dataset_1")

    @pytest.mark.parametrize(
        "donors",
        [
            ["a", None, "b", None],
            ["a", np.nan, "b", np.nan],
            pd.Categorical(["a", None, "b", None]),
            pd.array([1, None, 2, None], dtype="Int64"),
            [1.0, np.nan, 2.0, np.nan],
        ],
        ids=["none", "nan", "categorical", "nullable_int", "float_with_nan"],
    )
    def test_nan(self, donors: Any) -> None:
        text = message(ValueError, lambda: dl.DonorLoader(cells_of(donors), genotypes_of("ab")))
        assert_says(text, "donor_id", "missing", "2 of 4", "row 1", "remove")

    def test_nan_on_disk(self, store: Store, tmp_path: Path) -> None:
        adatas = [a.copy() for a in store.cells(3).adatas]
        adatas[2].obs.loc[adatas[2].obs_names[[5, 8]], "donor_id"] = np.nan
        path = write_collection(tmp_path / "cells.zarr", adatas)
        text = message(ValueError, lambda: dl.DonorLoader(path, store.genotypes().source))
        assert_says(text, "dataset_2", "missing", "2 of 113", "row 5")

    def test_float_ids(self) -> None:
        text = message(TypeError, lambda: dl.DonorLoader(cells_of([1.0, 2.0, 2.0]), genotypes_of([1, 2])))
        assert_says(text, "donor_id", "float", "1.0", "cast")

    def test_float_ids_in_a_categorical(self) -> None:
        text = message(TypeError, lambda: dl.DonorLoader(cells_of(pd.Categorical([1.0, 2.0])), genotypes_of([1, 2])))
        assert_says(text, "donor_id", "float", "1.0")

    @pytest.mark.parametrize("value", [True, ("a", 1), 1.5], ids=["bool", "tuple", "float"])
    def test_ids_that_have_no_order_or_text(self, value: Any) -> None:
        donors = np.empty(3, dtype=object)
        donors[:] = ["a", "b", "c"]
        donors[1] = value
        text = message(TypeError, lambda: dl.DonorLoader(cells_of(donors), genotypes_of("abc")))
        assert_says(text, "donor_id", str(value) if not isinstance(value, tuple) else "'a', 1", "str")

    def test_mixed_ints_and_strings_are_text(self) -> None:
        donors = np.array([7, "7", "x", 10], dtype=object)
        genotypes = genotypes_of(["10", "x", "7"])
        genotypes.X[:] = np.array([[10], [0], [7]])
        with dl.DonorLoader(cells_of(donors), genotypes, batch_size=4, shuffle=False) as loader:
            [batch] = loader
        assert list(batch["unique_donors"]) == ["10", "7", "x"]
        assert as_numpy(batch["donor_features"])[as_numpy(batch["donor_idx"]), 0].tolist() == [7, 7, 0, 10]

    def test_float_ids_of_genotypes(self, tmp_path: Path) -> None:
        """AnnData turns obs_names into text, so a float index arrives as '1.0': no overlap, and the guess says so."""
        genotypes = genotypes_of([1.0, 2.0, 3.0])
        text = message(ValueError, lambda: dl.DonorLoader(cells_of([1, 2, 3]), genotypes))
        assert_says(text, "'1'", "'1.0'", "int")


class TestMissingDonors:
    def test_error_names_and_counts(self, store: Store) -> None:
        genotypes = store.genotypes().source
        few = genotypes[~genotypes.obs_names.isin(["d3", "d10"])].copy()
        text = message((ValueError, KeyError), lambda: dl.DonorLoader(store.cells(3).path, few))
        assert_says(text, "2", "'d10'", "'d3'", "missing_donors", "drop", "nan")

    def test_drop_says_what_it_leaves_out(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        cells, genotypes = store.cells(3), store.genotypes().source
        few = genotypes[~genotypes.obs_names.isin(["d3", "d10"])].copy()
        lacking = np.isin(cells.donor, ["d3", "d10"])
        with (
            caplog.at_level("INFO", logger="donorloader"),
            dl.DonorLoader(cells.path, few, missing_donors="drop") as loader,
        ):
            assert loader.n_obs == (~lacking).sum()
        assert [record.message for record in caplog.records] == [
            f"missing_donors='drop' leaves out {lacking.sum()} of {lacking.size} cells, which are of 2 donors without "
            "a row of genotypes: 'd10', 'd3'."
        ]
        caplog.clear()
        with dl.DonorLoader(cells.path, genotypes, missing_donors="drop"):
            assert not caplog.records

    def test_many_are_shortened(self, store: Store) -> None:
        genotypes = store.genotypes().source
        few = genotypes[genotypes.obs_names.isin(["d1"])].copy()
        text = message((ValueError, KeyError), lambda: dl.DonorLoader(store.cells(4).path, few))
        assert_says(text, "12 ", "'d0'")
        assert len(text) < 1200

    @pytest.mark.parametrize("policy", ["error", "drop", "nan"])
    def test_no_overlap_is_an_error_under_each_policy(self, store: Store, policy: str) -> None:
        other = genotypes_of([f"HG{i:05d}" for i in range(8)])
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, other, missing_donors=policy))
        assert_says(text, "nothing in common", "'HG00004'", "'d0'", "likely cause")
        assert text.count("'HG") == 5
        assert text.count("'d") == 5

    @pytest.mark.parametrize(
        ("of_cells", "of_genotypes", "guess"),
        [
            (["a", "b"], ["0_a", "0_b"], "FID"),
            (["a", "b"], ["fam_a", "fam_b"], "prefix"),
            (["x-a", "x-b"], ["a", "b"], "prefix"),
            ([1, 2], ["01", "02"], "int vs text"),
            ([1, 2], ["donor1", "donor2"], "prefix"),
            (["F1", "F2"], ["F1_a", "F2_b"], "FID"),
            (["A1", "B2"], ["a1", "b2"], "case"),
            (["a", "b"], [" a", " b"], "white space"),
        ],
    )
    def test_the_cause_is_guessed(self, of_cells: Any, of_genotypes: Any, guess: str) -> None:
        text = message(ValueError, lambda: dl.DonorLoader(cells_of(of_cells), genotypes_of(of_genotypes)))
        assert_says(text, guess, repr(str(of_cells[0])), repr(of_genotypes[0]))

    def test_an_all_zero_fid(self) -> None:
        genotypes = genotypes_of(["0"])
        text = message(ValueError, lambda: dl.DonorLoader(cells_of(["HG1", "HG2"]), genotypes))
        assert_says(text, "FID", "'0'")

    def test_dropping_every_selected_cell(self, store: Store) -> None:
        genotypes = store.genotypes().source
        few = genotypes[genotypes.obs_names.isin(["d1"])].copy()
        text = message(
            ValueError, lambda: dl.DonorLoader(store.cells(4).path, few, missing_donors="drop", donors=["d2", "d3"])
        )
        assert_says(text, "d2")


class TestGenotypes:
    @pytest.mark.parametrize("kind", ["memory", "h5ad", "zarr"])
    def test_duplicate_ids(self, store: Store, tmp_path: Path, kind: str) -> None:
        with pytest.warns(UserWarning, match="not unique"):
            genotypes = genotypes_of(["d0", "d1", "d1", "d2", "d2"])
        source: Any = genotypes
        if kind == "h5ad":
            source = tmp_path / "g.h5ad"
            genotypes.write_h5ad(source)
        elif kind == "zarr":
            source = tmp_path / "g.zarr"
            genotypes.write_zarr(source)
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, source))
        assert_says(text, "'d1'", "'d2'", "more than once", "duplicate")
        assert "'d0'" not in text

    @pytest.mark.parametrize("kind", ["h5ad", "zarr"])
    @pytest.mark.parametrize("n_ids", [5, 15])
    def test_rows_and_ids_differ_in_number(self, store: Store, tmp_path: Path, kind: str, n_ids: int) -> None:
        adata, _, _ = genotype_adata(donor_ids(6))  # 8 rows
        path = tmp_path / f"g.{kind}"
        adata.write_h5ad(path) if kind == "h5ad" else adata.write_zarr(path)
        ids = np.array([f"d{i}" for i in range(n_ids)], dtype=object)
        if kind == "h5ad":
            with h5py.File(path, "a") as file:
                ad.io.write_elem(file["obs"], file["obs"].attrs["_index"], ids)
        else:
            obs = zarr.open_group(path, mode="a", use_consolidated=False)["obs"]
            ad.io.write_elem(obs, obs.attrs["_index"], ids)
            (path / "zarr.json").write_text(_without_consolidated(path))
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, path))
        assert_says(text, "8 rows", f"{n_ids} ids")

    def test_unknown_variants(self, store: Store) -> None:
        for backing in ("memory", "h5ad", "zarr"):
            genotypes = store.genotypes(backing=backing).source
            text = message(
                KeyError,
                lambda g=genotypes: dl.DonorLoader(store.cells(3).path, g, variants=["rs1", "rs77", "chr1:5", "rs2"]),
            )
            assert_says(text, "'rs77'", "'chr1:5'", "rs0")
            assert "'rs1'," not in text.split("look like")[0]

    @pytest.mark.parametrize(
        ("variants", "parts"),
        [
            ([3, 24], ("24",)),
            ([-25], ("-25", "24")),
            (np.ones(23, dtype=bool), ("23", "24")),
            (np.zeros(24, dtype=bool), ("none",)),
            (slice(30, 40), ("none", "24")),
            ([], ("at least one",)),
            ("rs1", ("'rs1'", "list")),
            ([1.5], ("float",)),
            ([[1, 2]], ("one-dimensional",)),
        ],
        ids=["position", "negative", "mask_length", "mask_empty", "slice_empty", "empty", "text", "float", "2d"],
    )
    def test_other_choices_of_variants(self, store: Store, variants: Any, parts: tuple[str, ...]) -> None:
        text = message(
            (IndexError, ValueError, TypeError),
            lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, variants=variants),
        )
        assert_says(text, *parts)

    @pytest.mark.filterwarnings("ignore:.*not unique:UserWarning")
    def test_a_name_of_two_variants(self, store: Store) -> None:
        genotypes = store.genotypes().source.copy()
        names = list(genotypes.var_names)
        names[3] = names[5]
        genotypes.var_names = names
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, genotypes, variants=["rs5"]))
        assert_says(text, "'rs5'", "position")

    def test_unknown_layer(self, store: Store) -> None:
        for backing in ("memory", "zarr"):
            text = message(
                KeyError,
                lambda b=backing: dl.DonorLoader(
                    store.cells(3).path, store.genotypes(backing=b).source, genotype_layer="dosage"
                ),
            )
            assert_says(text, "dosage")

    def test_not_numbers(self, store: Store, tmp_path: Path) -> None:
        genotypes = genotypes_of(["d0", "d1"])
        genotypes.layers["text"] = np.array([["0/1"] * 4] * 2, dtype=object)
        text = message(TypeError, lambda: dl.DonorLoader(store.cells(3).path, genotypes, genotype_layer="text"))
        assert_says(text, "number")

    def test_a_bed_is_prepared_first(self, store: Store, tmp_path: Path) -> None:
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, tmp_path / "panel.bed"))
        assert_says(text, "prepare", "panel.bed")

    @pytest.mark.parametrize("change", ["shorter", "longer", "not_a_bed"])
    def test_a_bed_of_the_wrong_length(self, tmp_path: Path, change: str) -> None:
        bed_reader = pytest.importorskip("bed_reader")
        bed = tmp_path / "panel.bed"
        bed_reader.to_bed(
            str(bed),
            np.ones((6, 9), dtype=np.int8),
            properties={"iid": [f"d{i}" for i in range(6)], "sid": [f"rs{i}" for i in range(9)]},
        )
        data = bed.read_bytes()
        bed.write_bytes({"shorter": data[:-3], "longer": data + b"\0", "not_a_bed": b"##" + data[2:]}[change])
        cells = tmp_path / "cells.h5ad"
        cells_of([f"d{i}" for i in range(6)]).write_h5ad(cells)
        text = message(ValueError, lambda: dl.prepare(cells=[cells], genotypes=bed, out=tmp_path / "study"))
        assert_says(text, "panel.bed")
        if change != "not_a_bed":
            expected, found = len(data), len(bed.read_bytes())
            assert_says(text.replace(",", ""), str(expected), str(found))
        assert not (tmp_path / "study").exists()


def _without_consolidated(path: Path) -> str:
    import json

    meta = json.loads((path / "zarr.json").read_text())
    meta.pop("consolidated_metadata", None)
    return json.dumps(meta)


class TestCells:
    def test_an_empty_collection(self, store: Store, tmp_path: Path) -> None:
        collection = DatasetCollection(zarr.open_group(tmp_path / "empty.zarr", mode="w", zarr_format=3))
        text = message(ValueError, lambda: dl.DonorLoader(collection, store.genotypes().source))
        assert_says(text, "empty")
        group = zarr.open_group(tmp_path / "marked.zarr", mode="w", zarr_format=3)
        group.update_attributes({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
        text = message(ValueError, lambda: dl.DonorLoader(tmp_path / "marked.zarr", store.genotypes().source))
        assert_says(text, "empty", "marked.zarr")

    def test_no_cells(self, store: Store) -> None:
        for cells in (store.cells(1).adatas[0][:0].copy(), []):
            text = message((ValueError, TypeError), lambda c=cells: dl.DonorLoader(c, store.genotypes().source))
            assert_says(text, "empty")

    def test_no_such_path(self, store: Store, tmp_path: Path) -> None:
        for name in ("nowhere.zarr", "nowhere", "nowhere.h5ad"):
            for build in (
                lambda p: dl.DonorLoader(p, store.genotypes().source),
                lambda p: dl.DonorLoader(store.cells(3).path, p),
            ):
                text = message((FileNotFoundError, ValueError), lambda b=build, n=name: b(tmp_path / n))
                assert_says(text, name)

    def test_no_such_file_is_file_not_found(self, store: Store, tmp_path: Path) -> None:
        for build in (
            lambda: dl.DonorLoader(tmp_path / "nowhere.zarr", store.genotypes().source),
            lambda: dl.DonorLoader(store.cells(3).path, tmp_path / "nowhere.zarr"),
            lambda: dl.DonorLoader(store.cells(3).path, tmp_path / "nowhere.h5ad"),
            lambda: dl.open_study(tmp_path / "nowhere"),
        ):
            assert_says(message(FileNotFoundError, build), "nowhere")

    def test_not_a_store(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "notes.txt").write_text("hello")
        (tmp_path / "table.zarr").write_text("hello")
        (tmp_path / "table.h5ad").write_text("hello")
        zarr.create_array(tmp_path / "array.zarr", shape=(3,), dtype="i4")
        zarr.open_group(tmp_path / "group.zarr", mode="w", zarr_format=3)
        for name in ("folder", "table.zarr", "table.h5ad", "array.zarr", "group.zarr"):
            for build in (
                lambda p: dl.DonorLoader(p, store.genotypes().source),
                lambda p: dl.DonorLoader(store.cells(3).path, p),
            ):
                text = message((FileNotFoundError, ValueError), lambda b=build, n=name: b(tmp_path / n))
                assert_says(text, name)

    def test_a_store_of_another_kind(self, store: Store) -> None:
        for wrong in (3, None, {"X": 1}, [1, 2]):
            text = message(TypeError, lambda w=wrong: dl.DonorLoader(w, store.genotypes().source))
            assert_says(text, "cells must be")

    def test_an_h5ad_of_cells_is_prepared_first(self, store: Store, tmp_path: Path) -> None:
        cells_of(["d0", "d1"]).write_h5ad(tmp_path / "cells.h5ad")
        text = message(ValueError, lambda: dl.DonorLoader(tmp_path / "cells.h5ad", store.genotypes().source))
        assert_says(text, "cells.h5ad", "donorloader prepare")

    def test_datasets_of_other_genes(self, store: Store) -> None:
        first, second = cells_of(["d0"] * 4), cells_of(["d1"] * 4)
        second.var_names = list(reversed(second.var_names))
        text = message(ValueError, lambda: dl.DonorLoader([first, second], store.genotypes().source))
        assert_says(text, "same variables", "AnnData 1")

    def test_csc(self, store: Store) -> None:
        adata = cells_of(["d0"] * 4)
        adata.X = adata.X.tocsc()
        assert_says(message(ValueError, lambda: dl.DonorLoader(adata, store.genotypes().source)), "CSC", "tocsr")


class TestFilters:
    def test_unknown_donors(self, store: Store) -> None:
        text = message(
            KeyError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, donors=["d1", "d99"])
        )
        assert_says(text, "'d99'")
        assert "'d1'," not in text.split("cells have")[0]

    def test_donors_as_text(self, store: Store) -> None:
        text = message(TypeError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, donors="d1"))
        assert_says(text, "donors", "['d1']")

    def test_no_donors(self, store: Store) -> None:
        text = message(ValueError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, donors=[]))
        assert_says(text, "donor")

    def test_nothing_left(self, store: Store) -> None:
        query = "row > 1000"
        text = message(
            ValueError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, cells_query=query)
        )
        assert_says(text, query)

    def test_unknown_column(self, store: Store) -> None:
        query = "age > 3"
        text = message(
            KeyError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, cells_query=query)
        )
        assert_says(text, query, "cell_type")

    def test_not_a_condition(self, store: Store) -> None:
        text = message(
            ValueError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, cells_query="row + 1")
        )
        assert_says(text, "condition", "row + 1")

    @pytest.mark.parametrize("query", ["row >", "row = 3", "(("])
    def test_not_python(self, store: Store, query: str) -> None:
        text = message(
            (ValueError, SyntaxError),
            lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, cells_query=query),
        )
        assert_says(text, query)

    def test_obs_columns_that_are_not_there(self, store: Store) -> None:
        text = message(
            KeyError, lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, obs_columns=["row", "age"])
        )
        assert_says(text, "age", "cell_type")

    def test_obs_columns_as_text(self, store: Store) -> None:
        text = message(
            (TypeError, KeyError),
            lambda: dl.DonorLoader(store.cells(3).path, store.genotypes().source, obs_columns="row"),
        )
        assert_says(text, "obs_columns", "'row'")


class TestStudy:
    def test_an_unfinished_study(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "study").mkdir()
        make_cells(tmp_path / "study" / "cells.zarr", (5, 4))
        for build in (lambda: dl.open_study(tmp_path / "study"), lambda: dl.DonorLoader(tmp_path / "study")):
            assert_says(message((FileNotFoundError, ValueError), build), "study")
