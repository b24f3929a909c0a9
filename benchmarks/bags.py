"""Rows about bags: what it costs to read donor by donor, to make bags dense, to pad them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import annbatch
import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch

import donorloader as dl
from benchmarks import baselines
from benchmarks.cells import VARIANTS
from benchmarks.data import DONOR_KEY
from benchmarks.measure import Result, Stream, alternate, compare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.data import Data
    from benchmarks.measure import Batch

BAGS = "bags of all cells of a donor, 3,000 variants, from the grouped collection"
SEQUENTIAL = "annbatch's sequential stream of that collection"
DENSE = "bags, 3,000 variants, dense float32"
MASK = "a boolean mask per donor over CSR in memory, as cellink's MILDataset"


def bags(data: Data, rounds: int) -> Iterator[Result]:
    """Bags against annbatch's sequential stream of the same collection; then from the one that is not grouped."""
    stream = baselines.annbatch_alone(data, cells=data.grouped, shuffle=False)
    ungrouped = "the same, from a collection that is not grouped"
    with _bags(data, data.grouped) as loader, _bags(data, data.cells) as scattered:
        speeds = alternate(
            [
                Stream(BAGS, lambda: loader),
                Stream(SEQUENTIAL, lambda: stream),
                Stream(ungrouped, lambda: scattered, only_batches=12, at_most_rounds=3),
            ],
            rounds,
        )
    yield compare("bags", speeds, BAGS, SEQUENTIAL, bar=0.85)
    yield compare("bags", speeds, BAGS, ungrouped)


def dense_bags(data: Data, rounds: int) -> Iterator[Result]:
    """Dense bags against the loop that masks cells in memory; then what padding adds, at even and at uneven sizes."""
    cells = _in_memory(data.grouped)
    even, padded = "bags of 128 cells, dense float32", "bags of 128 cells, padded"
    uneven = "bags of all cells of a donor, padded"
    with (
        _bags(data, data.grouped, densify=True) as loader,
        _bags(data, data.grouped, densify=True, exact_cells=128) as of_one_size,
    ):
        speeds = alternate(
            [
                Stream(DENSE, lambda: loader),
                Stream(MASK, lambda: _masked(cells), only_batches=100, at_most_rounds=3),
                Stream(even, lambda: of_one_size),
                Stream(padded, lambda: _padded(of_one_size)),
                Stream(uneven, lambda: _padded(loader)),
            ],
            rounds,
        )
    yield compare("dense_bags", speeds, DENSE, MASK, bar=5.0)
    yield compare("dense_bags", speeds, padded, even, bar=0.7)
    yield compare("dense_bags", speeds, uneven, DENSE)


def _bags(data: Data, cells: Path, **options: Any) -> dl.BagLoader:
    limits = {} if "exact_cells" in options else {"max_cells": None}
    return dl.BagLoader(
        cells,
        data.genotypes_rows,
        donor_key=DONOR_KEY,
        variants=VARIANTS,
        bags_per_batch=8,
        seed=0,
        **limits,
        **options,
    )


def _in_memory(path: Path) -> ad.AnnData:
    parts = [ad.io.read_elem(group) for group in annbatch.DatasetCollection(path, mode="r")]
    cells = parts[0] if len(parts) == 1 else ad.concat(parts)
    # annbatch stores column numbers in as few bytes as can be; scipy has them in four
    cells.X = sp.csr_matrix((cells.X.data, cells.X.indices.astype(np.int32), cells.X.indptr), shape=cells.shape)
    return cells


def _masked(cells: ad.AnnData) -> Iterator[Batch]:
    """Each donor's cells by a mask over all, dense: what ``__getitem__`` of cellink's MILDataset does to get a bag.

    https://github.com/theislab/cellink, src/cellink/ml/dataset.py
    """
    for donor in cells.obs[DONOR_KEY].unique():
        mask = cells.obs[DONOR_KEY].to_numpy() == donor
        yield {"X": torch.tensor(cells.X[mask].toarray(), dtype=torch.float32)}


def _padded(batches: dl.BagLoader) -> Iterator[Batch]:
    for batch in batches:
        x, mask = dl.pad_bags(batch)
        yield {"X": batch["X"], "padded": x, "mask": mask}
