"""What donorloader is measured against: annbatch alone, and the loops people write around it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anndata as ad
import numpy as np
import torch
import zarr
from annbatch import DatasetCollection, Loader

from benchmarks.data import DONOR_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    import pandas as pd

    from benchmarks.data import Data
    from benchmarks.measure import Batch

    #: Rows of the genotypes for some donor ids, as a tensor.
    type ReadRows = Callable[[np.ndarray], torch.Tensor]


def annbatch_alone(
    data: Data,
    *,
    cells: Path | None = None,
    shuffle: bool = True,
    to: Literal["torch"] | None = "torch",
    batch_size: int | None = None,
) -> Loader:
    """annbatch's own loader of the cells: X, and of `obs` only the donor column."""
    size = data.size
    loader = Loader(
        batch_size=batch_size or size.batch_size,
        chunk_size=size.chunk_size,
        preload_nchunks=size.chunks_per_window,
        shuffle=shuffle,
        to=to,
        preload_to_gpu=False,
        rng=np.random.default_rng(0) if shuffle else None,
    )
    return loader.use_collection(
        DatasetCollection(data.cells if cells is None else cells, mode="r"), load_adata=_x_and_donor
    )


def to_dense(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Make each batch's X dense the obvious way, with torch."""
    for batch in batches:
        yield {**batch, "X": batch["X"].to_dense()}


def to_array(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Make each batch's X (here scipy's CSR) dense the better-known fast way, with scipy."""
    for batch in batches:
        yield {**batch, "X": torch.from_numpy(batch["X"].toarray())}


def naive_loop(batches: Iterable[Batch], read_rows: ReadRows) -> Iterator[Batch]:
    """Take a batch, find its donors, read their rows: the loop one writes first."""
    for batch in batches:
        donors, donor_idx = np.unique(batch["obs"][DONOR_KEY], return_inverse=True)
        yield {
            **batch,
            "unique_donors": donors,
            "donor_idx": torch.from_numpy(donor_idx),
            "donor_features": read_rows(donors),
        }


def rows_in_memory(genotypes: ad.AnnData) -> ReadRows:
    """Index a tensor that holds all genotypes."""
    table = torch.from_numpy(genotypes.X)
    names = genotypes.obs_names
    return lambda donors: table[torch.from_numpy(names.get_indexer(donors))]


def rows_by_numpy(genotypes: ad.AnnData) -> ReadRows:
    """Index an array that holds all genotypes: what someone does who has measured torch's indexing of int8 rows."""
    table: np.ndarray = genotypes.X
    names = genotypes.obs_names
    return lambda donors: torch.from_numpy(table[names.get_indexer(donors)])


def rows_from_h5ad(data: Data) -> ReadRows:
    """Read from the .h5ad, opened backed."""
    genotypes = ad.read_h5ad(data.genotypes_h5ad, backed="r")
    return lambda donors: torch.from_numpy(genotypes[donors].X)


def rows_from_zarr(data: Data) -> ReadRows:
    """Read from the .zarr, the AnnData's X left on disk."""
    group = zarr.open_group(data.genotypes_zarr, mode="r")
    genotypes = ad.AnnData(X=group["X"], obs=_obs(group))
    return lambda donors: torch.from_numpy(np.asarray(genotypes[donors].X))


def rows_by_zarr(data: Data) -> ReadRows:
    """Read from the .zarr by zarr's own orthogonal indexing, which spares what AnnData does around it."""
    group = zarr.open_group(data.genotypes_zarr, mode="r")
    X: Any = group["X"]
    names = _obs(group).index
    return lambda donors: torch.from_numpy(X.oindex[names.get_indexer(donors)])


def _x_and_donor(group: zarr.Group) -> ad.AnnData:
    return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=_obs(group)[[DONOR_KEY]])


def _obs(group: zarr.Group) -> pd.DataFrame:
    return ad.io.read_elem(group["obs"])
