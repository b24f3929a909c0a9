"""The picture of the demo of bags: loss, held-out ROC curves, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from ._picture import BLUE, FAINT, INK, ORANGE, SOFT, style

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from ._bags_train import BagScores
    from ._train import Epoch

_COLOURS = {"mean over cells": FAINT, "cells": BLUE, "cells and genotypes": ORANGE}


def draw_bags_picture(
    path: Path, losses: dict[str, tuple[Epoch, ...]], scores: dict[str, BagScores], *, cells: int
) -> None:
    """Draw the three panels and write them as a PNG.

    Parameters
    ----------
    path
        The file; replaced if it exists.
    losses
        Epochs of each model trained, by its name: ``cells``, and ``cells and genotypes`` where there is one.
    scores
        On the donors held out, of each model and of ``mean over cells``.
    cells
        How many in all, for the headline.
    """
    from matplotlib.figure import Figure  # the object alone: no window, no global figure

    figure = Figure(figsize=(14, 5), dpi=150, facecolor="white")
    grid = figure.add_gridspec(1, 3, left=0.06, right=0.985, bottom=0.13, top=0.74, wspace=0.27)
    loss, roc, attention = (figure.add_subplot(grid[column]) for column in range(3))
    held_out = len(scores["cells"].donors)
    headline = f"donorloader demo: bags of {cells:,} cells, and the disease of {held_out} donors never seen"
    figure.text(0.06, 0.93, headline, fontsize=17, fontweight="bold", color=INK)
    _draw_loss(loss, losses)
    _draw_roc(roc, scores)
    _draw_attention(attention, scores["cells"])
    figure.savefig(path, format="png")


def _draw_loss(axes: Axes, losses: dict[str, tuple[Epoch, ...]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for name, epochs in losses.items():
        numbers, values = [epoch.number for epoch in epochs], [epoch.loss for epoch in epochs]
        (line,) = axes.plot(numbers, values, color=_COLOURS[name], linewidth=2.5, label=name, clip_on=False)
        line.set(marker="o", markersize=6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("loss")
    seconds = sum(epoch.seconds for epochs in losses.values() for epoch in epochs)
    _legend(axes, "lower left")
    style(axes, "Loss of each epoch", f"cross-entropy per bag, in nats; {seconds:.0f} s in all")


def _draw_roc(axes: Axes, scores: dict[str, BagScores]) -> None:
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    for place, (name, score) in enumerate(scores.items()):
        false, true = _roc(score.donors["prediction"].to_numpy(), score.donors["disease"].to_numpy().astype(bool))
        (line,) = axes.plot(false, true, color=_COLOURS[name], linewidth=2.5, clip_on=False, zorder=2 + place)
        line.set_label(f"{name}: {score.auc:.2f}")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="healthy donors called ill", ylabel="ill donors called ill")
    _legend(axes, "lower right")
    style(axes, "Disease of donors held out", "ROC curves and the areas under them (AUC)")


def _roc(score: NDArray[np.float64], positive: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Share of the negative and of the positive items above each score, from none to all."""
    order = np.argsort(-score, kind="stable")
    last = np.append(np.flatnonzero(np.diff(score[order])), len(score) - 1)  # items of one score step together
    hit = positive[order]
    false, true = np.cumsum(~hit)[last] / (~hit).sum(), np.cumsum(hit)[last] / hit.sum()
    return np.append(0.0, false), np.append(0.0, true)


def _draw_attention(axes: Axes, scores: BagScores) -> None:
    reach = np.log10(scores.cells["attention"].clip(lower=1e-4))
    bins = np.linspace(reach.min() - 1e-3, reach.max() + 1e-3, 41).tolist()
    signal = scores.cells["signal"].to_numpy()
    for name, chosen, colour in (("other cells", ~signal, FAINT), ("signal cells", signal, BLUE)):
        shares = np.full(chosen.sum(), 1 / chosen.sum())
        axes.hist(reach[chosen], bins=bins, weights=shares, color=colour, alpha=0.75, label=name)
    axes.axvline(0, color=SOFT, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.xaxis.set_major_formatter(lambda power, _: f"{10**power:g}×")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.margins(y=0.3)  # room for the legend
    _legend(axes, "upper left")
    area = f"AUC {scores.attention_auc:.2f}"
    axes.text(0.97, 0.93, area, transform=axes.transAxes, fontsize=15, color=INK, ha="right", va="center")
    axes.set(xlabel="attention, of the bag's mean", ylabel="share of cells")
    title = f"Attention on signal cells: {scores.attention_ratio:.0f} times"
    style(axes, title, "that of others; ill donors held out, cells alone")


def _legend(axes: Axes, place: Literal["upper left", "lower left", "lower right"]) -> None:
    axes.legend(loc=place, frameon=False, fontsize=11.5, labelcolor=INK, handlelength=1.4)
