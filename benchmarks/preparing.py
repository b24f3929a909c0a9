"""Rows about preparing: a study from a PLINK panel, against bed-reader reading the same file.

`python -m benchmarks.preparing VARIANTS ROUNDS` measures it, in a process of its own so that its peak is its own, and
prints what was seen as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
from bed_reader import open_bed

import donorloader as dl
from benchmarks.data import DONOR_KEY, Data, cache_folder, cached, donor_ids
from benchmarks.measure import Result
from benchmarks.memory import own_peak_mb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DONORS = 1_000
VARIANTS = {"quick": 100_000, "full": 1_000_000}
BAR = 2.0
BAR_MB = 1_500.0


def prepare(data: Data, rounds: int) -> Iterator[Result]:
    """`dl.prepare` of two cells and a `.bed`, against `open_bed(bed).read(dtype="int8")`; then its peak memory."""
    n_variants, full = VARIANTS[data.size.name], data.size.name == "full"
    command = [sys.executable, "-m", "benchmarks.preparing", str(n_variants), str(rounds)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    seen = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = seen["ours_s"], seen["theirs_s"]
    by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    stream = f"preparing a .bed of {DONORS:,} donors × {n_variants:,} variants"
    yield Result(
        row="prepare",
        stream=stream,
        against="bed-reader reading it whole to int8 (times, less is better)",
        ours=n_variants / median(ours),
        theirs=n_variants / median(theirs),
        value=median(ours) / median(theirs),
        low=min(by_round),
        high=max(by_round),
        bar=BAR if full else None,
        at_most=True,
        of="variants/s",
    )
    yield Result(
        row="prepare",
        stream=f"peak memory, {stream}",
        against="nothing (all of the process counts)",
        ours=seen["peak_mb"],
        theirs=0.0,
        value=seen["peak_mb"],
        low=seen["peak_mb"],
        high=seen["peak_mb"],
        bar=BAR_MB if full else None,
        at_most=True,
        unit="MB",
    )


def panel(n_variants: int) -> Path:
    """A `.bed` of random calls, a quarter of them missing, with its `.bim` and `.fam`."""

    def write(folder: Path) -> None:
        folder.mkdir()
        bed, step = folder / "panel.bed", 50_000
        rng = np.random.default_rng(n_variants)
        with bed.open("wb") as file:
            file.write(b"\x6c\x1b\x01")
            for first in range(0, n_variants, step):
                shape = (min(step, n_variants - first), DONORS // 4)
                file.write(rng.integers(0, 256, shape, dtype=np.uint8).tobytes())
        bed.with_suffix(".fam").write_text("".join(f"0 {name} 0 0 0 -9\n" for name in donor_ids(DONORS)))
        alleles = ("A\tG", "C\tT", "G\tA", "T\tC")
        lines = (f"{1 + i * 22 // n_variants}\trs{i}\t0\t{i + 1}\t{alleles[i % 4]}\n" for i in range(n_variants))
        bed.with_suffix(".bim").write_text("".join(lines))

    return cached(cache_folder() / f"plink-{DONORS}x{n_variants}", write) / "panel.bed"


def measure(n_variants: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways in each round, in alternating order after an untimed call of each; our peak in the first."""
    bed = panel(n_variants)
    obs = pd.DataFrame({DONOR_KEY: donor_ids(DONORS)[:2]}, index=["a", "b"])
    cells = ad.AnnData(np.ones((2, 2), dtype=np.float32), obs=obs)

    def read() -> None:
        with open_bed(bed) as file:
            file.read(dtype="int8")

    with TemporaryDirectory(dir=cache_folder(), prefix=".study-") as folder:
        ways: dict[str, Callable[[], object]] = {
            "ours_s": lambda: dl.prepare(cells, bed, out=Path(folder) / "study", overwrite=True, progress=False),
            "theirs_s": read,
        }
        ways["ours_s"]()
        peak = own_peak_mb()
        ways["theirs_s"]()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in ways if number % 2 == 0 else reversed(ways):
                began = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - began)
    return {**seconds, "peak_mb": peak}


if __name__ == "__main__":
    print(json.dumps(measure(*map(int, sys.argv[1:]))))
