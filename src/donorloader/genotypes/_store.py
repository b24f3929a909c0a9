"""Genotypes as the loader reads them: any AnnData of donors × variants, on disk or in memory."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from annbatch import DatasetCollection

from donorloader._ids import as_text, duplicates, shorten
from donorloader._zarr import local_pipeline, open_group

from ._checksums import sound
from ._packed import CALLS_KEY, DOSAGES_KEY, DosageMatrix, PackedMatrix
from ._rows import Matrix, MemoryMatrix, SparseMatrix, StackedMatrix, StoredMatrix, as_columns, as_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ._rows import Columns

__all__ = ["GenotypeStore", "open_genotypes"]


class GenotypeStore:
    """Donors × variants, read by donor.

    Made by :func:`donorloader.open_genotypes`.

    Attributes
    ----------
    ids
        (n_donors,) donor ids as text, one per row.
    n_variants
        Number of columns.
    dtype
        Type of the values: what :meth:`read` gives.
    """

    def __init__(
        self,
        name: str,
        matrix: Matrix,
        ids: NDArray[np.object_],
        read_var: Callable[[], pd.DataFrame],
        read_names: Callable[[Columns], NDArray[np.object_]],
        read_obs: Callable[[], pd.DataFrame],
        close: Callable[[], None] | None = None,
    ):
        if matrix.shape[0] != ids.size:
            raise ValueError(
                f"Genotypes need one id per row, but {name} has {matrix.shape[0]:,} rows and {ids.size:,} ids. "
                "The store is damaged, or obs is not of this matrix: write it again."
            )
        if repeated := duplicates(ids):
            raise ValueError(
                f"Each donor has one row of genotypes, but the ids {shorten(repeated)} of {name} occur more than once. "
                "Remove the duplicates, or make the ids unique."
            )
        if matrix.dtype.kind not in "iufb":
            raise TypeError(f"Genotypes must be numbers, but {name} holds {matrix.dtype}.")
        if 0 in matrix.shape:
            raise ValueError(f"Genotypes need at least one donor and one variant, but {name} is {matrix.shape}.")
        self.name = name
        self.ids = ids
        self.shape = matrix.shape
        self.n_variants = matrix.shape[1]
        self.dtype = matrix.dtype.newbyteorder("=")  # torch knows no other
        self._matrix = matrix
        self._read_var = read_var
        self._read_names = read_names
        self._read_obs = read_obs
        self._close = close
        self._opened_from: tuple[Any, str | None] | None = None

    @property
    def path(self) -> str | Path | None:
        """Where the store was opened, so that another process can open it as well; `None` if it was not by a path."""
        source = None if self._opened_from is None else self._opened_from[0]
        return source if isinstance(source, str | Path) else None

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: opened there by the same path and layer, or with a copy of what is in memory here."""
        source, layer = (None, None) if self._opened_from is None else self._opened_from
        in_memory = isinstance(source, ad.AnnData) and not source.isbacked
        if not (in_memory or isinstance(source, str | Path)):
            raise TypeError(
                f"Genotypes are sent to another process by the path that they were opened with, but {self.name} was "
                "handed over as an open file. Open it by its path."
            )
        return partial(open_genotypes, layer=layer), (source,)

    @property
    def in_memory(self) -> NDArray[Any] | None:
        """The whole matrix where it is a numpy array already, so that nobody holds it twice."""
        matrix = self._matrix
        return matrix.array if isinstance(matrix, MemoryMatrix) and matrix.dtype == self.dtype else None

    @property
    def packed(self) -> PackedMatrix | None:
        """The matrix where its calls are packed at two bits, so that they need not be unpacked to be held."""
        return self._matrix if isinstance(self._matrix, PackedMatrix) else None

    def read(self, rows: Any, columns: Any) -> NDArray[Any]:
        """Genotypes of some donors.

        Parameters
        ----------
        rows
            Numbers of rows of `ids`, in any order, also more than once; negative ones count from the end. Or a mask.
        columns
            The same of variants, or a slice.

        Returns
        -------
        C-contiguous (len(rows), n_columns) array of `dtype`.

        Raises
        ------
        IndexError, TypeError, ValueError
            If a number is out of range, or a mask of another length; if the store is damaged.
        """
        rows, columns = as_numbers(rows, self.shape[0], "rows"), as_columns(columns, self.shape[1])
        return self._matrix.read(rows, columns).astype(self.dtype, copy=False)

    def names(self, columns: Columns) -> NDArray[np.object_]:
        """Names of some variants, without reading those of all where the columns are a slice."""
        return self._read_names(columns)

    def var(self) -> pd.DataFrame:
        """Annotation of all variants."""
        return self._read_var()

    def obs(self) -> pd.DataFrame:
        """Annotation of all donors, one row per donor, in order of `ids`."""
        return self._read_obs()

    def close(self) -> None:
        """Close the files that this store has opened."""
        if self._close is not None:
            self._close()

    def __repr__(self) -> str:
        return f"GenotypeStore({self.name}: {self.shape[0]:,} donors × {self.shape[1]:,} variants, {self.dtype})"


def open_genotypes(source: Any, *, layer: str | None = None) -> GenotypeStore:
    """Open genotypes, keyed by donor id.

    Parameters
    ----------
    source
        Path of an AnnData ``.h5ad`` or ``.zarr`` or of an annbatch collection; an :class:`anndata.AnnData`, in memory
        or backed; a DonorData (its `G`); or a :class:`GenotypeStore`, returned as it is. ``obs_names`` are the donor
        ids.
    layer
        Layer to read in place of `X`.

    Raises
    ------
    FileNotFoundError
        If there is no such file or store.
    ValueError
        If ids repeat, or their number is not that of the rows.
    TypeError
        If the source or its ids are of a kind that cannot be used.
    """
    if isinstance(source, GenotypeStore):
        if layer is not None:
            raise ValueError(f"layer={layer!r} has no effect on an open GenotypeStore; open it with that layer.")
        return source
    if hasattr(source, "G") and hasattr(source, "C"):
        source = source.G
    if isinstance(source, str | Path):
        store = _open_path(str(source), layer)
    elif isinstance(source, DatasetCollection):
        store = _open_collection(source, "the collection", layer)
    elif isinstance(source, ad.AnnData):
        store = _from_anndata(source, layer)
    else:
        raise TypeError(
            "Genotypes must be a path, an AnnData, a DatasetCollection or a GenotypeStore, "
            f"got {type(source).__name__}. PLINK and other files are read by donorloader.prepare(...)."
        )
    store._opened_from = source, layer
    return store


def _open_path(path: str, layer: str | None) -> GenotypeStore:
    if path.endswith((".bed", ".bim", ".fam", ".pgen", ".bgen", ".vcf", ".vcf.gz", ".bcf", ".vcz")):
        raise ValueError(
            f"{path!r} keeps genotypes by variant, and a loader reads them by donor: "
            f"run `donorloader prepare CELLS --genotypes {path} --out study` once, and load the study."
        )
    if Path(path).is_file():
        if not h5py.is_hdf5(path):
            raise ValueError(f"Genotypes must be an AnnData in .h5ad or .zarr, but {path!r} is neither.")
        file = h5py.File(path, "r")
        try:
            group = file["G"] if "G" in file and "obs" not in file else file
            return _from_group(group, repr(path), layer, file.close)
        except BaseException:
            file.close()
            raise
    group = open_group(path)
    kind = group.attrs.get("encoding-type")
    if kind == "annbatch-preshuffled":
        return _open_collection(DatasetCollection(group), repr(path), layer)
    if kind == "donordata":
        return _from_group(group["G"], repr(path), layer)
    if kind != "anndata":
        raise ValueError(f"{path!r} is a zarr group, but not an AnnData (its encoding-type is {kind!r}).")
    return _from_group(group, repr(path), layer)


def _open_collection(collection: DatasetCollection, name: str, layer: str | None) -> GenotypeStore:
    if collection.is_empty:
        raise ValueError(f"Genotypes need at least one donor, but the collection {name} is empty.")
    stores = [_from_group(group, f"{group.basename} of {name}", layer) for group in collection]
    everything = slice(0, stores[0].n_variants)
    for store in stores[1:]:
        if store.n_variants != stores[0].n_variants or (store.names(everything) != stores[0].names(everything)).any():
            raise ValueError(
                f"All datasets of genotypes must have the same variants in the same order, but those of {store.name} "
                f"differ from those of {stores[0].name}. Write the collection again from one AnnData."
            )
    ids = np.concatenate([store.ids for store in stores])
    stack = StackedMatrix([store._matrix for store in stores])
    return GenotypeStore(
        name, stack, ids, stores[0].var, stores[0].names, lambda: pd.concat([store.obs() for store in stores])
    )


def _from_anndata(adata: ad.AnnData, layer: str | None) -> GenotypeStore:
    name = "the AnnData of genotypes"
    if layer is not None and layer not in adata.layers:
        layers = shorten(key for key in list(adata.layers) if key is not None)
        raise KeyError(f"{name} has no layer {layer!r}, only {layers}.")
    X = adata.X if layer is None else adata.layers[layer]
    names = _text(adata.var_names)
    ids = as_text(adata.obs_names, f"obs_names of {name}")
    return GenotypeStore(
        name, _matrix(X, name), ids, lambda: adata.var, lambda columns: names[columns], lambda: adata.obs
    )


def _from_group(group: Any, name: str, layer: str | None, close: Callable[[], None] | None = None) -> GenotypeStore:
    packed = layer is None and isinstance(group, zarr.Group) and _packed(group) is not None
    needed = ("obs", "var") if packed else ("X", "obs", "var")
    if missing := [key for key in needed if key not in group]:
        raise ValueError(f"An AnnData store has X, obs and var, but {name} lacks {', '.join(missing)}.")
    if layer is not None and layer not in group.get("layers", {}):
        raise KeyError(f"{name} has no layer {layer!r}, only {shorten(group.get('layers', {}))}.")
    obs, var = group["obs"], group["var"]
    donors, index = obs[obs.attrs["_index"]], var[var.attrs["_index"]]
    with sound(donors, f"obs of {name}"), sound(index, f"var of {name}"):
        ids = ad.io.read_elem(donors)
    ids = as_text(ids, f"obs_names of {name}")

    def read_names(columns: Columns) -> NDArray[np.object_]:
        with sound(index, f"var of {name}"):
            if isinstance(columns, slice) and isinstance(index, zarr.Array | h5py.Dataset):
                values = index.asstr()[columns] if isinstance(index, h5py.Dataset) else index[columns]
                return _text(values)
            names = _text(ad.io.read_elem(index))
        return names[columns]

    def read_table(table: Any, key: str) -> pd.DataFrame:
        with sound(table, f"{key} of {name}"):
            return ad.io.read_elem(table)

    with local_pipeline(group) if isinstance(group, zarr.Group) else nullcontext():
        if packed:
            key, matrix_of = _packed(group)  # type: ignore[misc] # packed says that there is one
            n_variants = index.shape[0] if isinstance(index, zarr.Array) else len(read_names(slice(0, None)))
            matrix: Matrix = matrix_of(group["obsm"][key], name, n_variants)
        else:
            node = group["X"] if layer is None else group["layers"][layer]
            sparse = node.attrs.get("encoding-type") in ("csr_matrix", "csc_matrix")
            matrix = _matrix(ad.io.sparse_dataset(node) if sparse else node, name)
    return GenotypeStore(
        name, matrix, ids, lambda: read_table(var, "var"), read_names, lambda: read_table(obs, "obs"), close
    )


def _packed(group: zarr.Group) -> tuple[str, type[PackedMatrix | DosageMatrix]] | None:
    """The packed genotypes of an AnnData store, which are read in place of X where it has them."""
    obsm: Any = group.get("obsm", {})
    kinds: tuple[tuple[str, type[PackedMatrix | DosageMatrix]], ...]
    kinds = ((CALLS_KEY, PackedMatrix), (DOSAGES_KEY, DosageMatrix))
    return next((kind for kind in kinds if kind[0] in obsm), None)


def _matrix(X: Any, name: str) -> Matrix:
    if isinstance(X, np.ndarray):
        return MemoryMatrix(np.asarray(X))
    if isinstance(X, zarr.Array | h5py.Dataset):
        return StoredMatrix(X, name)
    if isinstance(X, sp.csr_matrix | sp.csr_array | ad.abc.CSRDataset):
        return SparseMatrix(X)
    if isinstance(X, sp.csc_matrix | sp.csc_array):
        return SparseMatrix(X.tocsr())
    raise TypeError(f"Genotypes must be dense or CSR, but X of {name} is {type(X).__name__}.")


def _text(values: Any) -> NDArray[np.object_]:
    return np.asarray(pd.Index(np.asarray(values, dtype=object)).astype(str), dtype=object)
