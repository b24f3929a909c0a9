"""Cells as users have them: AnnData or DonorData, in files or in memory, opened read-only and read by rows."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr

from donorloader._ids import shorten
from donorloader._zarr import open_group

from ._open import is_donor_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

__all__ = ["RawCells", "RawMatrix", "open_raw_cells", "open_stored"]

Layout = Literal["csr", "csc", "dense"]

_SPARSE: dict[Any, Layout] = {"csr_matrix": "csr", "csc_matrix": "csc"}


class RawMatrix:
    """Cells × genes, left where it is until rows are asked for.

    Parameters
    ----------
    open_node
        Opens the matrix: an HDF5 or zarr node, or the matrix itself where it is in memory. HDF5 files are opened for
        each read and closed after it, so that none stays open.
    name
        For messages.

    Attributes
    ----------
    shape
        (n_cells, n_genes)
    dtype
        Type of the values.
    layout
        `"csr"`, `"csc"` or `"dense"`.
    nnz
        Number of stored values; of a dense matrix, all.
    """

    def __init__(self, open_node: Callable[[], AbstractContextManager[Any]], name: str) -> None:
        self._open_node = open_node
        self.name = name
        self._indptr: NDArray[np.integer[Any]] | None = None
        node: Any
        with open_node() as node:
            self.layout = _layout(node, name)
            values = node if self.layout == "dense" else _parts(node)[0]
            shape: Any = node.attrs["shape"] if isinstance(node, h5py.Group | zarr.Group) else node.shape
            self.shape = (int(shape[0]), int(shape[1]))
            self.dtype = np.dtype(values.dtype)
            self.nnz = int(values.shape[0]) if self.layout != "dense" else self.shape[0] * self.shape[1]
        if self.dtype.kind not in "iuf":
            raise ValueError(f"X must hold numbers, but {name} holds {self.dtype}.")

    def rows(self, start: int, stop: int) -> sp.csr_matrix | NDArray[Any]:
        """Rows `start` to `stop`, as CSR or as a dense array. Columns in CSR need not be in order."""
        with self._open_node() as node:
            if self.layout == "dense":
                block = node[start:stop]
                return np.asarray(block.compute() if hasattr(block, "compute") else block)
            if not isinstance(node, h5py.Group | zarr.Group):
                return sp.csr_matrix(node[start:stop])
            data, indices, indptr = _parts(node)
            if self._indptr is None:
                self._indptr = np.asarray(indptr[:])
            bounds = self._indptr[start : stop + 1]
            first, last = int(bounds[0]), int(bounds[-1])
            genes = indices[first:last]
            if genes.size and not (genes.min() >= 0 and genes.max() < self.shape[1]):
                raise ValueError(
                    f"X of {self.name} is damaged: cells {start:,} to {stop:,} have values outside its "
                    f"{self.shape[1]:,} genes. Write the file again."
                )
            return sp.csr_matrix((data[first:last], genes, bounds - first), shape=(stop - start, self.shape[1]))

    def to_csr(self) -> RawMatrix:
        """The same in CSR, in memory."""
        with self._open_node() as node:
            matrix = ad.io.read_elem(node) if isinstance(node, h5py.Group | zarr.Group) else node[:]
        csr = sp.csr_matrix(matrix)
        return RawMatrix(lambda: contextlib.nullcontext(csr), self.name)


@dataclass
class RawCells:
    """One AnnData of cells.

    Attributes
    ----------
    name
        Path, or what the object is, for messages and for `obs["src_path"]`.
    path
        File or folder on disk, `None` in memory.
    X
        (n_cells, n_genes) values.
    obs
        Annotation of the cells, in memory.
    var
        Annotation of the genes, in memory.
    donor_key
        Donor column of obs; whether it is there is not checked.
    """

    name: str
    path: Path | None
    X: RawMatrix
    obs: pd.DataFrame
    var: pd.DataFrame
    donor_key: str

    def __post_init__(self) -> None:
        if self.X.shape != (len(self.obs), len(self.var)):
            raise ValueError(
                f"X must have a row per row of obs and a column per row of var, but in {self.name} X is "
                f"{self.X.shape[0]:,} × {self.X.shape[1]:,}, obs has {len(self.obs):,} rows and var {len(self.var):,}."
            )


def open_raw_cells(
    source: Any,
    *,
    layer: str | None = None,
    donor_key: str | None = None,
    columns: Sequence[str] | None = None,
    number: int = 0,
) -> RawCells:
    """Open one source of cells.

    Parameters
    ----------
    source
        Path of an AnnData (`.h5ad`, `.zarr`) or DonorData (`.dd.h5`, `.dd.zarr`), or either in memory.
    layer
        Take this layer in place of X.
    donor_key
        Donor column of obs. Default: that of a DonorData, else `"donor_id"`.
    columns
        Columns of obs to keep beside the donor column. `None`: all.
    number
        Position among the sources, to name one that is in memory.

    Raises
    ------
    FileNotFoundError
        If nothing lies at a path.
    KeyError
        If a column or the layer does not exist.
    ValueError, TypeError
        If the source is not of cells.
    """
    if isinstance(source, str | Path):
        return _from_disk(Path(source), layer, donor_key, columns)
    if isinstance(source, ad.AnnData):
        return _from_anndata(source, f"AnnData {number}", layer, donor_key or "donor_id", columns)
    if is_donor_data(source):
        return _from_anndata(source.C, "C of the DonorData", layer, donor_key or str(source.donor_id), columns)
    raise TypeError(f"Cells must be paths, AnnData or a DonorData, got {type(source).__name__}.")


@contextlib.contextmanager
def open_stored(path: Path) -> Iterator[Any]:
    """Open an HDF5 file or zarr folder for reading, and close it after.

    Raises
    ------
    FileNotFoundError
        If nothing lies there.
    ValueError
        If it is neither.
    """
    if not path.exists():
        raise FileNotFoundError(f"{str(path)!r} does not exist.")
    if path.is_dir():
        yield open_group(str(path))
    elif h5py.is_hdf5(path):
        with h5py.File(path, mode="r") as file:
            yield file
    else:
        raise ValueError(f"{str(path)!r} is neither an HDF5 file (.h5ad, .dd.h5) nor a zarr folder.")


def _from_disk(path: Path, layer: str | None, donor_key: str | None, columns: Sequence[str] | None) -> RawCells:
    name = str(path)
    with open_stored(path) as root:
        kind = root.attrs.get("encoding-type")
        if kind == "annbatch-preshuffled":
            raise ValueError(
                f"{name!r} is an annbatch collection already: give it to DonorLoader, or prepare its sources."
            )
        is_donor_data = kind == "donordata"
        group: Any = root["C"] if is_donor_data else root
        if missing := [key for key in ("X", "obs", "var") if key not in group]:
            raise ValueError(
                f"Cells are an AnnData, which has X, obs and var, but {name!r} lacks {', '.join(missing)} "
                f"(its encoding-type is {kind!r})."
            )
        if layer is not None and layer not in group.get("layers", ()):
            raise KeyError(f"{name!r} has no layer {layer!r}. It has {shorten(group.get('layers', ()), 12)}.")
        own_key = str(root.attrs.get("donor_id", "donor_id")) if is_donor_data else "donor_id"
        donor_key = donor_key or own_key
        obs = _read_columns(group["obs"], columns, donor_key, name)
        var = ad.io.read_elem(group["var"])
    key = ("C/" if is_donor_data else "") + ("X" if layer is None else f"layers/{layer}")

    @contextlib.contextmanager
    def open_node() -> Iterator[Any]:
        with open_stored(path) as root:
            yield root[key]

    return RawCells(name, path, RawMatrix(open_node, name), obs, var, donor_key)


def _from_anndata(
    adata: ad.AnnData, name: str, layer: str | None, donor_key: str, columns: Sequence[str] | None
) -> RawCells:
    if layer is not None and layer not in adata.layers:
        raise KeyError(
            f"{name} has no layer {layer!r}. It has {shorten([k for k in dict(adata.layers) if k is not None], 12)}."
        )
    matrix = adata.X if layer is None else adata.layers[layer]
    if matrix is None:
        raise ValueError(
            f"Cells need X, but that of {name} is empty. Name a layer with layer=… if the values are there."
        )
    if isinstance(matrix, np.ndarray):
        matrix = np.asarray(matrix)
    obs, var = (frame if isinstance(frame, pd.DataFrame) else frame.to_memory() for frame in (adata.obs, adata.var))
    kept = _choose(columns, donor_key, list(map(str, obs.columns)), name)
    path = Path(str(adata.filename)) if adata.isbacked else None
    X = RawMatrix(lambda: contextlib.nullcontext(matrix), name)
    return RawCells(name, path, X, obs[kept].copy(deep=False), var.copy(deep=False), donor_key)


def _read_columns(node: Any, columns: Sequence[str] | None, donor_key: str, name: str) -> pd.DataFrame:
    """The columns of obs to keep, and no other, where the format stores them apart."""
    if node.attrs.get("encoding-type") != "dataframe":
        frame: Any = ad.io.read_elem(node)
        return frame[_choose(columns, donor_key, list(frame.columns), name)]
    kept = _choose(columns, donor_key, [str(column) for column in node.attrs.get("column-order", ())], name)
    index = ad.io.read_elem(node[node.attrs["_index"]])
    return pd.DataFrame({column: ad.io.read_elem(node[column]) for column in kept}, index=pd.Index(index))


def _choose(columns: Sequence[str] | None, donor_key: str, present: Sequence[str], name: str) -> list[str]:
    if columns is None:
        return list(present)
    if missing := [column for column in columns if column not in present]:
        raise KeyError(f"obs of {name} has no column {shorten(missing)}. Its columns are {shorten(present, 12)}.")
    return list(dict.fromkeys([*columns, *(column for column in present if column == donor_key)]))


def _layout(node: Any, name: str) -> Layout:
    if isinstance(node, h5py.Group | zarr.Group):
        kind = node.attrs.get("encoding-type")
        if kind in _SPARSE:
            return _SPARSE[kind]
        raise ValueError(f"X must be dense, CSR or CSC, but in {name} it is {kind!r}.")
    if isinstance(node, ad.abc.CSRDataset | sp.csr_matrix | sp.csr_array):
        return "csr"
    if isinstance(node, ad.abc.CSCDataset | sp.csc_matrix | sp.csc_array):
        return "csc"
    if getattr(node, "ndim", None) == 2 and not sp.issparse(node):
        return "dense"
    raise ValueError(f"X must be dense, CSR or CSC, but in {name} it is {type(node).__name__}.")


def _parts(node: Any) -> tuple[Any, Any, Any]:
    if isinstance(node, h5py.Group | zarr.Group):
        return node["data"], node["indices"], node["indptr"]
    if isinstance(node, ad.abc.CSRDataset | ad.abc.CSCDataset):
        return _parts(node.group)  # type: ignore[union-attr]  # the classes behind these have it
    return node.data, node.indices, node.indptr
