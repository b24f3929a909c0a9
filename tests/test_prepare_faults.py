"""prepare: bad input is refused in words, and a study appears whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest

import donorloader as dl
from _data import SIZES, datasets, donor_ids, genotype_adata
from _prepare import assert_same_cells, fingerprint, panel, written
from donorloader._staging import staged_folder
from donorloader.study import is_study

SIZE = SIZES[3]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    panel(folder)
    written(datasets(SIZE), folder, "h5ad")
    return folder


@pytest.fixture
def raw(tmp_path: Path, made_once: Path) -> SimpleNamespace:
    """Files of cells and genotypes, alone in a folder."""
    folder = shutil.copytree(made_once, tmp_path / "raw")
    return SimpleNamespace(cells=sorted(folder.glob("*.h5ad")), bed=folder / "panel.bed", folder=folder)


def message(kind: type[Exception], cells: Any, genotypes: Any = None, **options: Any) -> str:
    with pytest.raises(kind) as error:
        dl.prepare(cells, genotypes, **options)
    text = error.value.args[0] if isinstance(error.value, KeyError) else str(error.value)
    out = Path(options["out"])
    assert not [path for path in out.parent.glob(".*") if "partial" in path.name]
    return text


def assert_says(text: str, *parts: str) -> None:
    assert not [part for part in parts if part not in text], text


class TestBadCells:
    def test_donor_column_is_absent(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        text = message(KeyError, raw.cells, out=tmp_path / "s", donor_key="patient")
        assert_says(text, "'patient'", "run0.h5ad", "'donor_id', 'cell_type', 'run', 'row'", "--donor-key")

    def test_column_or_layer_is_absent(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        text = message(KeyError, raw.cells, out=tmp_path / "s", obs_columns=["run", "sex"])
        assert_says(text, "'sex'", "run0.h5ad", "'cell_type'")
        assert_says(message(KeyError, raw.cells, out=tmp_path / "s", layer="counts"), "no layer 'counts'", "run0.h5ad")
        assert_says(message(KeyError, datasets(SIZE), out=tmp_path / "s", layer="counts"), "no layer 'counts'")

    @pytest.mark.parametrize("categorical", [True, False])
    def test_a_cell_without_donor(self, tmp_path: Path, categorical: bool) -> None:
        adatas = datasets(SIZE, categorical=categorical)
        adatas[1].obs.loc[adatas[1].obs_names[[2, 5]], "donor_id"] = None
        text = message(ValueError, adatas, out=tmp_path / "s")
        assert_says(text, "obs['donor_id'] of AnnData 1", "2 of 7 rows", "first at row 2")

    def test_float_donors(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        adatas[2].obs["donor_id"] = np.arange(adatas[2].n_obs) / 1
        text = message(TypeError, adatas, out=tmp_path / "s")
        assert_says(text, "obs['donor_id'] of AnnData 2", "float64", "cast the column to str")

    def test_no_cells(self, tmp_path: Path) -> None:
        assert_says(message(ValueError, datasets(SIZE)[0][:0].copy(), out=tmp_path / "s"), "empty")
        assert_says(message(ValueError, [], out=tmp_path / "s"), "one source or more")

    def test_no_such_path(self, tmp_path: Path) -> None:
        assert_says(message(FileNotFoundError, tmp_path / "no.h5ad", out=tmp_path / "s"), "no.h5ad", "does not exist")

    def test_a_path_that_is_no_store(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        (tmp_path / "text.h5ad").write_text("cell,gene\n")
        assert_says(message(ValueError, tmp_path / "text.h5ad", out=tmp_path / "s"), "text.h5ad", "neither an HDF5")
        assert_says(message(FileNotFoundError, raw.folder, out=tmp_path / "s"), "Expected a zarr store", "raw")
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["x"] = 1
        assert_says(message(ValueError, tmp_path / "other.h5", out=tmp_path / "s"), "other.h5", "lacks X, obs, var")
        assert_says(message(TypeError, 7, out=tmp_path / "s"), "int")

    def test_what_is_prepared_already(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        study = dl.prepare(raw.cells, out=tmp_path / "study")
        assert_says(message(ValueError, study.path, out=tmp_path / "s"), "is a study already")
        assert_says(message(ValueError, study.cells, out=tmp_path / "s"), "is an annbatch collection already")
        assert_says(message(ValueError, raw.cells, study.path, out=tmp_path / "s"), "is a study")

    def test_a_source_twice(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        text = message(ValueError, [*raw.cells, raw.folder / ".." / "raw" / "run1.h5ad"], out=tmp_path / "s")
        assert_says(text, "run1.h5ad", "double")

    def test_repeated_genes(self, tmp_path: Path) -> None:
        adatas = datasets(SIZE)
        adatas[1].var.index = ["gene0", "gene0", "gene0", "gene1", *[f"g{i}" for i in range(7)]]
        text = message(ValueError, adatas, out=tmp_path / "s")
        assert_says(text, "AnnData 1", "'gene0'", "var_names_make_unique")

    def test_x_that_cannot_be_used(self, tmp_path: Path) -> None:
        adata = datasets(SIZE)[0]
        adata.X = None
        assert_says(message(ValueError, adata, out=tmp_path / "s"), "Cells need X", "layer=")
        adata.X = np.zeros(adata.shape, dtype=bool)
        assert_says(message(ValueError, adata, out=tmp_path / "s"), "numbers", "bool")

    def test_a_column_that_cannot_be_stored(self, tmp_path: Path) -> None:
        adata = datasets(SIZE)[0]
        adata.obs["when"] = pd.Timestamp("2020-01-01")
        text = message(TypeError, adata, out=tmp_path / "s")
        assert_says(text, "obs['when']", "datetime64", "--obs-column")
        dl.prepare(adata, out=tmp_path / "s", obs_columns=["run"])


class TestBadGenotypes:
    def test_no_donor_in_common(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        genotypes, _, _ = genotype_adata(np.array([f"fam_d{i}" for i in range(13)]))
        text = message(ValueError, raw.cells, genotypes, out=tmp_path / "s")
        assert_says(text, "'d0', 'd1', 'd10', 'd11', 'd12', …", "'fam_d0'", "prefix before '_'", "--id-by iid")

    @pytest.mark.parametrize("kind", ["memory", "h5ad", "zarr"])
    def test_repeated_ids(self, tmp_path: Path, raw: SimpleNamespace, kind: str) -> None:
        genotypes, ids, _ = genotype_adata(donor_ids())
        genotypes.obs.index = [*ids[:-2], "d5", "d5"]
        (source,) = written([genotypes], tmp_path, kind)
        assert_says(message(ValueError, raw.cells, source, out=tmp_path / "s"), "'d5'", "more than once")

    def test_no_such_path(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        for name in ("no.bed", "no.h5ad", "no.zarr"):
            assert_says(message(FileNotFoundError, raw.cells, tmp_path / name, out=tmp_path / "s"), name)
        assert_says(message(ValueError, raw.cells, raw.bed.with_suffix(".bim"), out=tmp_path / "s"), "Name the .bed")
        assert_says(message(TypeError, raw.cells, 3, out=tmp_path / "s"), "int")

    def test_options_without_effect(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        genotypes, _, _ = genotype_adata(donor_ids())
        for given, option in [
            (raw.bed, {"genotype_layer": "x"}),
            (genotypes, {"id_by": "fid_iid"}),
            (None, {"genotype_layer": "x"}),
            (None, {"only_donors_with_cells": True}),
        ]:
            assert_says(message(ValueError, raw.cells, given, out=tmp_path / "s", **option), next(iter(option)))
        assert_says(message(ValueError, raw.cells, raw.bed, out=tmp_path / "s", id_by="name"), "'name'", "'fid_iid'")


class TestBadOptions:
    @pytest.mark.parametrize("memory", ["much", -1, "800MB", True])
    def test_memory(self, tmp_path: Path, raw: SimpleNamespace, memory: Any) -> None:
        assert_says(message(ValueError, raw.cells, out=tmp_path / "s", memory=memory), "memory", repr(memory))

    def test_memory_that_does_not_hold_the_cells(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        text = message(ValueError, raw.cells, out=tmp_path / "s", memory=2**30 + 1000)
        assert_says(text, "too small for these cells", "1,000 are left", "Give more memory")

    def test_memory_that_does_not_hold_a_csc_matrix(self, tmp_path: Path) -> None:
        adata = datasets(SIZE)[0]
        adata.X = adata.X.tocsc()
        text = message(ValueError, adata, out=tmp_path / "s", memory=2**30 + 1000)
        assert_says(text, "AnnData 0", "CSC", "tocsr")

    def test_memory_that_does_not_hold_a_row(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        genotypes = ad.AnnData(np.zeros((13, 60_000), np.int8), obs=pd.DataFrame(index=donor_ids().tolist()))
        text = message(ValueError, raw.cells, genotypes, out=tmp_path / "s", memory=2**30 + 300_000)
        assert_says(text, "too small for these genotypes", "60,000", "Give more memory")

    @pytest.mark.parametrize("seed", [-1, 0.5, "0", True])
    def test_seed(self, tmp_path: Path, raw: SimpleNamespace, seed: Any) -> None:
        assert_says(message(ValueError, raw.cells, out=tmp_path / "s", seed=seed), "seed", repr(seed))

    def test_columns_as_text(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        assert_says(message(TypeError, raw.cells, out=tmp_path / "s", obs_columns="run"), "['run']")


class TestOut:
    def test_a_study_is_replaced_only_when_asked(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        first = dl.prepare(raw.cells, out=tmp_path / "study", seed=1)
        before = fingerprint(first.path)
        assert_says(message(FileExistsError, raw.cells, out=tmp_path / "study"), "study' exists", "--overwrite")
        assert fingerprint(first.path) == before
        second = dl.prepare(raw.cells, raw.bed, out=tmp_path / "study", overwrite=True)
        assert second.genotypes is not None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "study"]

    def test_nothing_but_a_study_is_replaced(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").touch()
        (tmp_path / "file").touch()
        for name in ("home", "file"):
            text = message(FileExistsError, raw.cells, out=tmp_path / name, overwrite=True)
            assert_says(text, "is not a study", "never overwritten")
        assert (tmp_path / "home" / "thesis.tex").exists()

    def test_an_empty_folder_is_used(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        (tmp_path / "study").mkdir()
        assert_same_cells(dl.prepare(raw.cells, out=tmp_path / "study").cells)

    def test_the_working_directory(self, tmp_path: Path, raw: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        assert_same_cells(dl.prepare(raw.cells, out="study").cells)

    def test_no_parent(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        assert_says(message(FileNotFoundError, raw.cells, out=tmp_path / "no" / "study"), "no' does not exist")

    def test_out_apart_from_sources(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        (zarr_source,) = written([ad.concat(datasets(SIZE))], tmp_path, "zarr")
        study = dl.prepare(raw.cells, raw.bed, out=tmp_path / "study")
        before = fingerprint(tmp_path)
        for cells, genotypes, out in [
            (zarr_source, None, zarr_source / "study"),
            (raw.cells, study.genotypes, study.path),
            (raw.cells, study.genotypes, study.genotypes / "study"),
        ]:
            assert_says(message(ValueError, cells, genotypes, out=out, overwrite=True), "must lie apart")
        assert fingerprint(tmp_path) == before


class TestFailureHalfWay:
    @pytest.fixture(params=[3, 12, 30])
    def full_disk(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk on which only so many more zarr files fit: enough for some cells, or for some genotypes too."""
        from zarr.storage import LocalStore

        put, left = LocalStore.set, [request.param]

        async def set_(self: LocalStore, *args: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            await put(self, *args, **options)

        monkeypatch.setattr(LocalStore, "set", set_)

    def test_disk_full(
        self, tmp_path: Path, raw: SimpleNamespace, full_disk: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = fingerprint(raw.folder)
        with pytest.raises(OSError, match="No space left") as error:
            dl.prepare(raw.cells, raw.bed, out=tmp_path / "study")
        assert error.value.errno == errno.ENOSPC
        assert [path.name for path in tmp_path.iterdir()] == ["raw"]
        assert fingerprint(raw.folder) == before
        monkeypatch.undo()
        assert_same_cells(dl.prepare(raw.cells, raw.bed, out=tmp_path / "study").cells)

    def test_disk_full_leaves_the_old_study(
        self, tmp_path: Path, raw: SimpleNamespace, request: pytest.FixtureRequest
    ) -> None:
        old = dl.prepare(raw.cells, out=tmp_path / "study")
        before = fingerprint(old.path)
        monkeypatch = request.getfixturevalue("monkeypatch")
        module = sys.modules["donorloader._panel"]
        monkeypatch.setattr(module, "write_genotypes", _raise(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            dl.prepare(raw.cells, raw.bed, out=tmp_path / "study", overwrite=True)
        assert fingerprint(old.path) == before
        assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "study"]

    @pytest.mark.parametrize("exception", [KeyboardInterrupt(), RuntimeError("bug")])
    def test_any_exception(
        self, tmp_path: Path, raw: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, exception: BaseException
    ) -> None:
        monkeypatch.setattr(sys.modules["donorloader._panel"], "write_genotypes", _raise(exception))
        with pytest.raises(type(exception)):
            dl.prepare(raw.cells, raw.bed, out=tmp_path / "study")
        assert [path.name for path in tmp_path.iterdir()] == ["raw"]

    def test_threads_that_go_on_writing(self, tmp_path: Path) -> None:
        """zarr's other threads do, for a moment, after one of them has failed; they also make folders anew."""
        writers = []

        def write_on(folder: Path) -> None:
            end = time.monotonic() + 0.5
            for number in itertools.count():
                with suppress(OSError):
                    (folder / f"c{number % 50}").mkdir(parents=True, exist_ok=True)
                    (folder / f"c{number % 50}" / f"{number}").write_bytes(b"chunk")
                if time.monotonic() > end:
                    return

        def build() -> None:
            with staged_folder(tmp_path / "study", overwrite=False, is_ours=is_study) as partial:
                for _ in range(3):
                    writers.append(threading.Thread(target=write_on, args=(partial / "X",)))
                    writers[-1].start()
                time.sleep(0.1)
                raise OSError("full")

        with pytest.raises(OSError, match="full"):
            build()
        for writer in writers:
            writer.join()
        assert not any(tmp_path.iterdir())

    def test_damaged_source(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        with h5py.File(raw.cells[2], "r+") as file:
            indices = file["X/indices"][:]
            indices[-1] = 10**6
            file["X/indices"][:] = indices
        with pytest.raises(ValueError, match=r"run2.h5ad is damaged"):
            dl.prepare(raw.cells, out=tmp_path / "study")
        assert [path.name for path in tmp_path.iterdir()] == ["raw"]

    def test_files_and_threads_are_let_go(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        psutil = pytest.importorskip("psutil")
        genotypes = written([genotype_adata(donor_ids())[0]], tmp_path, "h5ad")[0]
        dl.prepare(raw.cells, genotypes, out=tmp_path / "warm_up")
        process = psutil.Process()

        def open_files() -> list[tuple[str, int]]:  # without positions: a log grows meanwhile
            return [(file.path, file.fd) for file in process.open_files()]

        files, threads = open_files(), threading.active_count()
        for i in range(2):
            dl.prepare(raw.cells, genotypes, out=tmp_path / f"study{i}")
            with pytest.raises(KeyError):
                dl.prepare(raw.cells, genotypes, out=tmp_path / f"failed{i}", donor_key="none")
        assert open_files() == files
        assert threading.active_count() <= threads + 1

    def test_nothing_is_printed(self, tmp_path: Path, raw: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
        dl.prepare(raw.cells, raw.bed, out=tmp_path / "study")
        assert capfd.readouterr() == ("", "")
        dl.prepare(raw.cells, raw.bed, out=tmp_path / "again", progress=True)
        captured = capfd.readouterr()
        assert captured.out == ""
        assert "writing cells" in captured.err
        assert "181/181" in captured.err
        assert "reading variants" in captured.err
        assert "30/30" in captured.err
        assert "15/15" in captured.err


class TestKilled:
    def kill_in(
        self, function: str, raw: SimpleNamespace, out: Path, options: str = "", module: str = "prepare"
    ) -> None:
        """Prepare in a child that kills itself where it would call a function of the module."""
        code = f"""
            import os, signal, sys
            import donorloader as dl
            module = sys.modules["donorloader.{module}"]
            setattr(module, {function!r}, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
            dl.prepare({[str(path) for path in raw.cells]!r}, {str(raw.bed)!r}, out={str(out)!r}{options})
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=100)
        assert done.returncode == -signal.SIGKILL

    def test_no_study_opens_and_a_rerun_works(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        before = fingerprint(raw.folder)
        out = tmp_path / "study"
        self.kill_in("write_genotypes", raw, out, module="_panel")
        (leftover,) = [path for path in tmp_path.iterdir() if path.name.startswith(".study.partial-")]
        assert (leftover / "cells.zarr").exists()
        for path in (out, leftover):
            with pytest.raises(FileNotFoundError):
                dl.open_study(path)
            with pytest.raises(FileNotFoundError):
                dl.DonorLoader(path)
        assert fingerprint(raw.folder) == before
        assert_same_cells(dl.prepare(raw.cells, raw.bed, out=out).cells)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "study"]

    def test_the_old_study_stays(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        old = dl.prepare(raw.cells, out=tmp_path / "study")
        before = fingerprint(old.path)
        self.kill_in("describe_sources", raw, old.path, ", overwrite=True")
        assert fingerprint(old.path) == before

    def test_killed_between_the_renames(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        old = dl.prepare(raw.cells, out=tmp_path / "study")
        before = set(fingerprint(old.path).values())
        old.path.rename(tmp_path / ".study.replaced")
        with pytest.raises(FileExistsError):
            dl.prepare(raw.cells, out=tmp_path / "study")
        assert set(fingerprint(tmp_path / "study").values()) == before
        dl.prepare(raw.cells, raw.bed, out=tmp_path / "study", overwrite=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["raw", "study"]

    def test_a_folder_in_use_is_left_alone(self, tmp_path: Path, raw: SimpleNamespace) -> None:
        with staged_folder(tmp_path / "study", overwrite=False, is_ours=is_study) as partial:
            (partial / "file").touch()
            dl.prepare(raw.cells, out=tmp_path / "study2")
            with pytest.raises(FileExistsError), staged_folder(tmp_path / "raw", overwrite=True, is_ours=is_study):
                pass
            with staged_folder(tmp_path / "study", overwrite=False, is_ours=is_study) as other:
                assert other != partial
                (other / "file").touch()
            assert (partial / "file").exists()
            (tmp_path / "study" / "file").unlink()
        assert (tmp_path / "study" / "file").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a tmpfs")
def test_disk_that_is_really_full(tmp_path: Path, raw: SimpleNamespace) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        with pytest.raises(OSError, match="No space left"):
            dl.prepare(raw.cells, raw.bed, out=disk / "study")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _raise(exception: BaseException) -> Any:
    def function(*args: Any, **options: Any) -> None:
        raise exception

    return function
