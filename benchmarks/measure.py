"""How a speed is taken: streams in alternating order within one run, medians, and their ratio."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: A batch, of annbatch or of donorloader: both have the cells under "X".
type Batch = dict[str, Any]


@dataclass(frozen=True)
class Stream:
    """Something that can be passed over again and again, and what its consumer does with a batch."""

    name: str
    start: Callable[[], Iterable[Batch]]  #: starts a new pass
    step: float = 0.0  #: seconds the consumer sleeps over a batch: a step on a device, which leaves the CPU free
    passes: int = 1  #: begun one after the other and timed together, as epochs of a training run are
    only_batches: int | None = None  #: where a pass takes minutes: its first batches only (whole windows, please)
    at_most_rounds: int | None = None  #: where a pass takes long: the first rounds only


@dataclass(frozen=True)
class Result:
    """One row of the table: a stream against another, and the bar it should clear.

    `value` is a ratio, or with `unit` "MB" a difference; `low` and `high` are its least and its greatest over the
    rounds. `ours` and `theirs` are what it was made of, in MB or in what `of` names.
    """

    row: str
    stream: str
    against: str
    ours: float
    theirs: float
    value: float
    low: float
    high: float
    bar: float | None = None
    at_most: bool = False
    unit: str = "x"
    of: str = "cells/s"

    @property
    def met(self) -> bool | None:
        """Whether the bar is cleared; None where there is none."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def one_pass(stream: Stream) -> float:
    """Pass over a stream, and return its speed in cells per second."""
    # What is imported is set aside: a collection that walks all of it takes a third of a second, in whatever pass it is
    # due. The same for every stream.
    gc.collect()
    gc.freeze()
    cells = 0
    began = time.perf_counter()
    for _ in range(stream.passes):
        for number, batch in enumerate(stream.start(), start=1):
            cells += batch["X"].shape[0]
            if stream.step:
                time.sleep(stream.step)
            if number == stream.only_batches:
                break
    return cells / (time.perf_counter() - began)


def alternate(streams: Sequence[Stream], rounds: int) -> dict[str, list[float]]:
    """Speeds of each stream by its name, one for each round.

    A round passes over every stream once, every second round in reverse order, so that what else the machine does,
    and what one pass leaves in its caches, falls on all of them alike. One round before them warms up, untimed.
    """
    speeds: dict[str, list[float]] = {stream.name: [] for stream in streams}
    for stream in streams:
        one_pass(stream)
    for number in range(rounds):
        for stream in streams if number % 2 == 0 else reversed(streams):
            if number < (stream.at_most_rounds or rounds):
                speeds[stream.name].append(one_pass(stream))
    return speeds


def compare(row: str, speeds: dict[str, list[float]], stream: str, against: str, *, bar: float | None = None) -> Result:
    """How many times as fast one stream is as another: the ratio of medians, and the extremes of the ratio by round."""
    ours, theirs = speeds[stream], speeds[against]
    by_round = [a / b for a, b in zip(ours, theirs, strict=False)]
    return Result(
        row=row,
        stream=stream,
        against=against,
        ours=median(ours),
        theirs=median(theirs),
        value=median(ours) / median(theirs),
        low=min(by_round),
        high=max(by_round),
        bar=bar,
    )
