"""Rows about the cells' own speed: what joining costs, with and without a consumer that takes its time."""

from __future__ import annotations

from itertools import repeat
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import baselines, ours
from benchmarks.measure import Result, Stream, alternate, compare, one_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.data import Data
    from donorloader import DonorLoader

VARIANTS = slice(3_000)
EPOCHS = 4

JOINED = "joined, 3,000 variants, rows of the batch's donors"
ALONE = "annbatch's cells alone (X and the donor column)"


def joined(data: Data, rounds: int) -> Iterator[Result]:
    """Joined batches against annbatch's cells alone; then without genotypes, to see what the loader itself costs."""
    cells = baselines.annbatch_alone(data)
    cells_only = "cells only, no genotypes"
    with (
        ours.joined(data, data.genotypes_rows, variants=VARIANTS) as loader,
        ours.joined(data, None) as without_genotypes,
    ):
        speeds = alternate(
            [
                Stream(JOINED, lambda: loader),
                Stream(ALONE, lambda: cells),
                Stream(cells_only, lambda: without_genotypes),
            ],
            rounds,
        )
    yield compare("joined", speeds, JOINED, ALONE, bar=0.95)
    yield compare("joined", speeds, cells_only, ALONE)


def step(data: Data, rounds: int) -> Iterator[Result]:
    """Joined batches to a consumer whose step takes as long as a batch takes to load, against the longer of the two.

    The step is a sleep, as a training step on a device is for the CPU. Loading and stepping at once can take no less
    than the longer alone; one after the other they would take twice that. First over epochs in a row, the next of which
    is read ahead; then over a single epoch, whose first load request nothing can hide.
    """
    in_a_row = {"joined, 3,000 variants, epochs in a row with read_next_epoch": EPOCHS, JOINED: 1}
    for name, passes in in_a_row.items():
        with ours.joined(data, data.genotypes_rows, variants=VARIANTS, read_next_epoch=passes > 1) as loader:
            yield _with_a_step(data, loader, name, passes, rounds, bar=1.10 if passes > 1 else None)


def _with_a_step(data: Data, loader: DonorLoader, name: str, passes: int, rounds: int, *, bar: float | None) -> Result:
    load_alone = Stream("load alone", lambda: loader, passes=passes)
    one_pass(load_alone)
    seconds = median(data.size.cells / one_pass(load_alone) for _ in range(3)) / len(loader)
    # Batches that are there at once, as many as the loader gives.
    batch = {"X": np.empty((round(data.size.cells / len(loader)), 0))}
    both = f"{name}, and a step of {seconds * 1e3:.1f} ms a batch, as long as loading one"
    speeds = alternate(
        [
            Stream(both, lambda: loader, step=seconds, passes=passes),
            load_alone,
            Stream("step alone", lambda: repeat(batch, len(loader)), step=seconds, passes=passes),
        ],
        rounds,
    )
    longer = [min(speeds["load alone"][i], speeds["step alone"][i]) for i in range(rounds)]
    slower = min(median(speeds["load alone"]), median(speeds["step alone"]))
    by_round = [alone / together for alone, together in zip(longer, speeds[both], strict=True)]
    return Result(
        row="step",
        stream=both,
        against="the longer of load alone and step alone (times, less is better)",
        ours=median(speeds[both]),
        theirs=slower,
        value=slower / median(speeds[both]),
        low=min(by_round),
        high=max(by_round),
        bar=bar,
        at_most=True,
    )
