"""Files that other tools wrote: DonorData, h5ad and PLINK of the same cells and donors give the same batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
import zarr
from annbatch import DatasetCollection

import donorloader as dl
from _prepare import read_genotypes

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = Path(__file__).parents[1] / ".." / "shared" / "data"
BED = DATA / "genotypes" / "simulated_genotype_calls.bed"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data, files written by other tools")

SOURCES = {
    "dd.h5": ("pbmc68k.dd.h5", None),
    "dd.zarr": ("pbmc68k.dd.zarr", None),
    "h5ad + bed": ("pbmc68k_donors.h5ad", BED),
}


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dl.Study]:
    folder = tmp_path_factory.mktemp("studies")
    return {
        name: dl.prepare(DATA / cells, genotypes, out=folder / name.replace(" ", "_"))
        for name, (cells, genotypes) in SOURCES.items()
    }


@pytest.fixture(scope="module")
def cells() -> ad.AnnData:
    return ad.read_h5ad(DATA / "pbmc68k_donors.h5ad")


@pytest.fixture(scope="module")
def calls() -> np.ndarray:
    """(100, 1000) counts of allele 1 as bed-reader reads them, missing as -1."""
    expected = np.load(DATA / "genotypes" / "expected_bed_int8.npy")
    return np.where(expected == -127, -1, expected)


def batches(source: Any, **options: Any) -> Iterator[dict[str, Any]]:
    with dl.DonorLoader(source, batch_size=64, seed=5, to="numpy", **options) as loader:
        yield from loader


def barcodes(study: dl.Study) -> np.ndarray:
    return DatasetCollection(str(study.cells), mode="r").obs(["donor_id"]).index.to_numpy()


def row_of(sample: str) -> int:
    """Row of a sample in the panel, whose samples are S0 to S99 in order."""
    return int(sample.removeprefix("S"))


@pytest.mark.parametrize("name", SOURCES)
def test_each_cell_with_its_own_genotypes(
    studies: dict[str, dl.Study], cells: ad.AnnData, calls: np.ndarray, name: str
) -> None:
    study, seen = studies[name], []
    names = barcodes(study)
    for batch in batches(study):
        mine = cells[names[batch["index"]]]
        assert batch["unique_donors"][batch["donor_idx"]].tolist() == mine.obs["donor_id"].tolist()
        np.testing.assert_array_equal(batch["X"].toarray(), mine.X.toarray())
        np.testing.assert_array_equal(batch["donor_features"], calls[[row_of(d) for d in batch["unique_donors"]]])
        seen += mine.obs_names.tolist()
    assert sorted(seen) == sorted(cells.obs_names)


def test_the_same_content_from_every_form(studies: dict[str, dl.Study]) -> None:
    """Per barcode, as the order of the cells differs: cellink sorts them by donor."""

    def content(study: dl.Study) -> dict[str, tuple[bytes, str, bytes]]:
        names = barcodes(study)
        return {
            names[row]: (
                batch["X"][[i]].toarray().tobytes(),
                batch["unique_donors"][donor],
                batch["donor_features"][donor].tobytes(),
            )
            for batch in batches(study)
            for i, (row, donor) in enumerate(zip(batch["index"], batch["donor_idx"], strict=True))
        }

    first, *others = (content(study) for study in studies.values())
    assert len(first) == 700
    assert all(other == first for other in others)


def test_the_same_batches_from_both_donor_data(studies: dict[str, dl.Study]) -> None:
    for one, other in zip(batches(studies["dd.h5"]), batches(studies["dd.zarr"]), strict=True):
        np.testing.assert_array_equal(other["X"].toarray(), one["X"].toarray())
        for key in ("index", "unique_donors", "donor_idx", "donor_features"):
            np.testing.assert_array_equal(other[key], one[key])


def test_a_donor_data_folder_streams_as_it_is(cells: ad.AnnData, calls: np.ndarray) -> None:
    names, seen = ad.io.read_elem(zarr.open_group(str(DATA / "pbmc68k.dd.zarr"), mode="r")["C/obs/index"]), []
    names = np.asarray(names, dtype=object)
    for batch in batches(DATA / "pbmc68k.dd.zarr"):
        mine = cells[names[batch["index"]]]
        assert batch["unique_donors"][batch["donor_idx"]].tolist() == mine.obs["donor_id"].tolist()
        np.testing.assert_array_equal(batch["X"].toarray(), mine.X.toarray())
        np.testing.assert_array_equal(batch["donor_features"], calls[[row_of(d) for d in batch["unique_donors"]]])
        seen += batch["index"].tolist()
    assert sorted(seen) == list(range(cells.n_obs))


@pytest.mark.parametrize("name", SOURCES)
def test_stored_genotypes_are_those_of_bed_reader(studies: dict[str, dl.Study], calls: np.ndarray, name: str) -> None:
    store = read_genotypes(studies[name].genotypes)
    assert store.X.dtype == np.int8
    np.testing.assert_array_equal(store.X, calls[[row_of(sample) for sample in store.obs_names]])


def test_variants_say_which_allele_is_counted(studies: dict[str, dl.Study]) -> None:
    var = read_genotypes(studies["h5ad + bed"].genotypes).var
    table = [line.split() for line in BED.with_suffix(".bim").read_text().splitlines()]
    assert var.index.tolist() == [line[1] for line in table]
    assert var["chrom"].tolist() == [line[0] for line in table]
    assert var["pos"].tolist() == [int(line[3]) for line in table]
    assert var["counted"].tolist() == var["a1"].tolist() == [line[4] for line in table]
    assert var["a0"].tolist() == [line[5] for line in table]
    assert set(read_genotypes(studies["dd.h5"].genotypes).var["counted"]) == {"unknown"}  # DonorData does not say


def test_every_fid_is_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every FID"):
        dl.prepare(DATA / "pbmc68k_donors.h5ad", BED, out=tmp_path / "study", id_by="fid_iid")


class TestPatients:
    """Cells of 2 to 32 a patient, under another name of the donor column, without genotypes of their own."""

    FILE = DATA / "wu2020_tcells_patients.h5ad"

    def test_streams(self, tmp_path: Path) -> None:
        study = dl.prepare(self.FILE, out=tmp_path / "study", donor_key="patient")
        cells, seen = ad.read_h5ad(self.FILE), []
        names = DatasetCollection(str(study.cells), mode="r").obs(["patient"]).index.to_numpy()
        for batch in batches(study, obs_columns=["source"]):
            mine = cells[names[batch["index"]]]
            assert batch["donor_features"] is None
            assert batch["unique_donors"][batch["donor_idx"]].tolist() == mine.obs["patient"].tolist()
            assert batch["obs"]["source"].tolist() == mine.obs["source"].tolist()
            np.testing.assert_array_equal(batch["X"].toarray(), mine.X.toarray())
            seen += mine.obs_names.tolist()
        assert sorted(seen) == sorted(cells.obs_names)
        report = study.meta["report"]["cells"]
        assert (report["donors"], report["fewest"], report["most"]) == (14, 2, 32)
        assert report["whole_numbers"] is True

    def test_genotypes_of_others_are_refused(self, tmp_path: Path) -> None:
        patients = sorted(set(ad.read_h5ad(self.FILE).obs["patient"]))
        with pytest.raises(ValueError, match="nothing in common") as error:
            dl.prepare(self.FILE, BED, out=tmp_path / "study", donor_key="patient")
        text = str(error.value)
        assert all(f"'{patient}'" in text for patient in patients[:5])
        assert all(f"'{sample}'" in text for sample in ("S0", "S1", "S10", "S11", "S12"))
        assert not (tmp_path / "study").exists()


@pytest.fixture(scope="module")
def patients_study(tmp_path_factory: pytest.TempPathFactory) -> dl.Study:
    return dl.prepare(TestPatients.FILE, out=tmp_path_factory.mktemp("patients") / "study", donor_key="patient")


@pytest.fixture(scope="module")
def patients() -> ad.AnnData:
    return ad.read_h5ad(TestPatients.FILE)


class TestBagsOfPatients:
    """The same file as bags: its patients, and its finer groups."""

    def check(self, loader: dl.BagLoader, names: Any, cells: ad.AnnData, by: list[str]) -> None:
        """Each bag once, with all the cells of its group and no others, as they are in the file."""
        groups: dict[Any, set[str]] = {}
        for name, *values in cells.obs[by].itertuples():
            groups.setdefault(tuple(values) if len(by) > 1 else values[0], set()).add(name)
        seen = []
        with loader:
            for batch in loader:
                mine = cells[names[batch["index"]]]
                np.testing.assert_array_equal(batch["X"].toarray(), mine.X.toarray())
                for i, bag in enumerate(batch["donors"]):
                    rows = slice(*batch["offsets"][i : i + 2])
                    assert mine.obs_names[rows].is_unique
                    assert set(mine.obs_names[rows]) == groups[bag]
                    seen.append(bag)
                    if "source" in by:
                        assert loader.label_names[batch["labels"][i]] == bag[by.index("source")]
        assert len(seen) == len(groups)
        assert set(seen) == set(groups)

    @pytest.mark.parametrize("stored", [True, False], ids=["study", "in memory"])
    @pytest.mark.parametrize("by", [["patient"], ["patient", "source"]], ids="+".join)
    def test_each_bag_is_its_group(
        self, patients_study: dl.Study, patients: ad.AnnData, by: list[str], stored: bool
    ) -> None:
        options: dict[str, Any] = {"bags_per_batch": 4, "to": "numpy"}
        if len(by) > 1:
            options |= {"bag_by": by, "labels": "source"}
        if stored:
            names = DatasetCollection(str(patients_study.bags), mode="r").obs(["patient"]).index.to_numpy()
            loader = dl.BagLoader(patients_study, **options)
        else:
            names = patients.obs_names.to_numpy()
            loader = dl.BagLoader(patients, donor_key="patient", **options)
        self.check(loader, names, patients, by)

    def test_labels_that_vary_in_a_patient_are_refused(self, patients_study: dl.Study, patients: ad.AnnData) -> None:
        varying = patients.obs.groupby("patient", observed=True)["source"].nunique() > 1
        for source, options in ((patients_study, {}), (patients, {"donor_key": "patient"})):
            with pytest.raises(ValueError, match="'source' must be constant in each bag") as error:
                dl.BagLoader(source, labels="source", **options)
            text = str(error.value)
            assert f"varies in {varying.sum()} of {varying.size}" in text
            (named,) = (patient for patient in varying.index if f"{patient!r}" in text)
            assert varying[named]
            assert all(f"{found!r}" in text for found in patients.obs["source"][patients.obs["patient"] == named])
            assert "bag_by=" in text
