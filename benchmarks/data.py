"""The data the benchmarks stream: generated once, kept in a cache folder, the same for the same sizes."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr

import donorloader as dl
from donorloader.genotypes._write import write_genotypes

if TYPE_CHECKING:
    from collections.abc import Callable

#: Raised whenever the generator changes, so that older files in the cache are not taken for new ones.
VERSION = 1

DONOR_KEY = "donor_id"


@dataclass(frozen=True)
class Size:
    """How much data there is, and how a loader walks over it.

    A window is what annbatch loads at once: ``chunk_size`` x ``chunks_per_window`` cells. The quick size has half
    the cells and half the window, so a pass is as many windows long as at full size.
    """

    name: str
    cells: int
    chunks_per_window: int
    genes: int = 20_000
    counts_per_cell: int = 1_170  # gives about 800 non-zeros a cell
    donors: int = 1_000
    variants: int = 100_000
    batch_size: int = 1_024
    chunk_size: int = 64
    cells_per_dataset: int = 50_000

    def batches_of(self, windows: int) -> int:
        """Batches in so many windows: where a stream is too slow for a whole pass, a fair part of one."""
        return windows * self.chunk_size * self.chunks_per_window // self.batch_size


QUICK = Size("quick", cells=100_000, chunks_per_window=128)
FULL = Size("full", cells=200_000, chunks_per_window=256)
SIZES = {size.name: size for size in (QUICK, FULL)}


@dataclass(frozen=True)
class Data:
    """The paths of one generated data set; the genotypes are the same table in each of their files."""

    size: Size
    cells: Path  #: annbatch collection, several datasets, float32 counts as CSR
    grouped: Path  #: the same cells in one dataset, grouped by donor, in chunks of 32, as `bags.zarr` of our studies is
    genotypes_h5ad: Path  #: as `AnnData.write_h5ad` writes it
    genotypes_zarr: Path  #: as `AnnData.write_zarr` writes it
    genotypes_rows: Path  #: packed at two bits, by donor, as donorloader's own studies are

    def genotypes(self) -> ad.AnnData:
        """Read the genotypes into memory."""
        return ad.read_h5ad(self.genotypes_h5ad)


def cache_folder() -> Path:
    """Folder of generated data: ``$DONORLOADER_BENCH_DIR``, or ``.cache`` beside this file."""
    return Path(os.environ.get("DONORLOADER_BENCH_DIR") or Path(__file__).parent / ".cache")


def prepare(size: Size) -> Data:
    """Generate what the cache lacks, and say where it all is."""
    folder = cache_folder()
    cells = f"cells-v{VERSION}-{size.cells}x{size.genes}-{size.donors}donors.zarr"
    table = f"genotypes-v{VERSION}-{size.donors}x{size.variants}"
    return Data(
        size=size,
        cells=cached(folder / cells, lambda path: write_cells(path, size)),
        grouped=cached(folder / f"by-donor-{cells}", lambda path: write_cells(path, size, grouped=True)),
        genotypes_h5ad=cached(folder / f"{table}.h5ad", lambda path: make_genotypes(size).write_h5ad(path)),
        genotypes_zarr=cached(folder / f"{table}.zarr", lambda path: make_genotypes(size).write_zarr(path)),
        genotypes_rows=cached(
            folder / f"{table}-packed.zarr", lambda path: write_donor_rows(path, make_genotypes(size))
        ),
    )


def donor_ids(n_donors: int) -> np.ndarray:
    """``donor-0000``, ``donor-0001``, ..."""
    return np.array([f"donor-{i:04d}" for i in range(n_donors)], dtype=object)


def make_cells(n_cells: int, size: Size, rng: np.random.Generator) -> ad.AnnData:
    """Draw cells: each one's counts are multinomial over genes of very uneven expression, its donor uniform."""
    expression = rng.permutation(1 / (np.arange(size.genes) + 10.0))
    # A table of gene numbers, each as often as it is expressed, turns a weighted draw into a look-up.
    table = np.repeat(
        np.arange(size.genes, dtype=np.int32), np.ceil(expression / expression.sum() * 2**20).astype(np.int64)
    )
    genes = table[rng.integers(0, len(table), n_cells * size.counts_per_cell)]
    start = np.arange(n_cells + 1, dtype=np.int64) * size.counts_per_cell
    X = sp.csr_matrix((np.ones(len(genes), dtype=np.float32), genes, start), shape=(n_cells, size.genes))
    X.sum_duplicates()

    obs = pd.DataFrame(
        {
            DONOR_KEY: pd.Categorical.from_codes(
                rng.integers(0, size.donors, n_cells), categories=donor_ids(size.donors)
            ),
            "cell_type": pd.Categorical.from_codes(
                rng.integers(0, 12, n_cells), categories=[f"type-{i}" for i in range(12)]
            ),
            "counts": np.asarray(X.sum(axis=1)).ravel(),
        },
        index=[f"cell-{i}" for i in range(n_cells)],
    )
    return ad.AnnData(X=X, obs=obs, var=pd.DataFrame(index=[f"gene-{i}" for i in range(size.genes)]))


def write_cells(path: Path, size: Size, *, grouped: bool = False) -> None:
    """Write an annbatch collection of ``ceil(cells / cells_per_dataset)`` datasets, block by block.

    Grouped, the same cells are sorted by donor into one dataset, in chunks of 32 cells.
    """
    group = zarr.open_group(path, mode="w", zarr_format=3)
    blocks = []
    for i, first in enumerate(range(0, size.cells, size.cells_per_dataset)):
        block = make_cells(min(size.cells_per_dataset, size.cells - first), size, np.random.default_rng([VERSION, i]))
        if grouped:
            blocks.append(block)
            continue
        annbatch.write_sharded(group, block, n_obs_per_chunk=size.chunk_size, key=f"dataset_{i}")
    if grouped:
        cells = ad.concat(blocks, index_unique="-", merge="same", keys=range(len(blocks)))
        order = np.argsort(cells.obs[DONOR_KEY].cat.codes, kind="stable")
        annbatch.write_sharded(group, cells[order].copy(), n_obs_per_chunk=32, key="dataset_0")
    # The cells are drawn in random order, so this is the collection `DatasetCollection.add_adatas` would have
    # made of them; these two attributes are how it marks one.
    group.attrs.update({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    if annbatch.DatasetCollection(group, mode="r").is_empty:
        raise RuntimeError(f"annbatch does not recognise the collection written to {path}: has its format changed?")


def make_genotypes(size: Size) -> ad.AnnData:
    """Draw dosages of 0, 1 and 2 at allele frequencies between 5 and 95%."""
    rng = np.random.default_rng([VERSION, 0])
    frequency = rng.uniform(0.05, 0.95, size.variants).astype(np.float32)
    dosage = np.zeros((size.donors, size.variants), dtype=np.int8)
    for _ in range(2):
        dosage += rng.random(dosage.shape, dtype=np.float32) < frequency
    # Another order than the cells' categories: a row taken by position instead of by id would show.
    order = rng.permutation(size.donors)
    var = pd.DataFrame(
        {
            "chrom": np.where(np.arange(size.variants) < size.variants // 2, "1", "2"),
            "pos": np.arange(size.variants) * 100 + 1,
            "a0": "A",
            "a1": "G",
        },
        index=[f"rs{i}" for i in range(size.variants)],
    )
    return ad.AnnData(X=dosage, obs=pd.DataFrame(index=donor_ids(size.donors)[order]), var=var)


def write_donor_rows(path: Path, genotypes: ad.AnnData) -> None:
    """Write genotypes as donorloader's studies hold them: packed at two bits, in chunks of whole donor rows."""
    write_genotypes(dl.open_genotypes(genotypes), path, memory=2**30)


def use_zarrs() -> None:
    """Select the zarrs pipeline for all that is opened afterwards: donorloader does so itself, annbatch does not."""
    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def cached(path: Path, write: Callable[[Path], None]) -> Path:
    """Write `path` unless it is there; a run cut short leaves nothing that looks finished."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"generating {path.name} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder) / path.name
        write(unfinished)
        shutil.move(unfinished, path)
    return path
