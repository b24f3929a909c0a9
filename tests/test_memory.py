"""Memory is a function of stated budgets, not of the size of the genotypes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from scipy import sparse

import donorloader as dl
from _data import SIZES, make_cells, write_collection

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
    pytest.mark.timeout(600),
]
MB = 1 << 20


def write_wide(path: Path, n_donors: int, n_variants: int, *, chunks: tuple[int, int]) -> Path:
    """Genotypes of d0, d1, … in an AnnData zarr, written a few donors at a time."""
    ad.AnnData(
        obs=pd.DataFrame(index=[f"d{i}" for i in range(n_donors)]),
        var=pd.DataFrame(index=pd.RangeIndex(n_variants).astype(str)),
    ).write_zarr(path)
    group = zarr.open_group(path, mode="a", use_consolidated=False)
    if "X" in group:
        del group["X"]
    x = group.create_array("X", shape=(n_donors, n_variants), chunks=chunks, dtype="i1")
    x.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
    rows = np.random.default_rng(0).integers(0, 3, (chunks[0], n_variants), dtype=np.int8)
    for start in range(0, n_donors, chunks[0]):
        x[start : start + chunks[0]] = rows[: n_donors - start]
    zarr.consolidate_metadata(group.store)
    return path


def peak_of_a_pass(cells: Path, genotypes: Path, n_variants: int, options: dict[str, Any]) -> int:
    """Highest resident size of a process that makes one pass. Unit: bytes."""
    return peak_of(
        f"""
        import donorloader as dl
        with dl.DonorLoader({str(cells)!r}, {str(genotypes)!r}, **{options!r}) as loader:
            widths = {{batch["donor_features"].shape[1] for batch in loader}}
        assert widths == {{{n_variants}}}, widths
        """
    )


def peak_of(script: str) -> int:
    """Highest resident size of a process that runs a script. Unit: bytes."""
    script = textwrap.dedent(script)
    script += '\nprint(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))'
    path = os.pathsep.join([str(Path(dl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1]) * 1024


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = np.array([f"d{i}" for i in range(60)], dtype=object)
    return make_cells(tmp_path_factory.mktemp("memory") / "cells.zarr", SIZES[3], ids=ids).path


@pytest.mark.parametrize(
    ("by", "memory"),
    [
        ("donor", "1GB"),
        pytest.param("donor", 0, marks=pytest.mark.slow),
        pytest.param("variant", "1GB", marks=pytest.mark.slow),
        pytest.param("variant", 0, marks=pytest.mark.slow),
    ],
)
def test_a_slice_of_wide_genotypes(cells: Path, tmp_path: Path, by: str, memory: Any) -> None:
    """500 × 330,000, 165 MB: what is read grows with the slice, not with the store."""
    n_donors, n_variants = 500, 330_000
    chunks = (4, n_variants) if by == "donor" else (n_donors, 2000)
    wide = write_wide(tmp_path / "wide.zarr", n_donors, n_variants, chunks=chunks)
    narrow = write_wide(tmp_path / "narrow.zarr", n_donors, 3000, chunks=(chunks[0], min(3000, chunks[1])))
    options = {"batch_size": 16, "genotype_memory": memory}
    base = peak_of_a_pass(cells, narrow, 3000, options)
    peak = peak_of_a_pass(cells, wide, 3000, options | {"variants": slice(100_000, 103_000)})
    assert peak - base < 60 * MB, f"{(peak - base) / MB:.0f} MB more"


@pytest.mark.slow
def test_a_slice_of_a_million_variants(cells: Path, tmp_path: Path) -> None:
    """1,000 × 1,000,000 int8 within 300 MB of 1,000 × 3,000."""
    wide = write_wide(tmp_path / "wide.zarr", 1000, 1_000_000, chunks=(8, 1_000_000))
    narrow = write_wide(tmp_path / "narrow.zarr", 1000, 3000, chunks=(8, 3000))
    base = peak_of_a_pass(cells, narrow, 3000, {"batch_size": 16})
    peak = peak_of_a_pass(cells, wide, 3000, {"batch_size": 16, "variants": slice(500_000, 503_000)})
    assert peak - base < 300 * MB, f"{(peak - base) / MB:.0f} MB more"


@pytest.mark.slow
def test_rows_that_stay_obey_their_budget(cells: Path, tmp_path: Path) -> None:
    """All variants of 60 donors are 60 MB; with a budget of 4 MB those of a window are held, not all."""
    genotypes = write_wide(tmp_path / "g.zarr", 60, 1_000_000, chunks=(1, 1_000_000))
    options = {"batch_size": 2, "chunk_size": 1, "preload_nchunks": 4, "prefetch": 1, "cells_query": "row < 90"}
    peaks = [
        peak_of_a_pass(cells, genotypes, 1_000_000, options | {"genotype_memory": memory}) for memory in ("1GB", "4MB")
    ]
    assert peaks[0] - peaks[1] > 20 * MB, f"{peaks[0] / MB:.0f} and {peaks[1] / MB:.0f} MB"


@pytest.mark.slow
def test_one_huge_bag_beside_small_ones(tmp_path: Path) -> None:
    """A bag of 200,000 cells beside a hundred of 200: the budget for cells, plus that bag, and no copy of it."""
    budget, per_cell, n_genes = 128 * MB, 200, 2000
    sizes = {"huge": 200_000} | {f"small{i:03d}": 200 for i in range(100)}
    n = sum(sizes.values())
    rng = np.random.default_rng(0)
    X = sparse.csr_matrix(
        (np.ones(n * per_cell, np.float32), rng.integers(0, n_genes, n * per_cell), np.arange(n + 1) * per_cell),
        shape=(n, n_genes),
    )
    obs = pd.DataFrame({"donor_id": pd.Categorical(np.repeat(list(sizes), list(sizes.values())))})
    var = pd.DataFrame(index=[f"g{i}" for i in range(n_genes)])
    adata = ad.AnnData(X, obs=obs.set_axis(obs.index.astype(str)), var=var)
    path = write_collection(tmp_path / "cells.zarr", [adata], rows_per_chunk=32)
    bag = 200_000 * per_cell * (4 + 4)  # values and column numbers

    def peak(donors: list[str] | None) -> int:
        options = {"max_cells": None, "cell_memory": budget, "donors": donors, "bags_per_batch": 2}
        return peak_of(
            f"""
            import donorloader as dl
            with dl.BagLoader({str(path)!r}, **{options!r}) as loader:
                sizes = [n for batch in loader for n in batch["offsets"].diff().tolist()]
            assert max(sizes) == {200_000 if donors is None else 200}, max(sizes)
            """
        )

    alone, both = peak(list(sizes)[1:3]), peak(None)
    assert both - alone > bag / 2, "the huge bag was held"
    assert both - alone < budget + bag, f"{(both - alone) / MB:.0f} MB above a pass of two small bags"
