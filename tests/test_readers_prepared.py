"""Files of genotypes all the way: prepared from Python and from the command line, and looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pytest
from typer.testing import CliRunner

import donorloader as dl
from _panels import IDS, N_RECORDS, small_panel, write_panel
from donorloader.cli import app
from donorloader.genotypes import open_genotypes

if TYPE_CHECKING:
    from pathlib import Path

PANEL = small_panel()


def cells(donors: list[str]) -> ad.AnnData:
    import pandas as pd

    obs = pd.DataFrame({"donor_id": donors * 2}, index=[f"c{i}" for i in range(2 * len(donors))])
    return ad.AnnData(np.ones((len(obs), 2), dtype=np.float32), obs=obs)


def stored(study: dl.Study) -> tuple[np.ndarray, Any, list[str]]:
    """Values with NaN for missing, variants and ids of a study's genotypes."""
    store = open_genotypes(study.genotypes)
    values = store.read(np.arange(store.ids.size), slice(0, store.n_variants))
    store.close()
    return np.where(values < 0, np.nan, values), store.var(), store.ids.tolist()


def test_every_option_of_a_file(tmp_path: Path) -> None:
    """From the command line, against the same from Python and against the panel."""
    path = write_panel(PANEL, tmp_path, "vcf")
    cells(IDS[:5]).write_h5ad(tmp_path / "cells.h5ad")
    (tmp_path / "samples.txt").write_text("\n".join(IDS[:8]))
    (tmp_path / "variants.txt").write_text(
        "\n".join(name for name in dict.fromkeys(PANEL.ids) if name not in (".", "rs5"))
    )
    options = ["--samples", tmp_path / "samples.txt", "--variants", tmp_path / "variants.txt"]
    options += ["--region", "chr1", "--region", "X:510-610", "--maf", 0.05, "--max-missing", 0.25]
    options += ["--only-donors-with-cells", "--no-bags", "--multiallelic", "split"]
    call = ["prepare", tmp_path / "cells.h5ad", "--genotypes", path, "--out", tmp_path / "study", *options]
    result = CliRunner().invoke(app, list(map(str, call)))
    assert result.exit_code == 0, result.output
    study = dl.open_study(tmp_path / "study")
    values, var, ids = stored(study)
    assert ids == IDS[:5]
    np.testing.assert_array_equal(values, PANEL.expected(var)[:5])
    assert set(var["chrom"]) == {"1", "X"}
    assert not {40, 50, 60} & set(var["pos"])  # two have no id, rs5 was not named
    frequency = np.nansum(values, axis=0)
    assert (frequency > 0).all()
    assert (np.isnan(values).mean(axis=0) <= 0.25).all()
    settings = study.meta["settings"]
    assert settings["samples"] == str(tmp_path / "samples.txt")
    assert settings["regions"] == ["chr1", "X:510-610"]
    assert (settings["maf"], settings["max_missing"], settings["multiallelic"]) == (0.05, 0.25, "split")
    notes = "\n".join(study.meta["report"]["notes"])
    assert "2 records with several ALT alleles" in notes
    assert "3 donors of the genotypes were not among the samples asked for" in notes
    assert "Genotypes of 3 donors without cells were left out" in notes
    assert "minor allele frequency below 0.05" in notes
    again = dl.prepare(
        tmp_path / "cells.h5ad", path, out=tmp_path / "again", samples=IDS[:8], regions=["1", "chrX:510-610"],
        variants=[name for name in dict.fromkeys(PANEL.ids) if name not in (".", "rs5")], maf=0.05, max_missing=0.25,
        only_donors_with_cells=True, bags=False,
    )  # fmt: skip
    np.testing.assert_array_equal(stored(again)[0], values)
    assert again.meta["settings"]["samples"] == IDS[:8]


@pytest.mark.parametrize("kind", ["vcf.gz", "bgen", "vcz3"])
def test_inspect(tmp_path: Path, kind: str) -> None:
    path = write_panel(PANEL, tmp_path, kind)
    if kind == "vcz3":  # known by what is in it, whatever its name
        path = path.rename(tmp_path / "panel.zarr")
    result = CliRunner().invoke(app, ["inspect", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    dtype = "float32" if kind == "bgen" else "int8"
    missing = (PANEL.calls == -1).any(axis=2).mean(axis=1)
    rate = (missing.sum() + missing[[12, 33]].sum()) / (N_RECORDS + 2)
    for text in (
        f"11 donors × 63 variants ({dtype})",
        f"{rate:.3%}",
        "2 records with several",
        "5 variants have calls",
    ):
        assert text in result.output


def test_dosages_are_prepared(tmp_path: Path) -> None:
    path = write_panel(PANEL, tmp_path, "vcf")
    study = dl.prepare(cells(IDS), path, out=tmp_path / "study", read_dosages=True, bags=False)
    values, var, _ = stored(study)
    np.testing.assert_array_equal(values, PANEL.expected(var) * 0.75 + 0.25)
    assert study.meta["report"]["genotypes"]["dtype"] == "float32"
