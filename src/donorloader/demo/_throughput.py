"""How fast the cells stream alone, and with the genotypes of their donors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from donorloader import DonorLoader


@dataclass(frozen=True)
class Throughput:
    """Cells per second of each timed pass.

    Attributes
    ----------
    alone, joined
        Passes without and with genotypes, in the order timed. Unit: cells per second.
    """

    alone: tuple[float, ...]
    joined: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Median speed with genotypes as a share of the median speed without."""
        return median(self.joined) / median(self.alone)


def measure_throughput(alone: DonorLoader, joined: DonorLoader, *, passes: int = 25) -> Throughput:
    """Time whole passes of two loaders in turn, so that whatever else the machine does meets both alike.

    Parameters
    ----------
    alone, joined
        Loaders that differ in the genotypes only.
    passes
        Timed passes of each; one more of each goes before them and is not counted.
    """
    speeds: dict[str, list[float]] = {"alone": [], "joined": []}
    for number in range(passes + 1):
        pair = [("alone", alone), ("joined", joined)]
        for name, loader in pair if number % 2 else reversed(pair):
            speed = _cells_per_second(loader)
            if number > 0:
                speeds[name].append(speed)
    return Throughput(tuple(speeds["alone"]), tuple(speeds["joined"]))


def _cells_per_second(loader: DonorLoader) -> float:
    started = time.perf_counter()
    cells = sum(len(batch["donor_idx"]) for batch in loader)
    return cells / (time.perf_counter() - started)
