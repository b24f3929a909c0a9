"""The demo of bags, step by step: simulate, prepare, look, train, ask about donors never seen, draw."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from rich.console import Console
from rich.markup import escape

import donorloader as dl
from donorloader.report import Report, print_report

from ._bags_picture import draw_bags_picture
from ._bags_simulate import DISEASE, SIGNAL, BagSettings, SimulatedBags, simulate_bags
from ._bags_train import BagScores, fit_bags, open_bags, score_bags, score_means
from ._look import print_fields
from ._steps import check_options, names, print_step, work_folder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._train import Epoch

BAGS_PICTURE = Path("donorloader-demo-bags.png")
BAGS_EPOCHS = 10
_TRAIN_SHARE = 0.6
_FIELDS = {
    "X": "counts of all bags, cells × genes",
    "offsets": "where each bag begins and ends in X",
    "donor_idx": "each cell's bag",
    "donors": "each bag's donor",
    "labels": "each bag's label",
    "donor_features": "each bag's genotypes",
}


@dataclass(frozen=True)
class BagFit:
    """A trained model of bags: the loss of each epoch, and its scores on the donors held out."""

    epochs: tuple[Epoch, ...]
    held_out: BagScores


@dataclass(frozen=True)
class BagResult:
    """What the demo of bags found.

    Attributes
    ----------
    means
        Scores of the mean over cells, on the donors held out.
    cells
        The model of cells alone.
    genotypes
        The model of cells and genotypes, or `None` without.
    picture
        The picture written.
    seconds
        Wall time of the whole run. Unit: seconds.
    """

    means: BagScores
    cells: BagFit
    genotypes: BagFit | None
    picture: Path
    seconds: float


def run_bags_demo(
    out: Path | None = None,
    epochs: int = BAGS_EPOCHS,
    seed: int = 0,
    picture: Path = BAGS_PICTURE,
    *,
    genotypes: bool = False,
    settings: BagSettings | None = None,
    console: Console | None = None,
) -> BagResult:
    """Simulate donors with few telling cells, train attention-based MIL on their bags, and ask it about other donors.

    Parameters
    ----------
    out
        Folder for the raw files (``raw/``) and the study (``study/``); made if it does not exist, must be empty if it
        does. Default: a temporary folder, removed at the end.
    epochs
        Passes over the bags in training.
    seed
        Of the simulation, the split of the donors, the order of bags and the model. The same seed gives the same
        predictions.
    picture
        Where to write the picture, a ``.png``; replaced if it exists.
    genotypes
        Whether to train a second model, which also gets the genotype row of each bag.
    settings
        The study. Default: 18,000 cells of 600 donors.
    console
        Where to print. Default: standard output.

    Raises
    ------
    ValueError
        If an option is out of range.
    FileNotFoundError
        If the folder for the picture does not exist.
    FileExistsError
        If `out` is not empty.
    ModuleNotFoundError
        If matplotlib is not installed.
    """
    started = time.perf_counter()
    check_options(out, epochs, seed, picture)
    settings, console = settings or BagSettings(), console or Console(highlight=False)
    with work_folder(out) as folder:
        means, cells, joined = _run(folder, epochs, seed, settings, console, genotypes=genotypes)
    draw_bags_picture(
        picture,
        {"cells": cells.epochs} | ({} if joined is None else {"cells and genotypes": joined.epochs}),
        {"mean over cells": means, "cells": cells.held_out}
        | ({} if joined is None else {"cells and genotypes": joined.held_out}),
        cells=settings.cells,
    )
    seconds = time.perf_counter() - started
    console.print(f"\n[bold green]Done[/] in {seconds:.0f} s. The picture is {escape(str(picture))}.")
    if out is not None:
        console.print(f"Raw files and study are in {escape(str(out))}.")
    return BagResult(means, cells, joined, picture, seconds)


def split_donors(table: pd.DataFrame, seed: int) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Ids of the donors to train on, and of those held out, at random."""
    ids = np.random.default_rng([seed, 1]).permutation(table.index.to_numpy(dtype=object))
    cut = round(_TRAIN_SHARE * len(ids))
    return ids[:cut], ids[cut:]


def _run(
    folder: Path, epochs: int, seed: int, settings: BagSettings, console: Console, *, genotypes: bool
) -> tuple[BagScores, BagFit, BagFit | None]:
    print_step(console, 1, "Simulate a study", "raw files as a lab would have them")
    (folder / "raw").mkdir()
    simulated = simulate_bags(folder / "raw", settings, seed=seed)
    table = pd.read_csv(simulated.donor_table, sep="\t", index_col="donor_id")
    _describe(console, simulated, settings, table, genotypes=genotypes)

    panel = simulated.panel if genotypes else None
    print_step(console, 2, "Prepare", f"dl.prepare(cells{', genotypes' * genotypes}, out=...): bags.zarr is by donor")
    study = dl.prepare(list(simulated.cell_files), panel, out=folder / "study", seed=seed)
    print_report(Report.from_dict(study.meta["report"]), console)

    print_step(
        console, 3, "Stream", f"dl.BagLoader(study, labels={DISEASE!r}, donor_table=...): bags of a donor's cells"
    )
    variants = simulated.candidates if genotypes else None
    with open_bags(study, table, variants, seed=seed) as loader:
        batch = next(iter(loader))
    print_fields(console, batch, {key: what for key, what in _FIELDS.items() if batch[key] is not None})

    print_step(console, 4, "Train", "gated attention (Ilse et al., 2018), ragged bags, no padding")
    train, held_out = split_donors(table, seed)
    console.print(f"Train on {len(train)} donors; {len(held_out)} others are held out.")
    means = score_means(study, table, train, held_out)

    def train_model(what: str, variants: NDArray[np.object_] | None) -> BagFit:
        console.print(f"[bold]{what}[/]")

        def print_epoch(epoch: Epoch) -> None:
            console.print(f"epoch {epoch.number:>2} of {epochs}   loss {epoch.loss:6.3f}   {epoch.seconds:4.1f} s")

        model, history = fit_bags(study, table, train, variants, epochs=epochs, seed=seed, on_epoch=print_epoch)
        return BagFit(history, score_bags(model, study, table, held_out, variants))

    cells = train_model("cells alone", None)
    joined = train_model("cells and genotypes", simulated.candidates) if genotypes else None

    print_step(console, 5, "Donors never seen", "is the disease foretold, and by the right cells?")
    console.print(
        f"AUC of the disease, {len(held_out)} donors held out (0.5 is a guess, 1 is certain)\n"
        f"mean over cells, ridge regression   {means.auc:.3f}\n"
        f"attention, cells alone              [bold]{cells.held_out.auc:.3f}[/]"
    )
    if joined is not None:
        console.print(f"attention, cells and genotypes      [bold]{joined.held_out.auc:.3f}[/]")
    looked = cells.held_out
    console.print(
        f"In the ill, {looked.cells[SIGNAL].mean():.1%} of cells carry the signal; the model was not told which.\n"
        f"It gives them [bold]{looked.attention_ratio:.0f} times[/] the attention of other cells. "
        f"As a detector of them,\nattention has an AUC of [bold]{looked.attention_auc:.3f}[/]."
    )
    return means, cells, joined


def _describe(
    console: Console, simulated: SimulatedBags, settings: BagSettings, table: pd.DataFrame, *, genotypes: bool
) -> None:
    console.print(
        f"{names(simulated.cell_files)}: {settings.cells:,} cells × {settings.genes:,} genes, "
        f"of {settings.donors} donors in {settings.pools} pools.\n"
        f"{simulated.donor_table.name}: which donors are ill; {table[DISEASE].sum()} are.\n"
        f"Planted: {settings.least:.0%} to {settings.most:.0%} of the cells of an ill donor run a programme of "
        f"{settings.programme} genes."
    )
    if genotypes:
        console.print(
            f"{simulated.panel.name}: genotypes of all donors × {settings.variants:,} variants, "
            f"{settings.missing:.0%} of calls missing.\n"
            f"Planted: {simulated.risk_variant} raises the risk. The model gets {settings.candidates} candidates, "
            "it among them."
        )
