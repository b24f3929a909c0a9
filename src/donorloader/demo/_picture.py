"""The demo's picture: loss, effects, throughput."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from ._throughput import Throughput
    from ._train import Fit

# Blue and orange of Okabe and Ito's palette, which colour-blind readers tell apart; the rest is grey.
BLUE, ORANGE = "#0072B2", "#E69F00"
INK, SOFT, FAINT = "#222222", "#6B6B6B", "#BDBDBD"


def draw_picture(path: Path, fit: Fit, throughput: Throughput, *, cells: int, donors: int) -> None:
    """Draw the three panels and write them as a PNG.

    Parameters
    ----------
    path
        The file; replaced if it exists.
    fit, throughput
        What the demo found.
    cells, donors
        How many, for the headline.
    """
    from matplotlib.figure import Figure  # the object alone: no window, no global figure

    figure = Figure(figsize=(14, 5), dpi=150, facecolor="white")
    grid = figure.add_gridspec(1, 3, left=0.06, right=0.985, bottom=0.13, top=0.74, wspace=0.27)
    loss, effects, speed = (figure.add_subplot(grid[column]) for column in range(3))
    headline = f"donorloader demo: {cells:,} cells of {donors} donors, streamed with their genotypes"
    figure.text(0.06, 0.93, headline, fontsize=17, fontweight="bold", color=INK)
    _draw_loss(loss, fit)
    _draw_effects(effects, fit)
    _draw_speed(speed, throughput)
    figure.savefig(path, format="png")


def style(axes: Axes, title: str, subtitle: str) -> None:
    """Title a panel and make its frame recede."""
    axes.text(0, 1.115, title, transform=axes.transAxes, fontsize=13.5, fontweight="bold", color=INK)
    axes.text(0, 1.035, subtitle, transform=axes.transAxes, fontsize=11, color=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=SOFT, labelsize=11, length=3)
    axes.xaxis.label.set(fontsize=12, color=INK)
    axes.yaxis.label.set(fontsize=12, color=INK)


def _draw_loss(axes: Axes, fit: Fit) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers, losses = [epoch.number for epoch in fit.epochs], [epoch.loss for epoch in fit.epochs]
    axes.plot(numbers, losses, color=BLUE, linewidth=2.5, marker="o", markersize=6, clip_on=False)
    axes.annotate(
        f"{losses[-1]:,.0f}",
        (numbers[-1], losses[-1]),
        xytext=(0, 10),
        textcoords="offset points",
        ha="center",
        fontsize=11,
        color=BLUE,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    seconds = sum(epoch.seconds for epoch in fit.epochs)
    style(axes, "Loss of each epoch", f"negative evidence lower bound per cell; {seconds:.0f} s in all")


def _draw_effects(axes: Axes, fit: Fit) -> None:
    planted = fit.planted
    null = fit.effects[fit.effects["effect"] == 0]
    reach = 1.1 * float(fit.effects[["effect", "estimate"]].abs().max().max())
    axes.plot([-reach, reach], [-reach, reach], color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    axes.scatter(null["effect"], null["estimate"], s=16, color=FAINT, alpha=0.5, linewidths=0, zorder=2)
    axes.scatter(planted["effect"], planted["estimate"], s=26, color=BLUE, alpha=0.65, linewidths=0, zorder=3)
    axes.text(0.04, 0.93, f"r = {fit.correlation:.2f}", transform=axes.transAxes, fontsize=15, color=INK, va="center")
    axes.text(0.97, 0.20, f"{len(planted):,} planted", transform=axes.transAxes, fontsize=11, color=BLUE, ha="right")
    axes.text(
        0.97, 0.13, f"{len(null):,} without effect", transform=axes.transAxes, fontsize=11, color=SOFT, ha="right"
    )
    axes.text(0.97, 0.06, "dashes: estimate = truth", transform=axes.transAxes, fontsize=11, color=SOFT, ha="right")
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xlabel="true effect", ylabel="estimated effect")
    axes.set_xticks(axes.get_yticks())  # the same scale both ways
    axes.set_xlim(-reach, reach)
    style(axes, "Cis effects, estimated and true", "log expression per copy of the counted allele")


def _draw_speed(axes: Axes, throughput: Throughput) -> None:
    rows = (("cells\nalone", throughput.alone, FAINT), ("cells and\ngenotypes", throughput.joined, ORANGE))
    longest = max(*throughput.alone, *throughput.joined) / 1000
    for place, (_, speeds, colour) in enumerate(rows):
        thousands = [speed / 1000 for speed in speeds]
        middle = median(thousands)
        axes.barh(place, middle, height=0.55, color=colour)
        axes.text(0.03 * longest, place, f"{middle:,.0f}", va="center", fontsize=15, fontweight="bold", color=INK)
        axes.scatter(thousands, [place] * len(thousands), s=22, color=INK, alpha=0.55, linewidths=0, zorder=3)
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    axes.set(xlim=(0, 1.06 * longest), ylim=(1.6, -0.6), xlabel="thousand cells per second")
    style(axes, f"Speed with genotypes: {throughput.ratio:.0%}", "bars: medians; dots: single passes")
    axes.tick_params(axis="y", length=0, labelsize=12, labelcolor=INK)
