"""Rows about genotypes alone: gathering packed rows, what the cache reads, and what millions of variants take."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

import donorloader as dl
from benchmarks.data import DONOR_KEY, SIZES, Data, cache_folder, cached, donor_ids, prepare, use_zarrs
from benchmarks.measure import Result
from benchmarks.memory import own_peak_mb
from donorloader.genotypes._cache import NextUse, RowCache
from donorloader.genotypes._packing import pack_rows, packed_width
from donorloader.genotypes._unpacking import gather_packed
from donorloader.genotypes._write import write_genotypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

ROWS, DONORS, VARIANTS = 640, 1_000, 100_000
HUGE = 5_000_000
HUGE_MEMORY = "400MB"


def gather(data: Data, rounds: int) -> Iterator[Result]:
    """640 of 1,000 donors × 100,000 variants to int8: from packed rows, and by numpy from a matrix of int8."""
    by_kernel, by_numpy = gathers()
    ways: dict[str, Callable[[], object]] = {
        "gathering 640 of 1,000 donors × 100,000 variants to int8, packed": by_kernel,
        "numpy's take from a matrix of int8": by_numpy,
    }
    # in turns of six, the first of each not counted: the lines that one way leaves changed in the caches are written to
    # memory at the cost of what comes next
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(2 * rounds):
        for name in ways if number % 2 else reversed(ways):
            for turn in range(6):
                began = time.perf_counter()
                ways[name]()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    (ours, ours_s), (theirs, theirs_s) = seconds.items()
    by_round = [b / a for a, b in zip(ours_s, theirs_s, strict=True)]
    yield Result(
        row="gather",
        stream=ours,
        against=theirs,
        ours=ROWS / median(ours_s),
        theirs=ROWS / median(theirs_s),
        value=median(theirs_s) / median(ours_s),
        low=min(by_round),
        high=max(by_round),
        bar=2.0,
        of="rows/s",
    )


def gathers() -> tuple[Callable[[], object], Callable[[], object]]:
    """What gathers random rows: from packed ones, and by numpy from a matrix of int8; both into the same array."""
    rng = np.random.default_rng(0)
    calls = rng.integers(0, 3, (DONORS, VARIANTS), dtype=np.int8)
    packed, out = pack_rows(calls), np.empty((ROWS, VARIANTS), dtype=np.int8)
    rows, values = np.sort(rng.choice(DONORS, ROWS, replace=False)), np.array([0, 1, 2, -1], dtype=np.int8)
    return (
        lambda: gather_packed(packed, rows, slice(0, VARIANTS), values, out),
        lambda: np.take(calls, rows, axis=0, out=out, mode="clip"),
    )


def cache(data: Data, rounds: int) -> Iterator[Result]:
    """Rows read for one trace of 100 load requests, by the cache and by one that gives up the least recently used."""
    rng = np.random.default_rng(0)
    # 1,000 donors of very uneven size, as studies have them: a load request of 16,384 cells meets some 600 of them
    share = rng.lognormal(0, 2.5, DONORS)
    trace = [np.unique(rng.choice(DONORS, 16_384, p=share / share.sum())) for _ in range(100)]
    for capacity in (750, 900):
        ours, theirs = rows_read(trace, capacity), rows_read_lru(trace, capacity)
        yield Result(
            row="cache",
            stream=f"rows read for 100 load requests, room for {capacity} of 1,000: {ours:,}",
            against=f"giving up the least recently used: {theirs:,} (times as many)",
            ours=ours,
            theirs=theirs,
            value=theirs / ours,
            low=theirs / ours,
            high=theirs / ours,
            bar=1.0,
            of="rows",
        )


def rows_read(trace: Sequence[NDArray[np.int64]], capacity: int) -> int:
    """Rows that donorloader's cache reads."""
    rows, next_use, total = RowCache(DONORS, capacity, 1, np.uint8), NextUse(trace, DONORS), 0
    for donors in trace:
        next_use.pass_over(donors)
        slots, missing = rows.request(donors, next_use)
        total += int(missing.sum())
        slots.release()
    return total


def rows_read_lru(trace: Sequence[NDArray[np.int64]], capacity: int) -> int:
    """Rows that a cache reads which gives up the least recently used."""
    held: OrderedDict[int, None] = OrderedDict()
    total = 0
    for donors in trace:
        for donor in donors.tolist():
            total += donor not in held
            held[donor] = None
            held.move_to_end(donor)
        while len(held) > capacity:
            held.popitem(last=False)
    return total


def huge(data: Data, rounds: int) -> Iterator[Result]:
    """Peak of a pass over bags with one row of 5,000,000 variants each, less the peak over the bags alone."""
    path = huge_genotypes()
    peaks = [(peak_mb(data, str(path)), peak_mb(data, "none")) for _ in range(min(3, rounds))]
    over = sorted(a - b for a, b in peaks)
    yield Result(
        row="huge",
        stream=f"peak memory, bags with rows of 5,000,000 variants, genotype_memory={HUGE_MEMORY}",
        against="the bags alone (difference)",
        ours=sorted(a for a, _ in peaks)[len(peaks) // 2],
        theirs=sorted(b for _, b in peaks)[len(peaks) // 2],
        value=over[len(over) // 2],
        low=over[0],
        high=over[-1],
        bar=1000.0,
        at_most=True,
        unit="MB",
    )


def huge_genotypes() -> Path:
    """1,000 donors × 5,000,000 variants of random calls, packed."""

    def write(path: Path) -> None:
        packed = np.frombuffer(np.random.default_rng(5).bytes(DONORS * packed_width(HUGE)), dtype=np.uint8)
        ids = donor_ids(DONORS)
        source = SimpleNamespace(
            ids=ids,
            n_variants=HUGE,
            dtype=np.dtype(np.int8),
            packed=packed.reshape(DONORS, packed_width(HUGE)),
            obs=lambda: pd.DataFrame(index=ids),
            var=lambda: pd.DataFrame(index=np.char.add("v", np.arange(HUGE).astype(str)).astype(object)),
        )
        write_genotypes(source, path, memory=8 * 2**30)

    return cached(cache_folder() / f"random-{DONORS}x{HUGE}-packed.zarr", write)


def peak_mb(data: Data, genotypes: str) -> float:
    """Peak resident memory of a process that passes over half the bags [Unit: 1e6 bytes]."""
    command = [sys.executable, "-m", "benchmarks.genotypes", data.size.name, genotypes]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent)
    return float(done.stdout)


def pass_over(data: Data, genotypes: str) -> float:
    """Pass over half the bags; this process's peak until then."""
    use_zarrs()
    path = None if genotypes == "none" else genotypes
    with dl.BagLoader(data.grouped, path, donor_key=DONOR_KEY, genotype_memory=HUGE_MEMORY) as loader:
        for number, batch in enumerate(loader):
            if path is not None and batch["donor_features"].shape != (len(batch["donors"]), HUGE):
                raise RuntimeError(f"expected rows of {HUGE} variants, got {batch['donor_features'].shape}")
            if number > len(loader) // 2:
                break
    return own_peak_mb()


if __name__ == "__main__":
    size_name, path = sys.argv[1:]
    print(pass_over(prepare(SIZES[size_name]), path))
