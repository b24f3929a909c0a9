"""Data that says where it came from: every value of X encodes its row and gene, every genotype its donor and variant.

A wrong join, row order, chunk or category order then shows as a wrong number, never as a plausible one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import torch
import zarr
from annbatch import DatasetCollection, write_sharded
from scipy import sparse

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

N_GENES = 11
N_DONORS = 13
N_VARIANTS = 24
#: Cells per dataset: even, uneven, one of a single cell. All end in a partial batch for most batch sizes.
SIZES = {1: (157,), 3: (61, 7, 113), 4: (40, 93, 1, 59)}
CELL_TYPES = ("T", "B", "NK", "mono")


@dataclass(frozen=True)
class Cells:
    """Cells on disk, and what the naive join knows about them."""

    path: Path
    sizes: tuple[int, ...]
    x: np.ndarray
    obs: pd.DataFrame
    adatas: list[ad.AnnData] = field(repr=False)

    @property
    def n_obs(self) -> int:
        return len(self.x)

    @property
    def donor(self) -> np.ndarray:
        """Donor id of every row, as text."""
        return np.array([str(v) for v in self.obs["donor_id"]], dtype=object)

    def rows(self, query: str | None = None, donors: Iterable[str] | None = None) -> np.ndarray:
        """Rows of the collection that a filter leaves."""
        keep = np.ones(self.n_obs, dtype=bool)
        if query is not None:
            keep &= np.isin(np.arange(self.n_obs), self.obs.reset_index(drop=True).query(query).index)
        if donors is not None:
            keep &= np.isin(self.donor, list(donors))
        return np.flatnonzero(keep)


@dataclass(frozen=True)
class Genotypes:
    """Genotypes as a loader takes them (`source`), and their values."""

    source: Any
    ids: np.ndarray
    values: np.ndarray
    variants: np.ndarray

    def rows(self, ids: Iterable[str], columns: Any = slice(None)) -> np.ndarray:
        """Rows of the donors, as a person would look them up; NaN for a donor without genotypes."""
        where = {donor: row for row, donor in enumerate(self.ids)}
        values = self.values[:, columns]
        absent = np.full(values.shape[1], np.nan, dtype=np.float32)
        return np.stack([values[where[i]] if i in where else absent for i in ids])


def x_values(n_obs: int, *, start: int = 0) -> np.ndarray:
    """Float32 counts: row * N_GENES + gene + 1 where present, 0 elsewhere; every 17th row is empty."""
    row, gene = np.mgrid[start : start + n_obs, :N_GENES]
    present = ((row * 5 + gene * 3) % 4 < 2) & (row % 17 != 3)
    return np.where(present, row * N_GENES + gene + 1, 0).astype(np.float32)


def genotype_values(n_donors: int, n_variants: int, dtype: str, *, sparse_like: bool = False) -> np.ndarray:
    """Donor and variant of each value: both in one number where the type holds it, else in turns, donor first."""
    donor, variant = np.mgrid[:n_donors, :n_variants]
    if np.dtype(dtype).itemsize == 1:
        values = np.where(variant % 2 == 0, donor + 1, variant + 1)
    else:
        values = donor * n_variants + variant + 1
    if sparse_like:
        values = np.where((donor + variant) % 4 == 3, 0, values)
    return values.astype(dtype)


def donor_ids(n: int = N_DONORS) -> np.ndarray:
    """Ids whose order as text is not their order as numbers: d0, d1, d10, …"""
    return np.array([f"d{i}" for i in range(n)], dtype=object)


def cell_table(sizes: tuple[int, ...], ids: np.ndarray, seed: int = 1) -> pd.DataFrame:
    """Obs of all rows, before it is cut into datasets."""
    n = sum(sizes)
    rng = np.random.default_rng(seed)
    dataset = np.repeat(np.arange(len(sizes)), sizes)
    # each dataset misses some donors, and the last donor is in one dataset only
    donor = rng.integers(0, len(ids) - 1, n)
    donor = np.where((donor + dataset) % 5 == 0, (donor + 1) % (len(ids) - 1), donor)
    donor[-4:-1] = len(ids) - 1
    return pd.DataFrame(
        {
            "donor_id": np.asarray(ids, dtype=object)[donor],
            "cell_type": np.array(CELL_TYPES, dtype=object)[rng.integers(0, len(CELL_TYPES), n)],
            "run": np.array(["r0", "r1", "r2"], dtype=object)[np.minimum(np.arange(n) // 20, n // 20 - 1) % 3],
            "row": np.arange(n),
        },
        index=[f"cell{i}" for i in range(n)],
    )


def datasets(
    sizes: tuple[int, ...], *, layout: str = "csr", ids: np.ndarray | None = None, categorical: bool = True
) -> list[ad.AnnData]:
    """One AnnData per dataset; categories differ by dataset, in set and in order."""
    ids = donor_ids() if ids is None else ids
    table = cell_table(sizes, ids)
    values = x_values(sum(sizes))
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    out = []
    for k, (start, stop) in enumerate(itertools.pairwise(bounds)):
        obs = table.iloc[start:stop].copy()
        if categorical:
            # donors: only those of the dataset; cell types: all, used or not. Turned, so that no two datasets agree
            for column, levels in (("donor_id", sorted(set(obs["donor_id"]), key=str)), ("cell_type", CELL_TYPES)):
                turned = [*levels[k:], *levels[:k]]
                obs[column] = pd.Categorical(obs[column], categories=turned[::-1] if k % 2 else turned)
        x = values[start:stop]
        out.append(
            ad.AnnData(
                X=sparse.csr_matrix(x) if layout == "csr" else x.copy(),
                obs=obs,
                var=pd.DataFrame(index=[f"gene{g}" for g in range(N_GENES)]),
            )
        )
    return out


def write_collection(path: Path, adatas: list[ad.AnnData], *, rows_per_chunk: int = 16) -> Path:
    """Write an annbatch collection in the order given, one dataset per AnnData."""
    group = zarr.open_group(str(path), mode="w", zarr_format=3)
    with ad.settings.override(remove_unused_categories=False):
        for k, adata in enumerate(adatas):
            write_sharded(
                group,
                adata,
                n_obs_per_chunk=min(rows_per_chunk, adata.n_obs),
                shard_size=4 * rows_per_chunk,
                key=f"dataset_{k}",
            )
    group.update_attributes({"encoding-type": "annbatch-preshuffled", "encoding-version": "0.1.0"})
    return path


def make_cells(
    path: Path,
    sizes: tuple[int, ...],
    *,
    layout: str = "csr",
    ids: np.ndarray | None = None,
    categorical: bool = True,
) -> Cells:
    """Write a collection, and say what is in it."""
    adatas = datasets(sizes, layout=layout, ids=ids, categorical=categorical)
    write_collection(path, adatas)
    obs = cell_table(sizes, donor_ids() if ids is None else ids)
    return Cells(path=path, sizes=sizes, x=x_values(sum(sizes)), obs=obs, adatas=adatas)


def genotype_adata(
    ids: np.ndarray, dtype: str = "int8", *, csr: bool = False, n_variants: int = N_VARIANTS
) -> tuple[ad.AnnData, np.ndarray, np.ndarray]:
    """Genotypes in another order than the cells' donors, with two donors that have no cells."""
    order = [*reversed(list(ids)), "without_cells_1"]
    order.insert(3, "without_cells_0")
    values = genotype_values(len(order), n_variants, dtype, sparse_like=csr)
    variants = np.array([f"rs{v}" for v in range(n_variants)], dtype=object)
    adata = ad.AnnData(
        X=sparse.csr_matrix(values) if csr else values,
        obs=pd.DataFrame(index=pd.Index([str(i) for i in order])),
        var=pd.DataFrame({"pos": np.arange(n_variants) * 10}, index=pd.Index(variants)),
    )
    return adata, np.array([str(i) for i in order], dtype=object), values


def make_genotypes(path: Path, *, dtype: str = "int8", csr: bool = False, backing: str = "memory") -> Genotypes:
    """Genotypes of one type and backing: memory, h5ad, backed (an open h5ad), zarr, collection."""
    adata, ids, values = genotype_adata(donor_ids(), dtype, csr=csr)
    source: Any = adata
    if backing in ("h5ad", "backed"):
        source = path.with_suffix(".h5ad")
        adata.write_h5ad(source)
        if backing == "backed":
            source = ad.read_h5ad(source, backed="r")
    elif backing == "zarr":
        source = path.with_suffix(".zarr")
        adata.write_zarr(source) if csr else adata.write_zarr(source, chunks=(4, 7))
    elif backing == "collection":
        source = write_collection(path.with_suffix(".zarr"), [adata[:6].copy(), adata[6:].copy()], rows_per_chunk=3)
    return Genotypes(source=source, ids=ids, values=values, variants=np.array(adata.var_names, dtype=object))


class Store:
    """Makes each piece of test data once per session."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[tuple[Any, ...], Any] = {}

    def cells(self, n_datasets: int = 3, layout: str = "csr") -> Cells:
        key = ("cells", n_datasets, layout)
        if key not in self._made:
            self._made[key] = make_cells(
                self.root / f"cells_{n_datasets}_{layout}.zarr", SIZES[n_datasets], layout=layout
            )
        return self._made[key]

    def genotypes(self, dtype: str = "int8", *, csr: bool = False, backing: str = "memory") -> Genotypes:
        key = ("genotypes", dtype, csr, backing)
        if key not in self._made:
            name = f"genotypes_{dtype}_{'csr' if csr else 'dense'}_{backing}"
            self._made[key] = make_genotypes(self.root / name, dtype=dtype, csr=csr, backing=backing)
        return self._made[key]


def as_numpy(value: Any) -> np.ndarray:
    """Array of a tensor, sparse or not, or of a matrix."""
    if sparse.issparse(value):
        return value.toarray()
    if isinstance(value, np.ndarray):
        return value
    return (value if value.layout == torch.strided else value.to_dense()).cpu().numpy()


def open_collection(path: Path) -> DatasetCollection:
    return DatasetCollection(str(path), mode="r")
