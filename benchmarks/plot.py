"""One picture of a run: the ratios with their bars, and the sweep."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from benchmarks.measure import Result

MET, MISSED, NO_BAR, MARK = "#2a7f62", "#c0392b", "#9aa5b1", "#222222"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw a run as PNG."""
    ratios = [result for result in results if result.unit == "x" and result.row != "sweep"]
    sweep = [result for result in results if result.row == "sweep"]
    heights = [max(1.0, 0.5 * len(ratios))] if ratios else []
    heights += [2.6] if sweep else []
    if not heights:
        return
    figure = Figure(figsize=(10, sum(heights) + 1.2), layout="constrained")
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if ratios:
        _draw_ratios(axes[0], ratios)
    if sweep:
        _draw_sweep(axes[-1], sweep)
    figure.savefig(path, dpi=130)


def _draw_ratios(ax: Axes, results: Sequence[Result]) -> None:
    y = np.arange(len(results))[::-1]
    value = np.array([result.value for result in results])
    reach = np.array([[result.value - result.low, result.high - result.value] for result in results]).clip(min=0).T
    colours = [{True: MET, False: MISSED, None: NO_BAR}[result.met] for result in results]
    ax.barh(y, value, color=colours, height=0.6, xerr=reach, error_kw={"ecolor": MARK, "lw": 1, "capsize": 2})
    for height, result in zip(y, results, strict=True):
        if result.bar is not None:
            ax.plot([result.bar] * 2, [height - 0.42, height + 0.42], color=MARK, lw=2)
        sign = " (less is better)" if result.at_most else ""
        ax.text(max(result.high, result.bar or 0) * 1.04, height, f"{result.value:.2f}{sign}", va="center", fontsize=8)
    labels = [textwrap.fill(f"{result.stream} / {result.against}", 64) for result in results]
    ax.set_yticks(y, labels, fontsize=7)
    ax.axvline(1, color=MARK, lw=0.5, ls=":")
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(min(0.5, value.min() * 0.8), max(result.high for result in results) * 2)
    ax.set_xlabel("ratio of medians (line: extremes by round; thick tick: the bar)")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_sweep(ax: Axes, results: Sequence[Result]) -> None:
    points = {}
    for result in results:
        variants, batch_size = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d", result.stream))
        points[variants, batch_size] = result.value
    rows, columns = (sorted({point[axis] for point in points}) for axis in (1, 0))
    grid = np.array([[points.get((column, row), np.nan) for column in columns] for row in rows])
    # Colours run from an eighth to eight times as fast as the naive loop, white where they are level.
    ax.imshow(np.log2(grid), cmap="PRGn", vmin=-3, vmax=3, aspect="auto", origin="lower")
    for i, j in np.ndindex(*grid.shape):
        colour = "white" if abs(np.log2(grid[i, j])) > 2 else MARK
        ax.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", fontsize=8, color=colour)
    ax.set_xticks(range(len(columns)), [f"{n:,}" for n in columns])
    ax.set_yticks(range(len(rows)), [f"{n:,}" for n in rows])
    ax.set_xlabel("variants")
    ax.set_ylabel("cells a batch")
    ax.set_title(f"times as fast as the {results[0].against}", fontsize=9)
