"""The same panel in files that plink, plink2 and bio2zarr wrote: prepared, and as the libraries read it themselves."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr

import donorloader as dl
from donorloader.genotypes import open_genotypes

FOLDER = Path(__file__).parents[1] / ".." / "shared" / "data" / "genotypes"
STEM = FOLDER / "simulated_genotype_calls.bed"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs ../shared/data, files written by other tools")


@pytest.fixture(scope="module")
def bim() -> pd.DataFrame:
    names = ["chrom", "id", "cm", "pos", "a1", "a2"]
    return pd.read_csv(STEM.with_suffix(".bim"), sep="\t", names=names, dtype=str)


@pytest.fixture(scope="module")
def calls() -> np.ndarray:
    """(100, 1000) counts of allele 1 of the `.bim`, as bed-reader reads them; -1 is missing."""
    expected = np.load(FOLDER / "expected_bed_int8.npy")
    return np.where(expected == -127, -1, expected)


def prepared(folder: Path, genotypes: Path, donors: list[str]) -> tuple[np.ndarray, pd.DataFrame, list[str]]:
    """Values, variants and donors of the study's store."""
    cells = ad.AnnData(np.ones((2, 2), dtype=np.float32), obs=pd.DataFrame({"donor_id": donors}, index=["c0", "c1"]))
    study = dl.prepare(cells, genotypes, out=folder / "study", bags=False)
    assert study.meta["report"]["genotypes"]["counted"] == "a1"
    store = open_genotypes(study.genotypes)
    values = store.read(np.arange(store.ids.size), slice(0, store.n_variants))
    store.close()
    return values, store.var(), store.ids.tolist()


def vcf_of(calls: np.ndarray, bim: pd.DataFrame) -> str:
    """A VCF of the panel: allele 2 as REF, allele 1 as ALT."""
    header = ["##fileformat=VCFv4.2", "##contig=<ID=0>", '##FORMAT=<ID=GT,Number=1,Type=String,Description="Genotype">']
    header.append("\t".join(["#CHROM", "POS", "ID", "REF", "ALT", "QUAL", "FILTER", "INFO", "FORMAT"]))
    header[-1] += "".join(f"\tS{i}" for i in range(len(calls)))
    texts = np.array(["0/0", "0/1", "1/1", "./."])[calls]
    lines = [
        "\t".join([row.chrom, str(int(row.pos) + 1), row.id, row.a2, row.a1, ".", ".", ".", "GT", *texts[:, j]])
        for j, row in enumerate(bim.itertuples())
    ]
    return "\n".join([*header, *lines]) + "\n"


@pytest.mark.parametrize("kind", ["bed", "pgen", "bgen", "vcf.gz"])
def test_the_same_matrix_from_each(tmp_path: Path, calls: np.ndarray, bim: pd.DataFrame, kind: str) -> None:
    path = STEM.with_suffix(f".{kind}")
    if kind == "vcf.gz":
        path = tmp_path / "panel.vcf.gz"
        path.write_bytes(gzip.compress(vcf_of(calls, bim).encode()))
    values, var, ids = prepared(tmp_path, path, ["S3", "S99"])
    assert ids == [f"S{i}" for i in range(100)]
    assert var.index.tolist() == bim["id"].tolist()
    # plink2 writes a BGEN with ALT first, and the second allele is the one that is counted
    counted, other = ("a2", "a1") if kind == "bgen" else ("a1", "a2")
    assert var["a1"].tolist() == bim[counted].tolist()
    assert var["a0"].tolist() == bim[other].tolist()
    assert values.dtype == (np.float32 if kind == "bgen" else np.int8)
    np.testing.assert_array_equal(values, 2 - calls if kind == "bgen" else calls)
    assert (calls >= 0).all()


@pytest.mark.parametrize("kind", ["pgen", "bgen"])
def test_as_the_library_reads_it(tmp_path: Path, kind: str) -> None:
    path = STEM.with_suffix(f".{kind}")
    if kind == "pgen":
        import pgenlib

        reader = pgenlib.PgenReader(bytes(path))
        direct: Any = np.empty((reader.get_variant_ct(), reader.get_raw_sample_ct()), dtype=np.int8)
        reader.read_range(0, len(direct), direct)
        reader.close()
    else:
        import bgen

        with bgen.BgenReader(str(path)) as file:
            direct = np.stack([variant.alt_dosage for variant in file])
    np.testing.assert_array_equal(prepared(tmp_path, path, ["S3", "S99"])[0], direct.T)


def test_vcf_zarr_as_zarr_reads_it(tmp_path: Path) -> None:
    """A panel of its own, of 1,000 donors."""
    path = STEM.with_suffix(".vcz")
    group: Any = zarr.open_group(str(path), mode="r")
    genotype = group["call_genotype"][:]
    expected = np.where((genotype < 0).any(axis=2), -1, genotype.sum(axis=2))  # two alleles: the sum is the count
    values, var, ids = prepared(tmp_path, path, ["0_S3", "0_S99"])
    np.testing.assert_array_equal(values, expected.T)
    assert ids == list(group["sample_id"][:])
    assert var["a0"].tolist() == list(group["variant_allele"][:, 0])
    assert var["a1"].tolist() == list(group["variant_allele"][:, 1])
    assert var["pos"].tolist() == group["variant_position"][:].tolist()
    assert var["id"].tolist() == list(group["variant_id"][:])
    assert set(var["chrom"]) == {"0"}
