"""prepare: the peak memory of the whole process stays within the budget, for sources several times its size."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import psutil
import pytest

import donorloader as dl

if TYPE_CHECKING:
    from pathlib import Path

BUDGET = "1.25GB"  # a quarter of a GB for data, beside what Python and its libraries take
DATA_BYTES = 2**28

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def peak_of_preparing(cells: Path, genotypes: Path | None, out: Path) -> int:
    """Peak resident memory of a process that prepares a study, in bytes."""
    arguments = f"{str(cells)!r}, {genotypes and str(genotypes)!r}, out={str(out)!r}, memory={BUDGET!r}"
    code = f"import donorloader as dl; dl.prepare({arguments})"
    child = subprocess.Popen([sys.executable, "-c", code])
    watched, peak = psutil.Process(child.pid), 0
    while child.poll() is None:
        try:
            peak = max(peak, watched.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.005)
    assert child.wait() == 0
    return peak


def write_cells(path: Path, n_obs: int, n_genes: int = 20_000, per_cell: int = 800) -> None:
    """An h5ad of counts, written piece by piece."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (n_obs, n_genes)})
        data = X.create_dataset("data", shape=(n_obs * per_cell,), dtype="f4", chunks=(100_000,))
        indices = X.create_dataset("indices", shape=(n_obs * per_cell,), dtype="i4", chunks=(100_000,))
        X.create_dataset("indptr", data=np.arange(n_obs + 1, dtype="i8") * per_cell)
        for start in range(0, n_obs, 2000):
            stop = min(start + 2000, n_obs)
            genes = np.sort(rng.integers(0, n_genes - per_cell, (stop - start, per_cell)), axis=1) + np.arange(per_cell)
            indices[start * per_cell : stop * per_cell] = genes.ravel()
            data[start * per_cell : stop * per_cell] = rng.poisson(1.0, genes.size) + 1
        donors = pd.Categorical([f"d{i}" for i in rng.integers(0, 500, n_obs)])
        ad.io.write_elem(file, "obs", pd.DataFrame({"donor_id": donors}, index=[f"c{i}" for i in range(n_obs)]))
        ad.io.write_elem(file, "var", pd.DataFrame(index=[f"g{i}" for i in range(n_genes)]))


def write_panel(bed: Path, n_donors: int, n_variants: int) -> None:
    rng = np.random.default_rng(0)
    with bed.open("wb") as file:
        file.write(b"\x6c\x1b\x01")
        for start in range(0, n_variants, 10_000):
            n = min(10_000, n_variants - start)
            file.write(rng.integers(0, 256, (n, -(-n_donors // 4)), dtype=np.uint8).tobytes())
    bed.with_suffix(".fam").write_text("".join(f"0 d{i} 0 0 0 -9\n" for i in range(n_donors)))
    bed.with_suffix(".bim").write_text("".join(f"1 rs{i} 0 {i + 1} A G\n" for i in range(n_variants)))


def test_cells(tmp_path: Path) -> None:
    n_obs = 160_000
    write_cells(tmp_path / "cells.h5ad", n_obs)
    assert n_obs * 800 * 8 > 3.8 * DATA_BYTES  # in memory
    peak = peak_of_preparing(tmp_path / "cells.h5ad", None, tmp_path / "study")
    report = dl.open_study(tmp_path / "study").meta["report"]["cells"]
    assert report["cells"] == n_obs
    print(f"peak {peak / 2**20:,.0f} MB with a budget of {BUDGET}, {report['datasets']} datasets")
    assert peak <= 1.25 * 2**30


def test_genotypes(tmp_path: Path) -> None:
    write_cells(tmp_path / "cells.h5ad", 1000)
    write_panel(tmp_path / "panel.bed", 4000, 250_000)
    peak = peak_of_preparing(tmp_path / "cells.h5ad", tmp_path / "panel.bed", tmp_path / "study")
    assert dl.open_study(tmp_path / "study").meta["report"]["genotypes"]["donors"] == 4000
    print(f"peak {peak / 2**20:,.0f} MB with a budget of {BUDGET}")
    assert peak <= 1.25 * 2**30
