"""Open whatever a user has as cells: collection, AnnData store, AnnData in memory, DonorData."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from donorloader._zarr import local_pipeline, open_group

from ._source import CellSource, Dataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["is_donor_data", "is_stored_donor_data", "open_cells"]


def is_donor_data(source: Any) -> bool:
    """Whether an object looks like cellink's ``DonorData``: it has `G`, `C` and `donor_id`."""
    return all(hasattr(source, name) for name in ("G", "C", "donor_id"))


def is_stored_donor_data(path: str | Path) -> bool:
    """Whether a path is that of a DonorData in zarr, whatever its name."""
    try:
        return bool(zarr.open_group(str(path), mode="r").attrs.get("encoding-type") == "donordata")
    except (OSError, ValueError):  # not a zarr group; opening it as cells says what it lacks
        return False


def open_cells(cells: Any) -> CellSource:
    """Open cells for streaming.

    Parameters
    ----------
    cells
        Path of an annbatch collection, of an AnnData ``.zarr`` or of a DonorData ``.dd.zarr``; a
        :class:`annbatch.DatasetCollection`; an :class:`anndata.AnnData` or a list of these; a DonorData.

    Raises
    ------
    FileNotFoundError
        If a path holds no zarr store.
    ValueError, TypeError
        If the store or object is not of cells, is empty, or has a matrix that annbatch does not read.
    """
    if isinstance(cells, str | Path):
        return _open_path(str(cells))
    if isinstance(cells, DatasetCollection):
        return _open_collection(cells, "the collection")
    if isinstance(cells, ad.AnnData):
        return CellSource([_from_anndata(cells, "the AnnData")])
    if is_donor_data(cells):
        return CellSource([_from_anndata(cells.C, "C of the DonorData")], donor_key=cells.donor_id)
    if isinstance(cells, list | tuple) and cells and all(isinstance(a, ad.AnnData) for a in cells):
        return CellSource([_from_anndata(a, f"AnnData {i}") for i, a in enumerate(cells)])
    raise TypeError(
        "cells must be a path, a DatasetCollection, an AnnData, a non-empty list of AnnData or a DonorData, "
        f"got {type(cells).__name__}."
    )


def _open_path(path: str) -> CellSource:
    if path.endswith((".h5ad", ".h5")):
        raise ValueError(
            f"Cells are streamed from zarr, but {path!r} is an HDF5 file. Run `donorloader prepare {path} --out study` "
            "once and load the study, or pass anndata.read_h5ad(path) if it fits into memory."
        )
    group = open_group(path)
    kind = group.attrs.get("encoding-type")
    if kind == "annbatch-preshuffled":
        return _open_collection(DatasetCollection(group), repr(path))
    if kind == "anndata":
        return CellSource([_from_group(group, repr(path))])
    if kind == "donordata":
        cells = group["C"]
        if not isinstance(cells, zarr.Group):
            raise ValueError(f"{path!r} says that it is a DonorData, but its C is not an AnnData.")
        return CellSource(
            [_from_group(cells, f"C of {path!r}")], donor_key=str(group.attrs.get("donor_id", "donor_id"))
        )
    raise ValueError(
        f"{path!r} is a zarr group, but neither an annbatch collection nor an AnnData nor a DonorData (its "
        f"encoding-type is {kind!r}). A `prepare` or an annbatch write that was stopped half-way leaves such a group: "
        "write it again."
    )


def _open_collection(collection: DatasetCollection, name: str) -> CellSource:
    if collection.is_empty:
        raise ValueError(f"A collection needs at least one dataset, but {name} is empty. Add cells to it first.")
    return CellSource([_from_group(group, f"{group.basename} of {name}") for group in collection])


def _from_group(group: Any, name: str) -> Dataset:
    if missing := [key for key in ("X", "obs", "var") if key not in group]:
        raise ValueError(f"An AnnData store has X, obs and var, but {name} lacks {', '.join(missing)}.")
    obs, var = group["obs"], group["var"]
    with local_pipeline(group):
        X: Any = group["X"]
        kind = X.attrs.get("encoding-type")
        if kind == "csr_matrix":
            X = ad.io.sparse_dataset(X)
        elif not isinstance(X, zarr.Array):
            raise ValueError(f"X must be dense or CSR to be streamed, but X of {name} is {kind!r}. Prepare it again.")

    def read_obs(column: str) -> Any:
        return ad.io.read_elem(obs[column])

    index = obs[obs.attrs["_index"]]
    return Dataset(
        name=name,
        X=X,
        read_obs=read_obs,
        columns=tuple(str(c) for c in obs.attrs.get("column-order", ())),
        n_obs=(index if isinstance(index, zarr.Array) else index["values"]).shape[0],  # a group: nullable strings
        var_names=_names(ad.io.read_elem(var[var.attrs["_index"]])),
        read_var=lambda: ad.io.read_elem(var),
        nodes=(group,),
    )


def _from_anndata(adata: ad.AnnData, name: str) -> Dataset:
    if adata.isbacked:
        raise ValueError(
            f"{name} is backed by an HDF5 file, which cannot be streamed: run `donorloader prepare` on the file once, "
            "or load it with .to_memory()."
        )
    X = adata.X
    if isinstance(X, sp.csc_matrix | sp.csc_array):
        raise ValueError(f"X must be dense or CSR to be read by cells, but X of {name} is CSC: use X.tocsr().")
    if not isinstance(X, np.ndarray | sp.csr_matrix | sp.csr_array | zarr.Array | ad.abc.CSRDataset):
        raise TypeError(f"X must be dense or CSR, but X of {name} is {type(X).__name__}.")
    X = np.asarray(X) if isinstance(X, np.ndarray) else X
    backed = getattr(X, "group", X if isinstance(X, zarr.Array) else None)
    return Dataset(
        name=name,
        X=X,
        read_obs=lambda column: adata.obs[column],
        columns=tuple(adata.obs.columns),
        n_obs=adata.n_obs,
        var_names=_names(adata.var_names),
        read_var=lambda: adata.var,
        nodes=() if backed is None else (backed,),
    )


def _names(values: Any) -> NDArray[np.object_]:
    return np.asarray(pd.Index(values).astype(str), dtype=object)
