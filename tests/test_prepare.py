"""prepare: what a study holds is what the sources hold, whatever their number, form and layout."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from bed_reader import open_bed
from scipy import sparse

import donorloader as dl
from _data import N_GENES, SIZES, cell_table, datasets, donor_ids, genotype_adata, open_collection, x_values
from _prepare import assert_same_cells, dense, fingerprint, panel, read_cells, read_genotypes, written
from donorloader.cells._collect import collect_cells
from donorloader.cells._raw import open_raw_cells
from donorloader.cells._table import harmonise_cells
from donorloader.genotypes._variant_table import describe_variants
from donorloader.genotypes._write import _PEAK_PER_VAR, write_genotypes

if TYPE_CHECKING:
    from pathlib import Path

SIZE = SIZES[3]


class TestCells:
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    @pytest.mark.parametrize("kind", ["h5ad", "zarr", "memory"])
    def test_every_cell_once_with_its_values(self, tmp_path: Path, kind: str, layout: str) -> None:
        sources = written(datasets(SIZE, layout=layout), tmp_path, kind)
        study = dl.prepare(sources, out=tmp_path / "study")
        cells = assert_same_cells(study.cells)
        assert sparse.issparse(cells.X) == (layout == "csr")
        assert list(cells.var_names) == [f"gene{g}" for g in range(N_GENES)]
        assert study.genotypes is None

    def test_the_order_is_shuffled(self, tmp_path: Path) -> None:
        rows = read_cells(dl.prepare(datasets(SIZE), out=tmp_path / "study").cells).obs["row"].to_numpy()
        assert abs(np.corrcoef(rows, np.arange(rows.size))[0, 1]) < 0.3

    def test_one_source_needs_no_list(self, tmp_path: Path) -> None:
        adata = ad.concat(datasets(SIZE))
        assert_same_cells(dl.prepare(adata, out=tmp_path / "a").cells)
        adata.write_h5ad(tmp_path / "cells.h5ad")
        assert_same_cells(dl.prepare(str(tmp_path / "cells.h5ad"), out=tmp_path / "b").cells)

    def test_backed(self, tmp_path: Path) -> None:
        ad.concat(datasets(SIZE)).write_h5ad(tmp_path / "cells.h5ad")
        adata = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
        try:
            assert_same_cells(dl.prepare(adata, out=tmp_path / "study").cells)
        finally:
            adata.file.close()

    @pytest.mark.parametrize("kind", ["h5ad", "zarr", "memory"])
    def test_csc_is_turned_round(self, tmp_path: Path, kind: str) -> None:
        adatas = datasets(SIZE)
        adatas[1].X = adatas[1].X.tocsc()
        cells = assert_same_cells(dl.prepare(written(adatas, tmp_path, kind), out=tmp_path / "study").cells)
        assert sparse.isspmatrix_csr(cells.X) or isinstance(cells.X, sparse.csr_array)

    def test_dense_and_sparse_make_sparse(self, tmp_path: Path) -> None:
        adatas = [*datasets(SIZE)[:2], datasets(SIZE, layout="dense")[2]]
        assert sparse.issparse(assert_same_cells(dl.prepare(adatas, out=tmp_path / "study").cells).X)

    def test_a_layer_in_place_of_x(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        for adata in adatas:
            adata.layers["counts"] = adata.X
            adata.X = adata.X * 0.5
        sources = [*written(adatas[:2], tmp_path, "h5ad"), adatas[2]]
        assert_same_cells(dl.prepare(sources, out=tmp_path / "study", layer="counts").cells)

    def test_sources_without_cells_are_left_out(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        assert_same_cells(dl.prepare([adatas[0][:0].copy(), *adatas], out=tmp_path / "study").cells)

    def test_shuffle_depends_on_the_seed_alone(self, tmp_path: Path) -> None:
        def rows(name: str, seed: int) -> list[int]:
            np.random.seed(len(name))  # noqa: NPY002 - a user's global seed must not matter
            before = np.random.get_state()[1].copy()  # noqa: NPY002
            study = dl.prepare(datasets(SIZE), out=tmp_path / name, seed=seed)
            assert (np.random.get_state()[1] == before).all()  # noqa: NPY002
            return read_cells(study.cells).obs["row"].tolist()

        first = rows("a", 0)
        assert rows("another", 0) == first
        assert rows("b", 1) != first


@pytest.fixture(scope="module", params=["csr", "dense"])
def collection(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    tmp_path, sizes = tmp_path_factory.mktemp("many"), (900, 37, 1200)
    adatas = datasets(sizes, layout=request.param)
    sources = [open_raw_cells(source) for source in written(adatas, tmp_path, "h5ad")]
    table = harmonise_cells(sources, memory=10**9)
    obs_bytes = sum(int(obs.memory_usage(deep=True).sum()) for obs in table.obs)
    read: list[int] = []
    result = collect_cells(table, tmp_path / "c.zarr", memory=3 * obs_bytes + 150_000, seed=0, on_rows=read.append)
    assert result.n_datasets >= 3
    assert sum(read) == sum(sizes)  # each cell is read once
    return tmp_path / "c.zarr"


class TestManyDatasets:
    """A budget that holds a part of the cells: several datasets, each a sample of all sources."""

    def test_every_cell_once_with_its_values(self, collection: Path) -> None:
        cells = read_cells(collection)
        rows = cells.obs["row"].to_numpy()
        assert sorted(rows) == list(range(2137))
        np.testing.assert_array_equal(dense(cells.X), x_values(2137)[rows])
        expected = cell_table((900, 37, 1200), donor_ids()).iloc[rows]
        assert cells.obs["donor_id"].astype(str).tolist() == expected["donor_id"].tolist()

    def test_datasets_are_alike(self, collection: Path) -> None:
        parts = [ad.io.read_elem(group) for group in open_collection(collection)]
        sizes = [part.n_obs for part in parts]
        assert max(sizes) <= 2 * min(sizes)
        for column in ("donor_id", "cell_type", "src_path"):
            levels = [part.obs[column].cat.categories.tolist() for part in parts]
            assert all(level == levels[0] for level in levels)
            assert levels[0] == sorted(levels[0])
        for part in parts:  # each has cells of both large sources
            counts = part.obs["src_path"].value_counts()
            assert (counts[counts.index.str.endswith(("run0.h5ad", "run2.h5ad"))] > 100).all()


class TestHarmony:
    def test_genes_are_the_union(self, tmp_path: Path) -> None:
        whole = ad.concat(datasets((50, 60)))
        first, second = whole[:50, :7].copy(), whole[50:, [9, 3, 10, 4, 8]].copy()
        study = dl.prepare(written([first, second], tmp_path, "h5ad"), out=tmp_path / "study")
        cells = read_cells(study.cells)
        assert list(cells.var_names) == [*(f"gene{g}" for g in range(7)), "gene9", "gene10", "gene8"]
        expected = np.zeros((110, 10))
        expected[:50, :7] = x_values(110)[:50, :7]
        expected[50:, [7, 3, 8, 4, 9]] = x_values(110)[50:, [9, 3, 10, 4, 8]]
        np.testing.assert_array_equal(dense(cells.X), expected[cells.obs["row"]])
        assert any("8 of 10 genes are not in every source" in note for note in study.meta["report"]["notes"])

    def test_dense_genes_are_the_union_too(self, tmp_path: Path) -> None:
        whole = ad.concat(datasets((50, 60), layout="dense"))
        cells = read_cells(dl.prepare([whole[:50, :7].copy(), whole[50:, 5:].copy()], out=tmp_path / "study").cells)
        expected = x_values(110)
        expected[:50, 7:], expected[50:, :5] = 0, 0
        np.testing.assert_array_equal(dense(cells.X), expected[cells.obs["row"]])

    def test_var_keeps_what_sources_agree_on(self, tmp_path: Path) -> None:
        adatas = datasets((50, 60))
        for i, adata in enumerate(adatas):
            adata.var["symbol"] = [f"S{g}" for g in range(N_GENES)]
            adata.var["mean"] = np.arange(N_GENES) + i
        cells = read_cells(dl.prepare(adatas, out=tmp_path / "study").cells)
        assert cells.var["symbol"].tolist() == [f"S{g}" for g in range(N_GENES)]
        assert "mean" not in cells.var

    @pytest.mark.parametrize(
        ("types", "change", "expected"),
        [
            (("float64", "float64"), None, "float64"),
            (("int32", "int32"), None, "int32"),
            (("float32", "float64"), None, "float32"),
            (("uint16", "int64"), None, "float32"),
            (("float32", "float64"), 0.1, "float64"),
            (("float32", "int64"), 2**24 + 1, "float64"),
        ],
    )
    def test_one_type_without_loss(
        self, tmp_path: Path, types: tuple[str, str], change: float | None, expected: str
    ) -> None:
        adatas = datasets((50, 60))
        for adata, dtype in zip(adatas, types, strict=True):
            adata.X = adata.X.astype(dtype)
        if change is not None:
            adatas[1].X.data[7] = change
        wanted = np.vstack([adata.X.toarray().astype(np.float64) for adata in adatas])
        cells = read_cells(dl.prepare(written(adatas, tmp_path, "h5ad"), out=tmp_path / "study").cells)
        assert cells.X.dtype == expected
        np.testing.assert_array_equal(cells.X.toarray(), wanted[cells.obs["row"]])

    def test_donors_of_ints_and_of_text_are_the_same(self, tmp_path: Path) -> None:
        adatas = datasets((50, 60), ids=np.arange(13), categorical=False)
        adatas[0].obs["donor_id"] = adatas[0].obs["donor_id"].astype(int)
        adatas[1].obs["donor_id"] = pd.Categorical(adatas[1].obs["donor_id"].astype(str))
        genotypes, ids, _ = genotype_adata(np.arange(13))
        study = dl.prepare(adatas, genotypes, out=tmp_path / "study")
        donors = read_cells(study.cells).obs["donor_id"]
        assert set(donors) <= set(ids)
        assert study.meta["report"]["without_genotypes"]["count"] == 0

    def test_columns_get_one_form(self, tmp_path: Path) -> None:
        a, b = datasets((40, 50))
        a.obs["only_a"], b.obs["only_b"] = pd.Categorical(["x", "y"] * 20), np.arange(50)
        a.obs["flag"] = [True, False] * 20
        a.obs["depth"], b.obs["depth"] = np.arange(40, dtype=np.int32), np.arange(50) / 4
        a.obs["batch"], b.obs["batch"] = np.arange(40) % 3, [f"b{i % 2}" for i in range(50)]
        a.obs["text"], b.obs["text"] = [f"t{i}" for i in range(40)], [f"u{i}" for i in range(50)]
        stage = pd.CategoricalDtype(["late", "early"], ordered=True)
        a.obs["stage"], b.obs["stage"] = (
            pd.Categorical(["late"] * 40, dtype=stage),
            pd.Categorical(["early"] * 50, dtype=stage),
        )
        study = dl.prepare(written([a, b], tmp_path, "h5ad"), out=tmp_path / "study")
        obs = read_cells(study.cells).obs.sort_values("row")
        first, second = obs.iloc[:40], obs.iloc[40:]
        assert first["only_a"].tolist() == ["x", "y"] * 20
        assert second["only_a"].isna().all()
        assert second["only_b"].tolist() == list(range(50))
        assert first["only_b"].isna().all()
        assert first["flag"].tolist() == [True, False] * 20
        assert second["flag"].isna().all()
        assert obs["depth"].tolist() == [*map(float, range(40)), *(i / 4 for i in range(50))]
        assert obs["batch"].cat.categories.tolist() == ["0", "1", "2", "b0", "b1"]
        assert obs["batch"].tolist() == [*(str(i % 3) for i in range(40)), *(f"b{i % 2}" for i in range(50))]
        assert obs["text"].tolist() == [*(f"t{i}" for i in range(40)), *(f"u{i}" for i in range(50))]
        assert obs["stage"].dtype == stage
        assert obs["stage"].tolist() == ["late"] * 40 + ["early"] * 50
        assert any("'only_a', 'flag', 'only_b'" in note for note in study.meta["report"]["notes"])

    def test_categories_in_another_order_keep_their_meaning(self, tmp_path: Path) -> None:
        a, b = datasets((40, 40))
        a.obs["kind"] = pd.Categorical(["p", "q"] * 20, categories=["p", "q"])
        b.obs["kind"] = pd.Categorical(["p", "q"] * 20, categories=["q", "p"])
        obs = read_cells(dl.prepare([a, b], out=tmp_path / "study").cells).obs.sort_values("row")
        assert obs["kind"].tolist() == ["p", "q"] * 40
        assert obs["kind"].cat.categories.tolist() == ["p", "q"]

    def test_chosen_columns(self, tmp_path: Path) -> None:
        sources = written(datasets(SIZE), tmp_path, "h5ad")
        study = dl.prepare(sources, out=tmp_path / "study", obs_columns=["row", "run"])
        assert set(read_cells(study.cells).obs) == {"row", "run", "donor_id", "src_path"}

    def test_repeated_names_of_cells(self, tmp_path: Path) -> None:
        a, b = datasets((40, 40))
        b.obs_names = a.obs_names
        study = dl.prepare([a, b], out=tmp_path / "study")
        assert read_cells(study.cells).obs_names.is_unique
        assert any("40 cells have the name of another cell" in note for note in study.meta["report"]["notes"])


class TestDonorMap:
    def map_file(self, folder: Path, text: str) -> Path:
        (folder / "map.tsv").write_text(text)
        return folder / "map.tsv"

    def test_renames_merges_and_reports_unused(self, tmp_path: Path) -> None:
        table = self.map_file(tmp_path, "old\tnew\n# a comment\n\nd0\tx0\nd1\tx0\r\nnobody\tx9\n")
        study = dl.prepare(datasets(SIZE), out=tmp_path / "study", donor_map=table)
        obs = read_cells(study.cells).obs
        expected = cell_table(SIZE, donor_ids())["donor_id"].replace({"d0": "x0", "d1": "x0"})
        assert obs["donor_id"].astype(str).tolist() == expected.loc[obs.index].tolist()
        assert obs["donor_id"].cat.categories.tolist() == sorted(set(expected))
        assert study.meta["report"]["notes"] == [
            "Donors that the donor map renamed: 2.",
            "Entries of the donor map that no cell has: 'nobody'.",
        ]

    def test_mapping(self, tmp_path: Path) -> None:
        genotypes, _, _ = genotype_adata(np.arange(13))
        study = dl.prepare(datasets(SIZE), genotypes, out=tmp_path / "study", donor_map={f"d{i}": i for i in range(13)})
        assert study.meta["report"]["without_genotypes"]["count"] == 0

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("d0\tx0\nd0\tx1\n", ["'d0'", "more than one line"]),
            ("d0 x0\n", ["two tab-separated columns", "line 1", "d0 x0"]),
            ("d0\tx0\tx1\n", ["two tab-separated columns"]),
            ("d0\t\n", ["two tab-separated columns"]),
            ("old\tnew\n", ["names no donor"]),
        ],
    )
    def test_bad_maps(self, tmp_path: Path, text: str, says: list[str]) -> None:
        with pytest.raises(ValueError, match="donor map") as error:
            dl.prepare(datasets(SIZE), out=tmp_path / "study", donor_map=self.map_file(tmp_path, text))
        assert all(part in str(error.value) for part in says)

    def test_no_such_map(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="map"):
            dl.prepare(datasets(SIZE), out=tmp_path / "study", donor_map=tmp_path / "no.tsv")


class TestPlink:
    def test_calls_are_those_of_bed_reader(self, tmp_path: Path) -> None:
        bed, calls = panel(tmp_path)
        study = dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")
        store = read_genotypes(study.genotypes)
        with open_bed(bed) as reference:
            expected = reference.read(dtype="int8")
            ids, alleles = reference.iid, (reference.allele_1, reference.allele_2)
        np.testing.assert_array_equal(expected, calls)
        assert store.X.dtype == np.int8
        np.testing.assert_array_equal(store.X, np.where(expected == -127, -1, expected))
        assert store.obs_names.tolist() == ids.tolist()
        assert store.var_names.tolist() == [f"rs{i}" for i in range(30)]
        assert store.var["a1"].tolist() == store.var["counted"].tolist() == alleles[0].tolist()
        assert store.var["a0"].tolist() == alleles[1].tolist()
        assert store.var["chrom"].tolist() == ["1"] * 28 + ["X"] * 2
        assert store.var["pos"].tolist() == [i * 10 + 5 for i in range(30)]
        report = study.meta["report"]
        assert report["genotypes"] == {
            "donors": 15, "variants": 30, "dtype": "int8", "counted": "a1",
            "missing_call_rate": pytest.approx((calls == -127).mean()),
        }  # fmt: skip
        assert report["without_cells"] == {"count": 2, "first": ["extra0", "extra1"]}

    def test_only_donors_with_cells(self, tmp_path: Path) -> None:
        bed, calls = panel(tmp_path)
        study = dl.prepare(datasets(SIZE), bed, out=tmp_path / "study", only_donors_with_cells=True)
        store = read_genotypes(study.genotypes)
        np.testing.assert_array_equal(store.X, np.where(calls == -127, -1, calls)[:13])
        assert store.obs_names.tolist() == donor_ids()[::-1].tolist()
        assert study.meta["report"]["notes"] == ["Genotypes of 2 donors without cells were left out."]

    def test_names_of_variants_are_made_unique(self, tmp_path: Path) -> None:
        bed, _ = panel(
            tmp_path, 6, sid=[".", "rs1", "rs1", "rs2", ".", "rs3"], bp_position=[7, 8, 8, 9, 7, 9],
            allele_1=list("ACCGAT"), allele_2=list("GTTACC"), chromosome=["2"] * 6,
        )  # fmt: skip
        store = read_genotypes(dl.prepare(datasets(SIZE), bed, out=tmp_path / "study").genotypes)
        assert store.var_names.tolist() == ["2:7:G:A", "2:8:T:C", "2:8:T:C:2", "rs2", "2:7:C:A", "rs3"]
        assert store.var["id"].tolist() == [".", "rs1", "rs1", "rs2", ".", "rs3"]

    def test_ids_like_na_are_ids(self, tmp_path: Path) -> None:
        ids = ["NA", "nan", "007", "1e5", *donor_ids()[:11]]
        bed, _ = panel(tmp_path, iid=ids)
        assert (
            read_genotypes(dl.prepare(datasets(SIZE), bed, out=tmp_path / "study").genotypes).obs_names.tolist() == ids
        )

    def test_fid_iid(self, tmp_path: Path) -> None:
        bed, _ = panel(tmp_path, fid=["f"] * 15)
        renames = {donor: f"f_{donor}" for donor in donor_ids()}
        study = dl.prepare(datasets(SIZE), bed, out=tmp_path / "study", id_by="fid_iid", donor_map=renames)
        assert read_genotypes(study.genotypes).obs_names[0] == "f_d12"
        assert study.meta["report"]["without_genotypes"]["count"] == 0

    def test_fid_iid_without_families(self, tmp_path: Path) -> None:
        bed, _ = panel(tmp_path)
        with pytest.raises(ValueError, match=r"every FID.*is '0'.*id_by='iid'"):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study", id_by="fid_iid")

    def test_repeated_ids(self, tmp_path: Path) -> None:
        bed, _ = panel(tmp_path, iid=["d1", "d1", "d2", "d2", *donor_ids()[2:]])
        with pytest.raises(ValueError, match=r"panel\.fam.*'d1', 'd2'.*id_by='fid_iid'"):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")

    @pytest.mark.parametrize("change", [-1, 1])
    def test_bed_of_the_wrong_length(self, tmp_path: Path, change: int) -> None:
        bed, _ = panel(tmp_path)
        data = bed.read_bytes()
        bed.write_bytes(data[:-1] if change < 0 else data + b"\0")
        with pytest.raises(
            ValueError, match=rf"15 donors × 30 variants make 123 bytes, but .*panel.bed' has {123 + change}"
        ):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")

    @pytest.mark.parametrize(
        ("start", "says"),
        [(b"PK\x03", "not a PLINK 1 .bed"), (b"\x6c\x1b\x00", "not variant-major"), (b"", "not a PLINK")],
    )
    def test_bed_of_another_kind(self, tmp_path: Path, start: bytes, says: str) -> None:
        bed, _ = panel(tmp_path)
        bed.write_bytes(start + bed.read_bytes()[3:] if start else b"")
        with pytest.raises(ValueError, match=says):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")

    @pytest.mark.parametrize("suffix", [".bim", ".fam", ".bed"])
    def test_a_file_is_absent(self, tmp_path: Path, suffix: str) -> None:
        bed, _ = panel(tmp_path)
        bed.with_suffix(suffix).unlink()
        with pytest.raises(FileNotFoundError, match=rf"panel\{suffix}' does not exist"):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")

    @pytest.mark.parametrize(
        ("suffix", "line", "says"),
        [
            (".fam", "0 only\n", "has 6 columns, but"),
            (".bim", "1 rs0 0 5 A C more\n", "has 6 columns, but"),
            (".bim", "1 rs0 0 five A C\n", "'five' in line 1"),
            (".bim", "", "is empty"),
        ],
    )
    def test_malformed_tables(self, tmp_path: Path, suffix: str, line: str, says: str) -> None:
        bed, _ = panel(tmp_path)
        bed.with_suffix(suffix).write_text(line)
        with pytest.raises(ValueError, match=says):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")

    def test_a_short_line(self, tmp_path: Path) -> None:
        bed, _ = panel(tmp_path)
        fam = bed.with_suffix(".fam")
        fam.write_text(fam.read_text() + "0 d99\n")
        with pytest.raises(ValueError, match=r"line 16 of .* has fewer"):
            dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")


class TestAnnDataGenotypes:
    @pytest.mark.parametrize("kind", ["memory", "h5ad", "zarr"])
    @pytest.mark.parametrize(
        ("dtype", "csr"),
        [*((t, False) for t in ("int8", "uint8", "int64", "float16", "float64")), ("int8", True), ("float32", True)],
    )
    def test_rows_are_kept(self, tmp_path: Path, dtype: str, kind: str, csr: bool) -> None:
        adata, ids, values = genotype_adata(donor_ids(), dtype, csr=csr)
        (source,) = written([adata], tmp_path, kind)
        opened = dl.open_genotypes(source)
        counts = write_genotypes(opened, tmp_path / "written.zarr", memory=10**8)
        opened.close()
        store = read_genotypes(tmp_path / "written.zarr")
        np.testing.assert_array_equal(store.X, values)
        assert store.obs_names.tolist() == ids.tolist()
        assert store.var["pos"].tolist() == adata.var["pos"].tolist()
        # integers that fit are int8, whatever type they came in
        fits = np.dtype(dtype).kind != "f" and values.max() <= 127
        assert store.X.dtype == counts.dtype == ("int8" if fits else dtype)

    def test_a_store_stays_open(self, tmp_path: Path) -> None:
        genotypes, _, values = genotype_adata(donor_ids())
        (path,) = written([genotypes], tmp_path, "h5ad")
        opened = dl.open_genotypes(path)
        try:
            study = dl.prepare(datasets(SIZE), opened, out=tmp_path / "study")
            np.testing.assert_array_equal(read_genotypes(study.genotypes).X, values)
            np.testing.assert_array_equal(opened.read(np.array([1]), slice(0, 5)), values[[1], :5])
        finally:
            opened.close()

    def test_missing_calls(self, tmp_path: Path) -> None:
        integers, _, values = genotype_adata(donor_ids(), "int64")
        integers.X = values % 3
        integers.X[2, 3], integers.X[4, 5] = -9, -1
        study = dl.prepare(datasets(SIZE), integers, out=tmp_path / "a")
        store = read_genotypes(study.genotypes)
        assert store.X.dtype == np.int8
        np.testing.assert_array_equal(store.X, np.maximum(integers.X, -1))
        assert study.meta["report"]["genotypes"]["missing_call_rate"] == pytest.approx(2 / values.size)
        assert integers.X[2, 3] == -9  # the source is as it was

        floats = integers.copy()
        floats.X = np.where(integers.X < 0, np.nan, integers.X).astype(np.float32)
        study = dl.prepare(datasets(SIZE), floats, out=tmp_path / "b")
        np.testing.assert_array_equal(read_genotypes(study.genotypes).X, floats.X)
        assert study.meta["report"]["genotypes"]["missing_call_rate"] == pytest.approx(2 / values.size)

    def test_layer(self, tmp_path: Path) -> None:
        adata, _, values = genotype_adata(donor_ids())
        adata.layers["other"] = values[:, ::-1]
        study = dl.prepare(datasets(SIZE), adata, out=tmp_path / "study", genotype_layer="other")
        np.testing.assert_array_equal(read_genotypes(study.genotypes).X, values[:, ::-1])

    def test_alleles_are_recognised_and_the_counted_one_never_guessed(self, tmp_path: Path) -> None:
        adata, _, _ = genotype_adata(donor_ids())
        n = adata.n_vars
        adata.var["CHR"], adata.var["REF"], adata.var["ALT"], adata.var["info"] = "7", "A", "C", np.arange(n)
        study = dl.prepare(datasets(SIZE), adata, out=tmp_path / "study")
        var = read_genotypes(study.genotypes).var
        known = ["pos", "CHR", "REF", "ALT", "info", "chrom", "a0", "a1", "counted"]
        assert list(var) == [*known, "missing_rate"]  # values above 2 count no allele
        assert (set(var["chrom"]), set(var["a0"]), set(var["a1"])) == ({"7"}, {"A"}, {"C"})
        assert set(var["counted"]) == {"unknown"}
        assert study.meta["report"]["genotypes"]["counted"] == "unknown"

    def test_counted_allele_of_the_source(self, tmp_path: Path) -> None:
        adata, _, _ = genotype_adata(donor_ids())
        adata.var["ref"], adata.var["alt"], adata.var["counted"] = "A", "C", "A"
        study = dl.prepare(datasets(SIZE), adata, out=tmp_path / "study")
        assert study.meta["report"]["genotypes"]["counted"] == "a0"

    def test_chunks_hold_whole_rows(self, tmp_path: Path) -> None:
        calls = np.random.default_rng(0).integers(0, 3, (60, 200_000)).astype(np.int8)
        ids = [*donor_ids(), *(f"e{i}" for i in range(47))]
        adata = ad.AnnData(calls, obs=pd.DataFrame(index=ids))
        study = dl.prepare(datasets(SIZE), adata, out=tmp_path / "study", layout="both")
        X = zarr.open_array(str(study.genotypes / "X"), mode="r")
        assert X.chunks == (1, 200_000)
        assert X.shards == (60, 200_000)
        np.testing.assert_array_equal(X[:], calls)
        packed = zarr.open_array(str(study.genotypes / "obsm/genotypes_2bit"), mode="r")
        assert packed.chunks == (2, 50_000)
        assert packed.shards == (60, 50_000)
        np.testing.assert_array_equal(read_genotypes(study.genotypes).X, calls)

    @pytest.mark.parametrize("memory", [400_000, 1_000_000])
    def test_rows_are_written_block_by_block(self, tmp_path: Path, memory: int) -> None:
        calls = np.random.default_rng(0).integers(-1, 3, (101, 5000)).astype(np.int8)
        ids = [f"e{i}" for i in range(101)]
        store = dl.open_genotypes(
            ad.AnnData(calls, obs=pd.DataFrame(index=ids), var=pd.DataFrame(index=range(5000)).rename(index=str))
        )
        seen: list[int] = []
        largest = 0
        read = store.read

        def watched(rows: np.ndarray, columns: slice) -> np.ndarray:
            nonlocal largest
            block = read(rows, columns)
            largest = max(largest, block.nbytes)
            return block

        source = SimpleNamespace(
            ids=store.ids, n_variants=5000, dtype=store.dtype, read=watched, var=store.var, obs=store.obs
        )
        rows = np.arange(100, -1, -1)
        var_bytes = _PEAK_PER_VAR * int(describe_variants(store.var()).memory_usage(deep=True).sum())
        write_genotypes(source, tmp_path / "g.zarr", rows=rows, memory=memory + var_bytes, on_rows=seen.append)
        written_store = read_genotypes(tmp_path / "g.zarr")
        np.testing.assert_array_equal(written_store.X, calls[::-1])
        assert written_store.obs_names.tolist() == ids[::-1]
        assert sum(seen) == 101
        assert largest <= 0.3 * memory


class TestDonorData:
    @pytest.fixture
    def parts(self) -> tuple[ad.AnnData, ad.AnnData]:
        cells = ad.concat(datasets(SIZE))
        cells.obs["patient"] = cells.obs.pop("donor_id")
        return cells, genotype_adata(donor_ids())[0]

    def test_in_memory(self, tmp_path: Path, parts: tuple[ad.AnnData, ad.AnnData]) -> None:
        cells, genotypes = parts
        study = dl.prepare(SimpleNamespace(G=genotypes, C=cells, donor_id="patient"), out=tmp_path / "study")
        self.check(study, genotypes)

    def test_zarr(self, tmp_path: Path, parts: tuple[ad.AnnData, ad.AnnData]) -> None:
        group = zarr.open_group(str(tmp_path / "x.dd.zarr"), mode="w", zarr_format=3)
        group.attrs.update({"encoding-type": "donordata", "donor_id": "patient"})
        for key, part in zip("CG", parts, strict=True):
            ad.io.write_elem(group, key, part)
        self.check(dl.prepare(tmp_path / "x.dd.zarr", out=tmp_path / "study"), parts[1])

    def test_is_given_alone(self, tmp_path: Path, parts: tuple[ad.AnnData, ad.AnnData]) -> None:
        both = SimpleNamespace(G=parts[1], C=parts[0], donor_id="patient")
        with pytest.raises(ValueError, match="brings its own genotypes"):
            dl.prepare(both, parts[1], out=tmp_path / "study")
        with pytest.raises(ValueError, match="give it alone"):
            dl.prepare([both, parts[0]], out=tmp_path / "study")

    def check(self, study: dl.Study, genotypes: ad.AnnData) -> None:
        assert study.donor_key == "patient"
        assert_same_cells(study.cells, columns=("cell_type", "run"))
        np.testing.assert_array_equal(read_genotypes(study.genotypes).X, genotypes.X)


class TestStudy:
    def test_study_json(self, tmp_path: Path) -> None:
        sources = written(datasets(SIZE), tmp_path, "h5ad")
        bed, _ = panel(tmp_path)
        study = dl.prepare(sources, bed, out=tmp_path / "study", seed=7, memory="2GB")
        meta = json.loads((study.path / "study.json").read_text())
        assert meta == study.meta
        assert meta["created_with"]["annbatch"]
        assert meta["settings"]["seed"] == 7
        assert meta["settings"]["memory"] == 2**31
        assert [source["cells"] for source in meta["sources"]["cells"]] == list(SIZE)
        assert [source["path"] for source in meta["sources"]["cells"]] == [str(path.resolve()) for path in sources]
        assert meta["sources"]["cells"][0]["bytes"] == sources[0].stat().st_size
        assert meta["sources"]["genotypes"]["donors"] == 15
        counts = cell_table(SIZE, donor_ids())["donor_id"].value_counts()
        cells = meta["report"]["cells"]
        assert (cells["cells"], cells["genes"], cells["donors"]) == (sum(SIZE), N_GENES, len(counts))
        assert (cells["fewest"], cells["median"], cells["most"]) == (counts.min(), counts.median(), counts.max())
        assert cells["whole_numbers"] is True

    def test_x_that_is_not_counts_is_noticed(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        adatas[2].X.data[-1] = 0.5
        study = dl.prepare(adatas, out=tmp_path / "study")
        assert study.meta["report"]["cells"]["whole_numbers"] is False

    def test_donors_without_genotypes_are_listed(self, tmp_path: Path) -> None:
        genotypes = genotype_adata(donor_ids())[0]
        genotypes = genotypes[[donor not in ("d3", "d11") for donor in genotypes.obs_names]].copy()
        report = dl.prepare(datasets(SIZE), genotypes, out=tmp_path / "study").meta["report"]
        assert report["without_genotypes"] == {"count": 2, "first": ["d11", "d3"]}
        donors = cell_table(SIZE, donor_ids())["donor_id"]
        assert report["cells_without_genotypes"] == donors.isin(["d3", "d11"]).sum()

    @pytest.mark.parametrize("kind", ["h5ad", "zarr"])
    def test_sources_are_untouched(self, tmp_path: Path, kind: str) -> None:
        (tmp_path / "raw").mkdir()
        sources = written(datasets(SIZE), tmp_path / "raw", kind)
        bed, _ = panel(tmp_path / "raw")
        before = fingerprint(tmp_path / "raw")
        dl.prepare(sources, bed, out=tmp_path / "study")
        assert fingerprint(tmp_path / "raw") == before

    def test_study_streams(self, tmp_path: Path) -> None:
        bed, calls = panel(tmp_path)
        study = dl.prepare(datasets(SIZE), bed, out=tmp_path / "study")
        rows = dict(zip([*donor_ids()[::-1], "extra0", "extra1"], np.where(calls == -127, -1, calls), strict=True))
        expected = cell_table(SIZE, donor_ids())["donor_id"]
        seen = 0
        with dl.DonorLoader(study, batch_size=32, obs_columns=["row"], to="numpy") as loader:
            for batch in loader:
                donors = batch["unique_donors"][batch["donor_idx"]]
                row = batch["obs"]["row"].to_numpy()
                assert donors.tolist() == expected.iloc[row].tolist()
                np.testing.assert_array_equal(batch["X"].toarray(), x_values(sum(SIZE))[row])
                np.testing.assert_array_equal(batch["donor_features"], [rows[d] for d in batch["unique_donors"]])
                seen += row.size
        assert seen == sum(SIZE)


class TestBags:
    """The same cells once more, grouped by donor."""

    def test_cells_of_a_donor_lie_together(self, tmp_path: Path) -> None:
        bed, _ = panel(tmp_path)
        study = dl.prepare(datasets(SIZE), bed, out=tmp_path / "study", memory="1100MB")
        assert study.bags is not None
        cells = assert_same_cells(study.bags)
        start = 0
        for group in open_collection(study.bags):
            donors = ad.io.read_elem(group["obs"])["donor_id"].to_numpy()
            assert (donors[1:] != donors[:-1]).sum() == len(set(donors)) - 1
            rows = cells.obs["row"].to_numpy()[start : start + donors.size]
            assert any((np.diff(rows[donors == donor]) < 0).any() for donor in set(donors)), "cells are shuffled"
            start += donors.size
        with warnings.catch_warnings(), dl.BagLoader(study, max_cells=None) as loader:
            warnings.simplefilter("error")
            index = np.concatenate([batch["index"] for batch in loader])
        assert sorted(index) == list(range(sum(SIZE)))

    def test_can_be_left_out(self, tmp_path: Path) -> None:
        study = dl.prepare(datasets(SIZE), out=tmp_path / "study", bags=False)
        assert study.bags is None
        assert not (tmp_path / "study" / "bags.zarr").exists()
        with dl.BagLoader(study) as loader:
            assert sorted({d for b in loader for d in b["donors"]}) == sorted(donor_ids())

    def test_labels_come_from_obs_of_the_genotypes(self, tmp_path: Path) -> None:
        """Annotation of the donors is kept, and is where labels are looked up."""
        G, *_ = genotype_adata(donor_ids())
        G.obs["disease"] = pd.Categorical(["sick" if i % 3 else "well" for i in range(G.n_obs)])
        study = dl.prepare(datasets(SIZE), G, out=tmp_path / "study")
        with dl.BagLoader(study, labels="disease") as loader:
            for batch in loader:
                assert [loader.label_names[i] for i in batch["labels"]] == list(G.obs.loc[batch["donors"], "disease"])
