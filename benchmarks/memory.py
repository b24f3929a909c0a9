"""Peak memory: 3,000 variants of a million cost no more than 3,000 of 3,000.

`python -m benchmarks.memory` measures it; each pass runs in a process of its own, so each peak is its own.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd

from benchmarks import ours
from benchmarks.data import SIZES, Data, cache_folder, cached, donor_ids, prepare, use_zarrs, write_donor_rows
from benchmarks.measure import Result

if TYPE_CHECKING:
    from collections.abc import Iterator

DONORS = 1_000
WIDE = 1_000_000
NARROW = 3_000
BAR_MB = 300.0


def memory(data: Data, rounds: int) -> Iterator[Result]:
    """Peak of a pass over the first 3,000 of 1,000,000 variants, less the peak over a table of just these."""
    quick = data.size.name == "quick"
    layouts = ("rows",) if quick else ("rows", "h5ad", "zarr")
    for layout in layouts:
        wide, narrow = (genotypes(layout, n_variants) for n_variants in (WIDE, NARROW))
        peaks = [(peak_mb(data, wide), peak_mb(data, narrow)) for _ in range(1 if quick else min(3, rounds))]
        over = sorted(a - b for a, b in peaks)
        yield Result(
            row="memory",
            stream=f"peak memory, 3,000 of 1,000,000 variants of 1,000 donors on disk ({wide.name})",
            against="the same pass over a table of 3,000 (difference)",
            ours=sorted(a for a, _ in peaks)[len(peaks) // 2],
            theirs=sorted(b for _, b in peaks)[len(peaks) // 2],
            value=over[len(over) // 2],
            low=over[0],
            high=over[-1],
            bar=BAR_MB,
            at_most=True,
            unit="MB",
        )


def genotypes(layout: str, n_variants: int) -> Path:
    """Genotypes of 1,000 donors, drawn evenly, packed by donor or as AnnData writes them."""
    suffix = {"rows": "-packed.zarr", "zarr": ".zarr", "h5ad": ".h5ad"}[layout]

    def write(path: Path) -> None:
        X = np.random.default_rng(n_variants).integers(0, 3, (DONORS, n_variants), dtype=np.int8)
        table = ad.AnnData(
            X=X,
            obs=pd.DataFrame(index=donor_ids(DONORS)),
            var=pd.DataFrame(index=[f"rs{i}" for i in range(n_variants)]),
        )
        if layout == "rows":
            write_donor_rows(path, table)
        elif layout == "h5ad":
            table.write_h5ad(path)
        else:
            table.write_zarr(path)

    return cached(cache_folder() / f"even-{DONORS}x{n_variants}{suffix}", write)


def peak_mb(data: Data, genotypes_path: Path) -> float:
    """Peak resident memory of a process that passes once over cells and genotypes [Unit: 1e6 bytes]."""
    command = [sys.executable, "-m", "benchmarks.memory", data.size.name, str(genotypes_path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    return float(done.stdout)


def pass_over(data: Data, genotypes_path: Path) -> float:
    """Pass once over cells and the genotypes' first 3,000 variants; this process's peak until then."""
    use_zarrs()
    with ours.joined(data, genotypes_path, variants=slice(NARROW)) as loader:
        for batch in loader:
            if batch["donor_features"].shape[1] != NARROW:
                raise RuntimeError(f"expected {NARROW} variants, got {batch['donor_features'].shape[1]}")
    return own_peak_mb()


def own_peak_mb() -> float:
    """This process's peak resident memory until now [Unit: 1e6 bytes]."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux ru_maxrss starts at the peak of the process that started this one
        return next(int(line.split()[1]) * 1024 / 1e6 for line in status.open() if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    size_name, path = sys.argv[1:]
    print(pass_over(prepare(SIZES[size_name]), Path(path)))
