"""The command line: the same as the functions, and one line for an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import pytest
from typer.testing import CliRunner, Result

import donorloader as dl
from _data import SIZES, datasets, donor_ids, genotype_adata, make_cells, write_collection
from _prepare import assert_same_cells, panel, written
from donorloader.cli import app

SIZE = SIZES[3]


@pytest.fixture
def raw(tmp_path: Path) -> SimpleNamespace:
    bed, _ = panel(tmp_path)
    return SimpleNamespace(cells=[str(path) for path in written(datasets(SIZE), tmp_path, "h5ad")], bed=str(bed))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120", "NO_COLOR": "1"})


def rows(result: Result) -> dict[str, str]:
    """The report as printed: each item's name and value."""
    assert result.exit_code == 0, result.output
    pairs = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in result.stdout.splitlines() if "  " in line]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def error_line(result: Result, code: int = 1) -> str:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr


class TestPrepare:
    def test_writes_a_study_and_prints_its_report(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        result = run("prepare", *raw.cells, "--genotypes", raw.bed, "--out", tmp_path / "study")
        report = rows(result)
        assert report["cells"] == "181 × 11 genes (float32, csr)"
        assert report["genotypes"] == "15 donors × 30 variants (int8)"
        assert report["counted allele"] == "a1"
        assert report["donors without genotypes"] == "0"
        assert report["donors without cells"] == "2: 'extra0', 'extra1'"
        assert f"written to {tmp_path / 'study'}" in result.stdout.replace("\n", "")
        study = dl.open_study(tmp_path / "study")
        assert_same_cells(study.cells)
        assert rows(run("inspect", tmp_path / "study")) == report

    def test_every_option_arrives(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        (tmp_path / "map.tsv").write_text("d0\td1\n")
        genotypes, _, _ = genotype_adata(donor_ids())
        genotypes.layers["dosage"] = genotypes.X + 1
        genotypes.write_h5ad(tmp_path / "g.h5ad")
        cells = ad.concat(datasets(SIZE))
        cells.layers["counts"] = cells.X * 2
        cells.obs["who"] = cells.obs["donor_id"]
        cells.write_h5ad(tmp_path / "cells.h5ad")
        result = run(
            *("prepare", tmp_path / "cells.h5ad", "-g", tmp_path / "g.h5ad", "-o", tmp_path / "study"),
            *("--donor-key", "who", "--layer", "counts", "--genotype-layer", "dosage", "--obs-column", "run"),
            *(
                "--obs-column",
                "row",
                "--donor-map",
                tmp_path / "map.tsv",
                "--only-donors-with-cells",
                "--memory",
                "3GB",
            ),
            *("--seed", 11, "--no-bags"),
        )
        assert result.exit_code == 0, result.output
        study = dl.open_study(tmp_path / "study")
        assert study.donor_key == "who"
        assert study.bags is None
        assert study.meta["settings"] == {
            "layer": "counts",
            "obs_columns": ["run", "row"],
            "genotype_layer": "dosage",
            "id_by": "iid",
            **dict.fromkeys(
                ("samples", "regions", "variants", "maf", "max_missing", "read_dosages", "layout", "dosage_type")
            ),
            "multiallelic": "split",
            "donor_map": str(tmp_path / "map.tsv"),
            "only_donors_with_cells": True,
            "bags": False,
            "memory": 3 * 2**30,
            "seed": 11,
        }
        assert study.meta["report"]["genotypes"]["donors"] == 12  # d0 is d1 now
        error_line(run("prepare", *raw.cells, "-g", raw.bed, "-o", tmp_path / "other", "--id-by", "fid_iid"))
        assert run("prepare", *raw.cells, "-o", tmp_path / "study", "--overwrite").exit_code == 0

    def test_errors_are_one_message(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        out = ("--out", tmp_path / "study")
        assert "'patient' is not in that of" in error_line(run("prepare", *raw.cells, *out, "--donor-key", "patient"))
        assert "does not exist" in error_line(run("prepare", tmp_path / "no.h5ad", *out))
        Path(raw.bed).write_bytes(Path(raw.bed).read_bytes()[:-3])
        assert "cut off" in error_line(run("prepare", *raw.cells, "-g", raw.bed, *out))
        run("prepare", *raw.cells, *out)
        assert "--overwrite" in error_line(run("prepare", *raw.cells, *out))

    def test_bugs_are_told_from_mistakes(
        self, tmp_path: Path, raw: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object, **__: object) -> None:
            raise AttributeError("a bug")

        monkeypatch.setattr(sys.modules["donorloader.prepare"], "collect_cells", broken)
        call = ("prepare", *raw.cells, "--out", tmp_path / "study")
        assert error_line(run(*call)) == "error: AttributeError: a bug (rerun with --debug for the traceback)\n"
        assert isinstance(run(*call, "--debug").exception, AttributeError)

    @pytest.mark.parametrize(
        "arguments", [("prepare",), ("prepare", "x.h5ad"), ("prepare", "x", "-o", "y", "--id-by", "z")]
    )
    def test_wrong_usage(self, arguments: tuple[str, ...]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


class TestInspect:
    def test_collection(self, tmp_path: Path) -> None:
        cells = make_cells(tmp_path / "c.zarr", SIZE)
        report = rows(run("inspect", cells.path))
        assert report["cells"] == "181 × 11 genes (float32, csr)"
        assert report["donors"] == "13"
        counts = cells.obs["donor_id"].value_counts()
        assert report["cells per donor"] == f"min {counts.min()}, median {counts.median():g}, max {counts.max()}"

    def test_collection_of_another_donor_column(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        for adata in adatas:
            adata.obs["who"] = adata.obs.pop("donor_id")
        write_collection(tmp_path / "c.zarr", adatas)
        assert "has no 'donor_id'" in error_line(run("inspect", tmp_path / "c.zarr"))
        assert rows(run("inspect", tmp_path / "c.zarr", "--donor-key", "who"))["donors"] == "13"

    def test_files_of_cells(self, raw: SimpleNamespace) -> None:
        assert rows(run("inspect", raw.cells[0]))["cells"] == "61 × 11 genes (float32, csr)"

    @pytest.mark.parametrize("kind", ["h5ad", "zarr"])
    def test_genotypes(self, tmp_path: Path, kind: str) -> None:
        genotypes, _, values = genotype_adata(donor_ids(), "int64")
        genotypes.X[3, :6] = -1
        (path,) = written([genotypes], tmp_path, kind)
        report = rows(run("inspect", path))
        assert report["genotypes"] == "15 donors × 24 variants (int64)"
        assert report["missing calls"] == f"{6 / values.size:.3%}"
        assert report["counted allele"] == "unknown"

    def test_stores_of_a_study(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        study = dl.prepare(raw.cells, raw.bed, out=tmp_path / "study")
        whole = rows(run("inspect", study.path))
        assert rows(run("inspect", study.cells)).items() <= whole.items()
        assert rows(run("inspect", study.genotypes)).items() <= whole.items()
        assert rows(run("inspect", raw.bed)).items() <= whole.items()

    def test_what_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "text.txt").write_text("x")
        assert "does not exist" in error_line(run("inspect", tmp_path / "no"))
        assert "neither" in error_line(run("inspect", tmp_path / "text.txt"))
        error_line(run("inspect", tmp_path))

    def test_names_are_printed_as_they_are(self, tmp_path: Path) -> None:
        genotypes, ids, _ = genotype_adata(donor_ids())
        genotypes.obs.index = [*ids[:-1], "[red]x[/red]"]
        study = dl.prepare(datasets(SIZE), genotypes, out=tmp_path / "study")
        assert "[red]x[/red]" in run("inspect", study.path).stdout


def test_command_is_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from donorloader.cli import main; main()"]
    done = subprocess.run(
        [*command, "inspect", str(tmp_path / "no")], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_demo_passes_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import donorloader.demo

    calls: list[dict[str, object]] = []
    monkeypatch.setattr(donorloader.demo, "run_demo", lambda **options: calls.append(options))
    assert run("demo").exit_code == 0
    assert run("demo", "-o", tmp_path, "--epochs", 3, "--seed", 4, "--picture", tmp_path / "p.png").exit_code == 0
    assert calls == [
        {"out": None, "epochs": 12, "seed": 0, "picture": Path("donorloader-demo.png")},
        {"out": tmp_path, "epochs": 3, "seed": 4, "picture": tmp_path / "p.png"},
    ]
