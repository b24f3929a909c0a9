"""A small study of a disease that few cells tell of: cell files, a donor table, a PLINK panel, and the truth.

Who falls ill depends on one variant, and on nothing else that is measured:

    P(ill) = logistic(effect x (dosage of the risk allele - its mean))

In the ill, few cells run a programme of genes. Half of its genes are also up in the activated cells of everybody, and
all of them are up or down in all cells of a donor, so that the mean over a donor's cells tells little. Cell types,
pools and donors differ besides, as in the study of `_simulate.py`, from which this one takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ._simulate import Programs, draw_cells, draw_dosages, place, write_panel, write_pool

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

DISEASE, SIGNAL = "disease", "signal"  # columns: of the donor table, and of the cells' obs


@dataclass(frozen=True, kw_only=True)
class BagSettings:
    """How large the simulated study is, and how clear its signal. The defaults run in under a minute on two cores.

    Attributes
    ----------
    donors
        Donors, all with cells and genotypes.
    cells
        Cells in all; donors get uneven shares of them.
    genes, variants
        Genes counted, and variants in the panel.
    candidates
        Variants that the model is given; the one that acts is among them.
    pools
        Pools of donors, sequenced one after another: one ``.h5ad`` file each.
    programme
        Genes of the programme.
    least, most
        Share of signal cells in an ill donor, drawn between these. At least one cell is.
    strength
        Mean rise of the programme's genes in a signal cell, in log expression.
    risk
        What each copy of the risk allele adds to the log odds of disease. Far more than real variants do, so that a
        few hundred donors suffice to learn it.
    missing
        Share of genotype calls that failed.
    """

    donors: int = 600
    cells: int = 18_000
    genes: int = 150
    variants: int = 500
    candidates: int = 20
    pools: int = 4
    programme: int = 20
    least: float = 0.05
    most: float = 0.10
    strength: float = 0.8
    risk: float = 3.0
    missing: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        for name, least in (("donors", 10), ("genes", 2), ("variants", 1), ("pools", 1), ("candidates", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.cells < self.donors:
            raise ValueError(f"Each donor has a cell, but there are {self.cells} cells for {self.donors} donors.")
        if not 2 <= self.programme <= self.genes:
            raise ValueError(f"programme must be 2 to {self.genes} (genes), got {self.programme}.")
        if self.candidates > self.variants:
            raise ValueError(f"candidates must be at most {self.variants} (variants), got {self.candidates}.")
        if not 0 < self.least <= self.most < 1:
            raise ValueError(f"Shares are above 0 and below 1, least first, got {self.least} and {self.most}.")
        if not 0 <= self.missing < 1:
            raise ValueError(f"missing is a share, from 0 to below 1, got {self.missing}.")


@dataclass(frozen=True)
class SimulatedBags:
    """The raw files of a study, and what is true of it.

    Attributes
    ----------
    cell_files
        One ``.h5ad`` a pool: counts (CSR, float32), ``obs`` with donor_id, cell_type, pool, and ``signal``: whether the
        cell runs the programme. No model is given that.
    panel
        The PLINK ``.bed``.
    donor_table
        The table of donors, tab-separated: donor_id and ``disease``, 1 or 0.
    candidates
        Names of the candidate variants.
    risk_variant
        The one of them that acts.
    """

    cell_files: tuple[Path, ...]
    panel: Path
    donor_table: Path
    candidates: NDArray[np.object_]
    risk_variant: str


def simulate_bags(folder: Path, settings: BagSettings, *, seed: int) -> SimulatedBags:
    """Draw a study and write its raw files to a folder.

    Parameters
    ----------
    folder
        An existing folder; gets ``pool1.h5ad`` and so on, ``donors.tsv``, and ``panel.bed``, ``.bim``, ``.fam``.
    settings
        How large a study.
    seed
        The same seed and settings give the same study.

    Returns
    -------
    The paths written, and the truth.
    """
    rng = np.random.default_rng(seed)
    donors = np.array([f"D{number:03d}" for number in range(1, settings.donors + 1)], object)
    genes = place(rng, settings.genes, "GENE")
    variants = place(rng, settings.variants, "rs1")
    dosages = draw_dosages(rng, variants, len(donors))
    panel = write_panel(rng, folder / "panel.bed", dosages, variants, donors, missing=settings.missing)

    candidates = np.sort(rng.choice(settings.variants, settings.candidates, replace=False))
    frequency = dosages[:, candidates].mean(axis=0) / 2
    risk = candidates[np.argmin(np.abs(frequency - 0.4))]  # the commonest tell most in a study of few donors
    log_odds = settings.risk * (dosages[:, risk] - dosages[:, risk].mean())
    ill = rng.random(len(donors)) < 1 / (1 + np.exp(-log_odds))
    table = folder / "donors.tsv"
    pd.DataFrame({DISEASE: ill.astype(int)}, index=pd.Index(donors, name="donor_id")).to_csv(table, sep="\t")

    size = {"cells": settings.cells, "panel_size": len(donors), "pools": settings.pools}
    cells = draw_cells(rng, np.arange(len(donors)), **size)
    cells[SIGNAL] = _draw_signal(rng, cells["donor"].to_numpy(), ill, settings)
    programs = Programs(rng, settings.genes, len(donors), settings.pools)
    programme = _Programme(rng, programs.gene, len(donors), settings)
    files = []
    for pool, rows in cells.groupby("pool", sort=True):
        rates = programs.log_rates(rng, rows) + programme.log_rates(rng, rows)
        path = folder / f"pool{pool + 1}.h5ad"
        signal = {SIGNAL: rows[SIGNAL].to_numpy()}
        files.append(write_pool(rng, path, rates, programs.dispersion, rows, donors, genes, **signal))
    names = np.asarray(variants.index, dtype=object)
    return SimulatedBags(tuple(files), panel, table, names[candidates], str(names[risk]))


def _draw_signal(
    rng: np.random.Generator, donor: NDArray[np.int64], ill: NDArray[np.bool_], settings: BagSettings
) -> NDArray[np.bool_]:
    """Which cells run the programme: a share of each ill donor's, and none of the others'."""
    signal = np.zeros(len(donor), dtype=bool)
    for who in np.flatnonzero(ill):
        mine = np.flatnonzero(donor == who)
        count = max(1, round(rng.uniform(settings.least, settings.most) * len(mine)))
        signal[rng.choice(mine, count, replace=False)] = True
    return signal


class _Programme:
    """What the programme's genes do: in signal cells, in activated cells, and in all cells of a donor."""

    def __init__(
        self, rng: np.random.Generator, baseline: NDArray[np.float64], donors: int, settings: BagSettings
    ) -> None:
        # Genes of middling expression: the strength alone then sets how clear the signal is, not the luck of the draw.
        middle = np.argsort(np.abs(baseline - np.median(baseline)))[: 2 * settings.programme]
        genes = rng.choice(middle, settings.programme, replace=False)
        self.signal = np.zeros(settings.genes)
        self.signal[genes] = settings.strength * rng.uniform(0.7, 1.3, len(genes))
        self.activated = np.zeros(settings.genes)
        half = genes[: len(genes) // 2]
        self.activated[half] = self.signal[half]
        self.share_activated = rng.beta(2, 8, donors)
        self.donor = np.zeros((donors, settings.genes))
        self.donor[:, genes] = rng.normal(0, 0.15, (donors, len(genes))) + rng.normal(0, 0.1, (donors, 1))

    def log_rates(self, rng: np.random.Generator, rows: pd.DataFrame) -> NDArray[np.float64]:
        """Log rates of some cells, up to a constant of each cell, (cells, genes)."""
        donor, signal = rows["donor"].to_numpy(), rows[SIGNAL].to_numpy()
        activated = ~signal & (rng.random(len(rows)) < self.share_activated[donor])
        return self.donor[donor] + signal[:, None] * self.signal + activated[:, None] * self.activated
