"""The row about LIVI: its whole dense batches, and the presence of variants alone, against what is done elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import torch
from annbatch import DatasetCollection, Loader

import donorloader as dl
from benchmarks import ours
from benchmarks.cells import VARIANTS
from benchmarks.data import DONOR_KEY
from benchmarks.measure import Result, Stream, alternate, compare
from donorloader._buffers import BufferPool
from donorloader.integrations._presence import presence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.data import Data
    from benchmarks.measure import Batch

COVARIATES = ("cell_type", "run")
STREAM = "LIVI's batches: dense counts, presence of 3,000 variants, two covariates"
NAIVE = "annbatch's batch, torch's to_dense() and sum, a float32 table indexed by donor"
GATHER = "presence of 3,000 variants per cell, from int8 rows"
INDEXED = "a float32 table indexed by donor in torch"


def livi(data: Data, rounds: int) -> Iterator[Result]:
    """Whole batches end to end; then the genotype part alone, as many times as a pass has batches."""
    collection = DatasetCollection(data.cells, mode="r")
    obs = collection.obs(columns=[DONOR_KEY, "cell_type"])
    genotypes = data.genotypes()[:, VARIANTS].to_memory()
    donors = obs[DONOR_KEY].cat.categories
    table = genotypes[donors].X
    gt = torch.from_numpy((table > 0).astype(np.float32))
    # the collection has one covariate: it counts twice
    codes = {name: torch.tensor(obs["cell_type"].cat.codes.to_numpy(dtype=np.int64)) for name in COVARIATES}
    donor_of_cell = torch.tensor(obs[DONOR_KEY].cat.codes.to_numpy(dtype=np.int64))
    known = pd.DataFrame(np.eye(genotypes.n_vars, 20, dtype=np.int8), index=genotypes.var_names)
    known.columns = [f"gene-{i}" for i in range(20)]
    naive = Loader(
        batch_size=data.size.batch_size,
        chunk_size=data.size.chunk_size,
        preload_nchunks=data.size.chunks_per_window,
        shuffle=True,
        to="torch",
        preload_to_gpu=False,
        return_index=True,
        rng=np.random.default_rng(0),
    ).use_collection(collection, load_adata=lambda group: ad.AnnData(X=ad.io.sparse_dataset(group["X"])))

    def elsewhere() -> Iterator[Batch]:
        for batch in naive:
            x, rows = batch["X"].to_dense(), torch.as_tensor(batch["index"], dtype=torch.int64)
            yield {
                "X": x,
                "y": donor_of_cell[rows],
                "size_factor": x.sum(dim=1, keepdim=True),
                "covariates": [codes[name][rows] for name in COVARIATES],
                "GT_cells": gt[donor_of_cell[rows]],
            }

    with ours.joined(data, data.genotypes_rows, variants=VARIANTS) as loader:
        batches = dl.LIVIBatches(loader, covariates=["cell_type"], known_cis=known)
        batches._convert._covariates *= len(COVARIATES)

        def here() -> Iterator[Batch]:
            for batch in batches:
                yield {**batch, "X": batch["x"]}

        speeds = alternate(
            [
                Stream(STREAM, here),
                Stream(NAIVE, elsewhere, only_batches=data.size.batches_of(windows=4), at_most_rounds=3),
            ],
            rounds,
        )
    yield compare("livi", speeds, STREAM, NAIVE, bar=5.0)

    rows = donor_of_cell.split(data.size.batch_size)
    pool, absent = BufferPool(), np.zeros(gt.shape[1], dtype=np.float32)
    speeds = alternate(
        [
            Stream(GATHER, lambda: ({"X": presence(table, part.numpy(), absent, pool)} for part in rows)),
            Stream(INDEXED, lambda: ({"X": gt[part]} for part in rows)),
        ],
        rounds,
    )
    yield compare("livi", speeds, GATHER, INDEXED, bar=3.0)
