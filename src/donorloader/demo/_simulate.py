"""A small population study with known answers: cell files, a PLINK panel, and the cis effects planted in the counts.

Every count is drawn from

    count[cell, gene] ~ NegativeBinomial(mean = library size[cell] * share[cell, gene], dispersion[gene])
    log share[cell, gene] = gene + cell type + activation + pool + donor x cell type + cis genotype - constant[cell]

so a model that is handed the right genotypes can recover their effects, and one that is handed other donors' cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

CELL_TYPES = ("CD4 T", "CD8 T", "NK", "B", "Monocyte", "Dendritic")
_TYPE_SHARES = (0.34, 0.20, 0.14, 0.12, 0.16, 0.04)
_CHROMOSOMES = ("1", "2", "3", "4", "5")
_CHROMOSOME_LENGTH = 100_000_000
_DONOR_FACTORS = 3


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """How large the simulated study is. The defaults run in well under two minutes on two cores.

    Attributes
    ----------
    donors
        Donors with cells.
    genotyped_only
        Donors of the panel of whom no cell was sequenced.
    cells
        Cells in all; donors get uneven shares of them.
    genes, variants
        Genes counted, and variants in the panel.
    pools
        Pools of donors, sequenced one after another: one ``.h5ad`` file each.
    window
        A variant at most this many base pairs from a gene's start is in cis with it.
    planted
        Share of genes that a variant in cis truly acts on.
    missing
        Share of genotype calls that failed.
    """

    donors: int = 80
    genotyped_only: int = 5
    cells: int = 12_000
    genes: int = 800
    variants: int = 2_500
    pools: int = 4
    window: int = 250_000
    planted: float = 0.25
    missing: float = 0.01

    def __post_init__(self) -> None:
        """Refuse what cannot be drawn."""
        for name in ("donors", "genes", "variants", "pools"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.cells < self.donors:
            raise ValueError(f"Each donor has a cell, but there are {self.cells} cells for {self.donors} donors.")
        for name in ("planted", "missing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share, from 0 to below 1, got {getattr(self, name)}.")


@dataclass(frozen=True)
class SimulatedStudy:
    """The raw files of a study, and what is true of it.

    Attributes
    ----------
    cell_files
        One ``.h5ad`` a pool: counts (CSR, float32), ``obs`` with donor_id, cell_type and pool.
    panel
        The PLINK ``.bed``; its ``.bim`` and ``.fam`` lie beside it. Family ids are all 0; individual ids are donors.
    cis
        One row for each gene and variant in cis: gene, variant, effect. The effect is the change in log expression for
        each copy of the counted allele, and 0 where none was planted.
    cells_per_donor
        Cells of each donor, by donor id.
    """

    cell_files: tuple[Path, ...]
    panel: Path
    cis: pd.DataFrame
    cells_per_donor: pd.Series


def simulate_study(folder: Path, settings: StudySettings, *, seed: int) -> SimulatedStudy:
    """Draw a study and write its raw files to a folder.

    Parameters
    ----------
    folder
        An existing folder; gets ``pool1.h5ad`` and so on, and ``panel.bed``, ``panel.bim``, ``panel.fam``.
    settings
        How large a study.
    seed
        The same seed and settings give the same study.

    Returns
    -------
    The paths written, and the truth.
    """
    rng = np.random.default_rng(seed)
    donors = np.array([f"D{number:03d}" for number in range(1, settings.donors + settings.genotyped_only + 1)], object)
    genes = place(rng, settings.genes, "GENE")
    variants = place(rng, settings.variants, "rs1")
    dosages = draw_dosages(rng, variants, len(donors))
    cis = _plant_effects(rng, genes, variants, settings)
    panel = write_panel(rng, folder / "panel.bed", dosages, variants, donors, missing=settings.missing)

    # The panel is ordered by id, the sequenced donors are any of them: positions in the one say nothing of the other.
    sequenced = np.sort(rng.choice(len(donors), settings.donors, replace=False))
    log_cis = np.zeros((len(donors), settings.genes))
    gene_of, variant_of = genes.index.get_indexer(cis["gene"]), variants.index.get_indexer(cis["variant"])
    np.add.at(log_cis.T, gene_of, (dosages[:, variant_of] * cis["effect"].to_numpy()).T)

    programs = Programs(rng, settings.genes, len(donors), settings.pools)
    size = {"cells": settings.cells, "panel_size": len(donors), "pools": settings.pools}
    cells = draw_cells(rng, sequenced, **size)
    files = []
    for pool, rows in cells.groupby("pool", sort=True):
        rates = programs.log_rates(rng, rows) + log_cis[rows["donor"]]
        files.append(write_pool(rng, folder / f"pool{pool + 1}.h5ad", rates, programs.dispersion, rows, donors, genes))
    per_donor = pd.Series(donors[cells["donor"]]).value_counts().sort_index()
    return SimulatedStudy(tuple(files), panel, cis, per_donor)


def place(rng: np.random.Generator, count: int, prefix: str) -> pd.DataFrame:
    """Scatter genes or variants over the chromosomes, in order of position."""
    table = pd.DataFrame(
        {
            "chrom": pd.Categorical(rng.choice(_CHROMOSOMES, count)),
            "pos": rng.choice(_CHROMOSOME_LENGTH, count, replace=False) + 1,
        }
    ).sort_values(["chrom", "pos"])
    table.index = pd.Index([f"{prefix}{number:05d}" for number in range(1, count + 1)])
    return table


def draw_dosages(rng: np.random.Generator, variants: pd.DataFrame, donors: int) -> NDArray[np.int8]:
    """Dosages of common variants, (donors, variants): two haplotypes a donor, near variants correlated (linkage).

    A haplotype carries the counted allele where a Gaussian walk along the chromosome lies below the quantile of the
    allele's frequency; the walk forgets itself over 100,000 base pairs.
    """
    frequency = rng.uniform(0.1, 0.5, len(variants))
    gaps = variants.groupby("chrom", observed=True)["pos"].diff().to_numpy()
    memory = np.where(np.isnan(gaps), 0.0, np.exp(-np.nan_to_num(gaps) / 100_000))
    steps = rng.standard_normal((2 * donors, len(variants)))
    walk = np.empty_like(steps)
    last = np.zeros(2 * donors)
    for variant, kept in enumerate(memory):
        last = kept * last + np.sqrt(1 - kept**2) * steps[:, variant]
        walk[:, variant] = last
    # Ranks instead of the normal quantile: the frequency in the panel is then the one drawn, whatever its size.
    ranks = (walk.argsort(axis=0).argsort(axis=0) + 0.5) / (2 * donors)
    return (ranks < frequency).reshape(donors, 2, -1).sum(axis=1).astype(np.int8)


def _plant_effects(
    rng: np.random.Generator, genes: pd.DataFrame, variants: pd.DataFrame, settings: StudySettings
) -> pd.DataFrame:
    """List every gene and variant in cis, and give some genes one variant that acts."""
    same = genes["chrom"].to_numpy()[:, None] == variants["chrom"].to_numpy()
    distance = np.abs(genes["pos"].to_numpy()[:, None] - variants["pos"].to_numpy())
    gene, variant = np.nonzero(same & (distance <= settings.window))
    effect = np.zeros(len(gene))
    with_cis = np.unique(gene)
    for target in rng.choice(with_cis, round(settings.planted * len(with_cis)), replace=False):
        pair = rng.choice(np.flatnonzero(gene == target))
        effect[pair] = rng.choice((-1, 1)) * rng.uniform(0.15, 0.6)
    return pd.DataFrame({"gene": genes.index[gene], "variant": variants.index[variant], "effect": effect})


class Programs:
    """What makes cells differ, other than cis genotypes: types, activation, pools, donors."""

    def __init__(self, rng: np.random.Generator, genes: int, donors: int, pools: int) -> None:
        types = len(CELL_TYPES)
        self.gene = rng.normal(0, 1.3, genes)
        self.cell_type = rng.uniform(0.8, 2.2, (types, genes)) * (rng.random((types, genes)) < 0.08)
        self.activation = rng.normal(0, 0.6, genes) * (rng.random(genes) < 0.15)
        self.pool = rng.normal(0, 0.1, (pools, genes))
        self.donor = rng.normal(0, 1, (donors, _DONOR_FACTORS))
        self.context = rng.uniform(0.2, 1, (types, _DONOR_FACTORS)) * (rng.random((types, _DONOR_FACTORS)) < 0.7)
        self.loading = rng.normal(0, 0.3, (_DONOR_FACTORS, genes)) * (rng.random((_DONOR_FACTORS, genes)) < 0.3)
        self.dispersion = rng.uniform(2, 10, genes)

    def log_rates(self, rng: np.random.Generator, rows: pd.DataFrame) -> NDArray[np.float64]:
        """Log rates of some cells, up to a constant of each cell, (cells, genes)."""
        kind, donor, pool = (rows[column].to_numpy() for column in ("type", "donor", "pool"))
        activation = rng.gamma(1.0, 1.0, len(rows))[:, None] * self.activation
        donor_effect = (self.context[kind] * self.donor[donor]) @ self.loading
        return self.gene + self.cell_type[kind] + activation + self.pool[pool] + donor_effect


def draw_cells(
    rng: np.random.Generator, donors: NDArray[np.int64], *, cells: int, panel_size: int, pools: int
) -> pd.DataFrame:
    """Donor, pool and type of each cell, as positions. Uneven: some donors have ten times the cells of others."""
    weight = rng.lognormal(0, 0.6, len(donors))
    donor = rng.choice(donors, cells, p=weight / weight.sum())
    donor[: len(donors)] = donors  # at least one cell each
    home = rng.permutation(panel_size) % pools
    # One donor in ten was sequenced in two pools, so that pools can be told from donors, and files share donors.
    twice = rng.random(panel_size) < 0.1
    moved = twice[donor] & (rng.random(cells) < 0.5)
    pool = (home[donor] + moved) % pools
    shares = rng.dirichlet(np.array(_TYPE_SHARES) * 20, panel_size)
    kind = (rng.random(cells)[:, None] > shares.cumsum(axis=1)[donor]).sum(axis=1).clip(max=len(CELL_TYPES) - 1)
    table = pd.DataFrame({"donor": donor, "pool": pool, "type": kind})
    return table.iloc[rng.permutation(cells)]


def write_pool(
    rng: np.random.Generator,
    path: Path,
    log_rates: NDArray[np.float64],
    dispersion: NDArray[np.float64],
    rows: pd.DataFrame,
    donors: NDArray[np.object_],
    genes: pd.DataFrame,
    **columns: Any,
) -> Path:
    """Draw the counts of one pool and write them as an AnnData file, with more columns of obs where given."""
    import anndata as ad
    from scipy.sparse import csr_matrix

    share = np.exp(log_rates - log_rates.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    mean = rng.lognormal(np.log(1_000), 0.4, (len(rows), 1)) * share
    counts = rng.poisson(mean * rng.gamma(dispersion, 1 / dispersion, mean.shape))
    obs = pd.DataFrame(
        {
            "donor_id": pd.Categorical(donors[rows["donor"]]),  # of this pool alone: codes differ between files
            "cell_type": pd.Categorical(np.array(CELL_TYPES)[rows["type"]]),
            "pool": pd.Categorical([path.stem] * len(rows)),
            **columns,
        },
        index=[f"{path.stem}-{number:05d}" for number in range(len(rows))],
    )
    ad.AnnData(csr_matrix(counts, dtype=np.float32), obs=obs, var=genes).write_h5ad(path)
    return path


def write_panel(
    rng: np.random.Generator,
    path: Path,
    dosages: NDArray[np.int8],
    variants: pd.DataFrame,
    donors: NDArray[np.object_],
    *,
    missing: float,
) -> Path:
    """Write the dosages as PLINK files, with some calls missing. The dosage counts allele 1 (bed-reader's default)."""
    from bed_reader import to_bed

    called = np.where(rng.random(dosages.shape) < missing, -127, dosages).astype(np.int8)  # -127: bed-reader's missing
    alleles = np.array([rng.permutation(list("ACGT"))[:2] for _ in range(len(variants))])
    to_bed(
        path,
        called,
        properties={
            "fid": ["0"] * len(donors),
            "iid": list(donors),
            "chromosome": list(variants["chrom"]),
            "sid": list(variants.index),
            "bp_position": list(variants["pos"]),
            "allele_1": list(alleles[:, 0]),
            "allele_2": list(alleles[:, 1]),
        },
    )
    return path
