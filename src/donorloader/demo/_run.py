"""The demo, step by step: simulate, prepare, look, train, time, draw."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

import donorloader as dl
from donorloader.report import Report, print_report

from ._look import explain_batch
from ._picture import draw_picture
from ._simulate import StudySettings, simulate_study
from ._steps import check_options, names, print_step, work_folder
from ._throughput import Throughput, measure_throughput
from ._train import POOL, Epoch, Fit, fit, mean_dosages

if TYPE_CHECKING:
    import pandas as pd

PICTURE = Path("donorloader-demo.png")
EPOCHS = 12
# Windows of 2,048 cells: in a study as small as this one, the usual 16,384 would be all cells at once.
_WINDOW: dict[str, Any] = {"batch_size": 512, "chunk_size": 64, "preload_nchunks": 32}


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes
    ----------
    fit
        Loss of each epoch, and true and estimated cis effects; ``fit.correlation`` sums it up.
    throughput
        Cells per second with and without genotypes.
    picture
        The picture written.
    seconds
        Wall time of the whole run. Unit: seconds.
    """

    fit: Fit
    throughput: Throughput
    picture: Path
    seconds: float


def run_demo(
    out: Path | None = None,
    epochs: int = EPOCHS,
    seed: int = 0,
    picture: Path = PICTURE,
    *,
    settings: StudySettings | None = None,
    console: Console | None = None,
) -> DemoResult:
    """Simulate a small study, prepare it, stream it, train a model on it, and recover the effects that were planted.

    Parameters
    ----------
    out
        Folder for the raw files (``raw/``) and the study (``study/``); made if it does not exist, must be empty if it
        does. Default: a temporary folder, removed at the end.
    epochs
        Passes over the cells in training.
    seed
        Of the simulation, the order of the cells and the model. The same seed gives the same estimates.
    picture
        Where to write the picture, a ``.png``; replaced if it exists.
    settings
        Size of the study. Default: 12,000 cells of 80 donors, about half a minute on two cores.
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
    settings, console = settings or StudySettings(), console or Console(highlight=False)
    with work_folder(out) as folder:
        result_fit, throughput = _run(folder, epochs, seed, settings, console)
    draw_picture(picture, result_fit, throughput, cells=settings.cells, donors=settings.donors)
    seconds = time.perf_counter() - started
    console.print(f"\n[bold green]Done[/] in {seconds:.0f} s. The picture is {escape(str(picture))}.")
    if out is not None:
        console.print(f"Raw files and study are in {escape(str(out))}.")
    return DemoResult(result_fit, throughput, picture, seconds)


def _run(folder: Path, epochs: int, seed: int, settings: StudySettings, console: Console) -> tuple[Fit, Throughput]:
    print_step(console, 1, "Simulate a study", "raw files as a lab would have them")
    (folder / "raw").mkdir()
    simulated = simulate_study(folder / "raw", settings, seed=seed)
    cis = simulated.cis
    console.print(
        f"{names(simulated.cell_files)}: {settings.cells:,} cells × {settings.genes:,} genes, "
        f"of {settings.donors} donors in {settings.pools} pools.\n"
        f"{simulated.panel.name}: genotypes of {settings.donors + settings.genotyped_only} donors "
        f"× {settings.variants:,} variants, {settings.missing:.0%} of calls missing.\n"
        f"Planted: {(cis['effect'] != 0).sum():,} genes change with a variant nearby. "
        f"To be found among {len(cis):,}\npairs of a gene and a variant within {settings.window // 1000:,} kb (in cis)."
    )

    print_step(console, 2, "Prepare", "dl.prepare(cells, genotypes, out=...): one folder to stream from")
    study = dl.prepare(list(simulated.cell_files), simulated.panel, out=folder / "study", seed=seed)
    print_report(Report.from_dict(study.meta["report"]), console)

    print_step(console, 3, "Stream", "dl.DonorLoader(study): cells joined with their donors' genotypes")
    window = {**_WINDOW, "seed": seed}
    with dl.DonorLoader(study, obs_columns=[study.donor_key, "cell_type", POOL], **window) as loader:
        explain_batch(console, loader, simulated.panel, study.donor_key)

    print_step(console, 4, "Train", "a small variational autoencoder after LIVI, with cis genotype terms")
    result = _train(console, study, cis, settings.pools, epochs, seed, window)

    print_step(console, 5, "Time it", "what do the genotypes cost? passes of both kinds in turn")
    with (
        dl.DonorLoader(study.cells, donor_key=study.donor_key, seed=seed) as alone,
        dl.DonorLoader(study, seed=seed) as joined,
    ):
        throughput = measure_throughput(alone, joined)
    console.print(
        f"cells alone            {median(throughput.alone):9,.0f} cells per second\n"
        f"cells and genotypes    {median(throughput.joined):9,.0f} cells per second "
        f"([bold]{throughput.ratio:.0%}[/], all {settings.variants:,} variants)"
    )
    return result, throughput


def _train(
    console: Console, study: dl.Study, cis: pd.DataFrame, pools: int, epochs: int, seed: int, window: dict[str, Any]
) -> Fit:
    in_cis = cis["variant"].unique()
    with dl.DonorLoader(study, variants=in_cis, obs_columns=[POOL], densify=True, **window) as loader:
        store = dl.open_genotypes(study.genotypes)
        means = mean_dosages(store, loader.donors, in_cis)
        store.close()
        console.print(f"densify=True, variants=the {len(in_cis):,} in cis; missing calls (-1) count as the mean.")

        def print_epoch(epoch: Epoch) -> None:
            console.print(f"epoch {epoch.number:>2} of {epochs}   loss {epoch.loss:9,.2f}   {epoch.seconds:4.1f} s")

        result = fit(loader, means, cis, pools=pools, epochs=epochs, seed=seed, on_epoch=print_epoch)
    planted = result.planted
    sign = (planted["effect"] * planted["estimate"] > 0).mean()
    console.print(
        f"Correlation of estimated with true effects: [bold]{result.correlation:.3f}[/], over all {len(cis):,} pairs.\n"
        f"Of the {len(planted):,} planted effects, {sign:.0%} have the right sign."
    )
    return result
