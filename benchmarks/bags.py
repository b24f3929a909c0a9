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
    """Dense bags against the loop that masks cells in memory; then bags that are padded, of even and of uneven sizes.

    Padded are sparse bags, as :func:`donorloader.pad_bags` then writes every cell where it belongs: both sides end in
    dense float32. (Dense bags of one size are padded by a view, which would cost nothing.) "Even" are bags cut at the
    mean size of a donor: half of them have just so many cells, the others a few percent less.
    """
    cells = _in_memory(data.grouped)
    mean = data.size.cells // data.size.donors
    even = f"bags of at most {mean} cells, 3,000 variants, dense float32"
    padded = f"bags of at most {mean} cells, padded"
    padded_later = f"bags of at most {mean} cells, made dense and then padded"
    uneven = "bags of all cells of a donor, padded"
    with (
        _bags(data, data.grouped, densify=True) as loader,
        _bags(data, data.grouped) as sparse,
        _bags(data, data.grouped, densify=True, max_cells=mean) as of_one_size,
        _bags(data, data.grouped, max_cells=mean) as sparse_of_one_size,
    ):
        speeds = alternate(
            [
                Stream(DENSE, lambda: loader),
                Stream(MASK, lambda: _masked(cells), only_batches=100, at_most_rounds=3),
                Stream(even, lambda: of_one_size),
                Stream(padded, lambda: _padded(sparse_of_one_size)),
                Stream(padded_later, lambda: _padded(of_one_size)),
                Stream(uneven, lambda: _padded(sparse)),
            ],
            rounds,
        )
    yield compare("dense_bags", speeds, DENSE, MASK, bar=5.0)
    yield compare("dense_bags", speeds, padded, even, bar=0.7)
    yield compare("dense_bags", speeds, padded_later, even)
    yield compare("dense_bags", speeds, uneven, DENSE)


def _bags(data: Data, cells: Path, **options: Any) -> dl.BagLoader:
    return dl.BagLoader(
        cells,
        data.genotypes_rows,
        donor_key=DONOR_KEY,
        variants=VARIANTS,
        bags_per_batch=8,
        seed=0,
        **{"max_cells": None, **options},
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
