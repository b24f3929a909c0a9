"""Memory is a function of stated budgets, not of the size of the genotypes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from _data import SIZES, make_cells

import donorloader as dl

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    rng = np.random.default_rng(0)
    for start in range(0, n_donors, chunks[0]):
        stop = min(n_donors, start + chunks[0])
        x[start:stop] = rng.integers(0, 3, (stop - start, n_variants), dtype=np.int8)
    zarr.consolidate_metadata(group.store)
    return path


def peak_of_a_pass(cells: Path, genotypes: Path, options: dict[str, Any]) -> int:
    """Highest resident size of a process that makes one pass. Unit: bytes."""
    script = f"""
        import donorloader as dl
        with dl.DonorLoader({str(cells)!r}, {str(genotypes)!r}, batch_size=16, **{options!r}) as loader:
            shapes = [tuple(batch["donor_features"].shape) for batch in loader]
        assert shapes and all(shape[1] == 3000 for shape in shapes), shapes
        print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
    """
    path = os.pathsep.join([str(Path(dl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[1]) * 1024


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    ids = np.array([f"d{i}" for i in range(60)], dtype=object)
    yield make_cells(tmp_path_factory.mktemp("memory") / "cells.zarr", SIZES[3], ids=ids).path


@pytest.mark.parametrize("by", ["donor", "variant"])
def test_a_slice_of_wide_genotypes(cells: Path, tmp_path: Path, by: str) -> None:
    """A sixth of the issue's size: 500 × 330,000, 157 MB; a reader that holds it whole would show."""
    n_donors, n_variants = 500, 330_000
    chunks = (4, n_variants) if by == "donor" else (n_donors, 2000)
    wide = write_wide(tmp_path / "wide.zarr", n_donors, n_variants, chunks=(chunks[0], chunks[1]))
    narrow = write_wide(tmp_path / "narrow.zarr", n_donors, 3000, chunks=(chunks[0], min(3000, chunks[1])))
    for options in ({"genotype_memory": "1GB"}, {"genotype_memory": "100KB"}):
        base = peak_of_a_pass(cells, narrow, options)
        peak = peak_of_a_pass(cells, wide, options | {"variants": slice(100_000, 103_000)})
        assert peak - base < 60 * MB, f"{(peak - base) / MB:.0f} MB more"


@pytest.mark.slow
def test_a_slice_of_a_million_variants(cells: Path, tmp_path: Path) -> None:
    """The issue's size: 1,000 × 1,000,000 int8, within 300 MB of 1,000 × 3,000."""
    wide = write_wide(tmp_path / "wide.zarr", 1000, 1_000_000, chunks=(8, 1_000_000))
    narrow = write_wide(tmp_path / "narrow.zarr", 1000, 3000, chunks=(8, 3000))
    base = peak_of_a_pass(cells, narrow, {})
    peak = peak_of_a_pass(cells, wide, {"variants": slice(500_000, 503_000)})
    assert peak - base < 300 * MB, f"{(peak - base) / MB:.0f} MB more"


def test_kept_rows_obey_their_budget(cells: Path, tmp_path: Path) -> None:
    """All variants of 60 donors are 60 MB; with a budget of 4 MB a window's donors are held, not all."""
    genotypes = write_wide(tmp_path / "g.zarr", 60, 1_000_000, chunks=(1, 1_000_000))
    script_options = {"donor_rows": "batch", "prefetch": 1, "chunk_size": 1, "preload_nchunks": 4}
    peaks = []
    for memory in ("1GB", "4MB"):
        script = f"""
            import donorloader as dl
            with dl.DonorLoader({str(cells)!r}, {str(genotypes)!r}, batch_size=2, genotype_memory={memory!r},
                                **{script_options!r}) as loader:
                for _ in loader:
                    pass
            print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
        """
        path = os.pathsep.join([str(Path(dl.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[1]) * 1024)
    assert peaks[0] - peaks[1] > 20 * MB, f"{peaks[0] / MB:.0f} and {peaks[1] / MB:.0f} MB"
