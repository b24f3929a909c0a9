"""The cells: some datasets of one variable space, read as one table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import annbatch
import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import zarr
from pandas.api.types import union_categoricals

from donorloader._buffers import BufferPool
from donorloader._ids import as_text, shorten
from donorloader._zarr import local_pipeline

from ._csr_reader import CsrReader, StoredCsr
from ._harmonise import categories_as_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from annbatch.abc import Sampler
    from numpy.typing import NDArray

__all__ = ["CellSource", "Dataset"]


@dataclass(frozen=True)
class Dataset:
    """One AnnData of a collection, its matrix left on disk where it is there.

    Attributes
    ----------
    name
        For messages.
    X
        (n_cells, n_genes) matrix in a form that annbatch reads: zarr array, zarr-backed CSR, numpy array, scipy CSR.
    read_obs
        Reads one column of ``obs``.
    columns
        Names of the columns of ``obs``.
    n_obs
        Rows of ``obs``.
    var_names
        (n_genes,) names of the variables.
    read_var
        Reads the annotation of the variables.
    nodes
        The zarr nodes that it reads, to tell local from remote; empty in memory.
    """

    name: str
    X: Any
    read_obs: Callable[[str], Any]
    columns: tuple[str, ...]
    n_obs: int
    var_names: NDArray[np.object_]
    read_var: Callable[[], pd.DataFrame]
    nodes: tuple[Any, ...] = ()


class CellSource:
    """All cells, as a table of rows numbered through the datasets in order.

    Parameters
    ----------
    datasets
        At least one, all with the same variables.
    donor_key
        The donor column that the source itself names, if it does.
    """

    def __init__(self, datasets: Sequence[Dataset], *, donor_key: str | None = None):
        self.datasets = list(datasets)
        self.donor_key = donor_key
        self._check()
        self.n_obs = sum(d.n_obs for d in self.datasets)
        self.var_names = self.datasets[0].var_names

    def _check(self) -> None:
        if not self.datasets or sum(d.n_obs for d in self.datasets) == 0:
            raise ValueError("A loader needs at least one cell, but the cells are empty.")
        first = self.datasets[0]
        for dataset in self.datasets:
            if dataset.X.shape[0] != dataset.n_obs:
                raise ValueError(
                    f"X and obs must have one row per cell, but {dataset.name} has {dataset.X.shape[0]:,} rows in X "
                    f"and {dataset.n_obs:,} in obs. The store is damaged: prepare it again."
                )
            if not np.array_equal(dataset.var_names, first.var_names):
                raise ValueError(
                    f"All datasets must have the same variables in the same order, but those of {dataset.name} differ "
                    f"from those of {first.name}. Prepare them together with donorloader.prepare(...)."
                )
        # annbatch cannot read datasets without rows
        self.datasets = [d for d in self.datasets if d.n_obs]
        first = self.datasets[0]
        for dataset in self.datasets:
            if self.sparse and np.dtype(dataset.X.dtype) == np.float16:
                raise ValueError(
                    f"Sparse X must be of a type that scipy has, but X of {dataset.name} is float16: convert it to "
                    "float32."
                )
            # annbatch promotes mixed types batch by batch, and can overflow as it joins the parts
            if _types(dataset.X) != _types(first.X):
                raise ValueError(
                    f"X of all datasets must have one layout and type, but that of {dataset.name} is "
                    f"{' '.join(_types(dataset.X))} and that of {first.name} {' '.join(_types(first.X))}. Convert it, "
                    "or prepare them together with donorloader.prepare(...)."
                )

    @property
    def nodes(self) -> tuple[Any, ...]:
        """The zarr nodes that are read, empty in memory."""
        return tuple(node for d in self.datasets for node in d.nodes)

    @property
    def sparse(self) -> bool:
        """Whether X is sparse (CSR)."""
        return isinstance(self.datasets[0].X, ad.abc.CSRDataset | sp.csr_matrix | sp.csr_array)

    @property
    def cell_bytes(self) -> float:
        """What a cell of X takes in memory, on average. Unit: bytes."""
        if not self.sparse:
            return float(self.var_names.size * self.datasets[0].X.dtype.itemsize)
        parts = [_values(d.X) for d in self.datasets]
        # scipy makes column numbers of fewer than four bytes, as annbatch stores them, into four
        stored = sum(data.shape[0] * (data.dtype.itemsize + max(4, indices.dtype.itemsize)) for data, indices in parts)
        return stored / self.n_obs + 8

    def decoded_cells(self, rows: NDArray[np.int64]) -> int:
        """Cells that are decoded to read some rows: all cells of every chunk on disk that has one of them."""
        total, start = 0, 0
        for dataset in self.datasets:
            mine = rows[(rows >= start) & (rows < start + dataset.n_obs)] - start
            chunk = _chunk_rows(dataset)
            total += int(np.unique(mine // chunk).size * chunk)
            start += dataset.n_obs
        return total

    def loader(
        self,
        sampler: Sampler,
        *,
        preload_to_gpu: bool = False,
        pool: BufferPool | None = None,
        threads: bool = True,
        as_stored: bool = False,
    ) -> Iterable[Mapping[str, Any]]:
        """Batches of X and each cell's row number, in the order of a sampler, which runs anew for each iteration.

        Parameters
        ----------
        sampler
            Which rows, in what order.
        preload_to_gpu
            annbatch keeps load requests on the GPU.
        pool
            Where batches take their memory from, if it is we who read them. Default: one of their own, small.
        threads
            Whether threads may be started to read with. zarr has its own all the same.
        as_stored
            Whether columns of sparse cells may be of the store's type, which is narrow, and not of that of scipy's.
        """
        if not preload_to_gpu and self._stored is not None:
            pool = BufferPool(keep=1) if pool is None else pool
            n_genes = self.var_names.size
            return CsrReader(self._stored, n_genes, sampler, pool=pool, threads=threads, as_stored=as_stored)
        loader: annbatch.Loader[Any, Any] = annbatch.Loader(
            batch_sampler=sampler,
            return_index=True,
            preload_to_gpu=preload_to_gpu,
            to="torch" if preload_to_gpu else None,
        )
        return cast("Iterable[Mapping[str, Any]]", loader.add_datasets([d.X for d in self.datasets]))

    @cached_property
    def _stored(self) -> list[StoredCsr] | None:
        """The datasets as we read them ourselves, or `None` where annbatch has to."""
        if not all(isinstance(d.X, ad.abc.CSRDataset) for d in self.datasets):
            return None
        with local_pipeline(*self.nodes):
            stored = [StoredCsr.open(d.X, d.name) for d in self.datasets]
        return None if any(part is None for part in stored) else cast("list[StoredCsr]", stored)

    def var(self) -> pd.DataFrame:
        """Annotation of the genes."""
        return self.datasets[0].read_var()

    def column(self, name: str) -> pd.Series:
        """One column of ``obs`` over all datasets; a categorical gets one code per category everywhere.

        Raises
        ------
        KeyError
            If a dataset lacks the column.
        """
        parts = []
        for dataset in self.datasets:
            if name not in dataset.columns:
                raise KeyError(
                    f"obs has no column {name!r} in {dataset.name}. Its columns are {shorten(dataset.columns, 12)}."
                )
            part = dataset.read_obs(name)
            parts.append(part.array if isinstance(part, pd.Series | pd.Index) else part)
        if all(isinstance(part, pd.Categorical) for part in parts):
            # unordered dtypes are equal even where the order of their categories, and so the codes, differ
            same = all(p.ordered == parts[0].ordered and p.categories.equals(parts[0].categories) for p in parts)
            if same:
                codes = np.concatenate([part.codes for part in parts])
                return pd.Series(pd.Categorical.from_codes(codes, dtype=parts[0].dtype), name=name)
            parts = _alike(parts)
            return pd.Series(union_categoricals(parts, sort_categories=_sortable(parts), ignore_order=True), name=name)
        series = [pd.Series(np.asarray(p) if isinstance(p, pd.Categorical) else p) for p in parts]
        return pd.concat(series, ignore_index=True).rename(name)

    def obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Columns of ``obs`` over all datasets, indexed by row number."""
        return pd.DataFrame({name: self.column(name) for name in columns}, index=pd.RangeIndex(self.n_obs))

    def donors(self, donor_key: str) -> tuple[NDArray[np.int32], NDArray[np.object_]]:
        """The donor of each cell.

        Returns
        -------
        codes
            (n_cells,) int32, positions in `ids`.
        ids
            (n_donors,) distinct ids as text, sorted.

        Raises
        ------
        KeyError, ValueError, TypeError
            If the column is absent, has missing values, or holds anything but text and integers.
        """
        per_dataset = []
        for dataset in self.datasets:
            if donor_key not in dataset.columns:
                raise KeyError(
                    f"The donor column must be in obs of the cells, but {dataset.name} has no {donor_key!r}. "
                    f"Its columns are {shorten(dataset.columns, 12)}: name the right one with donor_key=…"
                )
            what = f"obs[{donor_key!r}] of {dataset.name}"
            values = dataset.read_obs(donor_key)
            values = values.array if isinstance(values, pd.Series | pd.Index) else values
            if isinstance(values, pd.Categorical):
                codes, levels = np.asarray(values.codes), values.categories
            else:
                # others would be merged with integers and texts of the same value before they are seen to be wrong
                if pd.api.types.infer_dtype(values, skipna=False) not in ("string", "integer"):
                    values = as_text(values, what)
                codes, levels = pd.factorize(pd.Series(values))
            if (missing := codes < 0).any():
                as_text(pd.Categorical.from_codes(np.where(missing, -1, 0), categories=["donor"]), what)  # raises
            used = np.unique(codes)
            per_dataset.append((codes, used, as_text(levels[used], what)))
        ids = np.array(sorted({i for _, _, texts in per_dataset for i in texts}), dtype=object)
        position = {donor: i for i, donor in enumerate(ids)}
        parts = []
        for codes, used, texts in per_dataset:
            table = np.zeros(int(used[-1]) + 1, dtype=np.int32)
            table[used] = [position[text] for text in texts]
            parts.append(table[codes])
        return np.concatenate(parts), ids


def _values(X: Any) -> tuple[Any, Any]:
    """Stored values of a CSR matrix, and their columns."""
    if isinstance(X, ad.abc.CSRDataset):
        group: Any = X.group  # type: ignore[attr-defined] # its abstract class does not declare it
        return group["data"], group["indices"]
    return X.data, X.indices


def _chunk_rows(dataset: Dataset) -> float:
    """Cells of a chunk on disk; 1 in memory. Chunks of CSR are of stored values, so this is an average."""
    X = dataset.X
    if isinstance(X, zarr.Array):
        return float(X.chunks[0])
    if not isinstance(X, ad.abc.CSRDataset):
        return 1.0
    data, _ = _values(X)
    return max(1.0, data.chunks[0] * dataset.n_obs / max(1, data.shape[0]))


def _types(X: Any) -> tuple[str, ...]:
    """Layout of a matrix and types of its parts."""
    if isinstance(X, ad.abc.CSRDataset) or sp.issparse(X):
        return "CSR", *(part.dtype.name for part in _values(X))
    return "dense", np.dtype(X.dtype).name


def _alike(parts: list[pd.Categorical]) -> list[pd.Categorical]:
    """Categoricals whose categories are of one type: where they are not, as text."""
    if len({part.categories.dtype for part in parts}) == 1:
        return parts
    return [categories_as_text(part) for part in parts]


def _sortable(parts: list[pd.Categorical]) -> bool:
    """Whether the categories are of one kind, so that their union can be put in order."""
    return len({type(c) for part in parts for c in part.categories}) <= 1
