"""The row about limits: how near the joined streams come to keeping every core busy with what has to be done."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import baselines, ours
from benchmarks.cells import VARIANTS
from benchmarks.genotypes import gathers
from benchmarks.measure import Result, Stream, one_pass
from benchmarks.report import usable_cores
from donorloader.cells import fill_dense

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch import Loader

    from benchmarks.data import Data


def limits(data: Data, rounds: int) -> Iterator[Result]:
    """Speeds against the most that the cores can do.

    What has to be done: annbatch's own work for these cells, by the processor time of a pass, and for each batch the
    one kernel that donorloader adds, timed alone. At best, all cores do nothing else, all the time.
    """
    cores = usable_cores()
    cells = baselines.annbatch_alone(data, to=None)
    batch = next(iter(cells))["X"]
    dense = np.empty(batch.shape, dtype=np.float32)
    gather, _ = gathers()
    kernels: dict[str, Callable[[], object]] = {
        "dense float32 X, 3,000 variants": lambda: fill_dense(batch.data, batch.indices, batch.indptr, dense),
        "100,000 variants, rows of the batch's donors": gather,
    }
    loaders = (
        ours.joined(data, data.genotypes_rows, variants=VARIANTS, densify=True),
        ours.joined(data, data.genotypes_rows),
    )
    for (name, kernel), loader in zip(kernels.items(), loaders, strict=True):
        with loader:
            stream = Stream(name, lambda loader=loader: loader)
            one_pass(stream)
            speeds, most = [], []
            for _ in range(rounds):
                needed = (_work(cells) + len(loader) * _seconds(kernel)) / cores
                most.append(data.size.cells / needed)
                speeds.append(one_pass(stream))
        by_round = [a / b for a, b in zip(speeds, most, strict=True)]
        yield Result(
            row="limits",
            stream=f"joined, {name}",
            against=f"{cores} cores that do nothing but annbatch's work and this, all the time",
            ours=median(speeds),
            theirs=median(most),
            value=median(speeds) / median(most),
            low=min(by_round),
            high=max(by_round),
        )


def _work(cells: Loader) -> float:
    """Processor time of all threads for a pass of annbatch alone [Unit: s]."""
    began = time.process_time()
    for _ in cells:
        pass
    return time.process_time() - began


def _seconds(kernel: Callable[[], object]) -> float:
    """Of a call, on one core [Unit: s]."""
    kernel()
    began = time.perf_counter()
    for _ in range(10):
        kernel()
    return (time.perf_counter() - began) / 10
