"""Raw cells → one shuffled annbatch collection, within a memory budget."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anndata as ad
import dask
import dask.array as da
import numpy as np
import pandas as pd
import scipy.sparse as sp
from annbatch import DatasetCollection

from ._harmonise import common_dtype, donors_as_text, harmonise_obs, rename_donors, union_of_genes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ._raw import RawCells, RawMatrix

__all__ = ["CellTable", "WrittenCells", "collect_cells", "harmonise_cells"]

# Cells of one chunk: what annbatch recommends for random access, and what the loader's requests are made of.
_CHUNK_ROWS = 64

# Cells that are neighbours in a source and stay together until their dataset is shuffled in memory.
_SLICE_ROWS = 1000

# Peak of annbatch's shuffle of one dataset, in units of the dataset's own size: the blocks as read and their
# concatenation, then that and its permuted copy, then the shards being written. Measured, with room for the allocator.
_PEAK_PER_DATASET = 4.5

# obs is held whole: as read, harmonised, and concatenated.
_PEAK_PER_OBS = 3.0

# A dataset with more stored values than an int32 can number takes 64-bit indices, and half as much memory again.
_MAX_NNZ = 2**31 - 1


@dataclass
class CellTable:
    """Cells of all sources, ready to be written: everything but X is in memory and has one form.

    Attributes
    ----------
    sources
        Where the cells come from; those without cells are left out.
    obs
        Annotation of each source's cells, with the same columns, types and categories in all.
    var
        The genes.
    positions
        Per source, where its genes are in `var`, or `None` where it has just these.
    dtype, sparse
        Type and layout of X.
    donor_key
        Donor column of obs: a categorical of text.
    donors
        (n_donors,) donors that have cells, sorted as text.
    cells_per_donor
        (n_donors,) number of cells of each.
    incomplete_columns
        Columns of obs that some source lacks.
    unused_renames
        Ids in the donor map that no cell has.
    """

    sources: list[RawCells]
    obs: list[pd.DataFrame]
    var: pd.DataFrame
    positions: list[NDArray[np.int32] | None]
    dtype: np.dtype[Any]
    sparse: bool
    donor_key: str
    donors: NDArray[np.object_]
    cells_per_donor: NDArray[np.int64]
    incomplete_columns: list[str]
    unused_renames: list[str]

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        return sum(len(obs) for obs in self.obs)

    @property
    def genes_not_everywhere(self) -> int:
        """Number of genes that some source lacks; its cells have 0 there."""
        everywhere = np.zeros(len(self.var), dtype=np.int64)
        for positions in self.positions:
            everywhere[slice(None) if positions is None else positions] += 1
        return int((everywhere < len(self.sources)).sum())

    @property
    def repeated_names(self) -> int:
        """Number of cells whose name another cell has had before; annbatch appends a number to it."""
        return int(pd.Index(np.concatenate([obs.index for obs in self.obs])).duplicated().sum())


@dataclass(frozen=True)
class WrittenCells:
    """What `collect_cells` wrote.

    Attributes
    ----------
    n_datasets
        Datasets in the collection.
    whole_numbers
        Whether X holds nothing but whole numbers, as counts do.
    """

    n_datasets: int
    whole_numbers: bool


def harmonise_cells(
    sources: Sequence[RawCells], *, donor_map: Mapping[str, str] | None = None, memory: int
) -> CellTable:
    """Bring cells of several sources into one form.

    Parameters
    ----------
    sources
        The cells, as :func:`open_raw_cells` opens them.
    donor_map
        New id of each donor to rename, by its id as text.
    memory
        Budget for a CSC matrix, which cannot be read by rows and is turned into CSR in memory. [Unit: byte]

    Raises
    ------
    KeyError, ValueError, TypeError
        If there is no cell, the donor column is absent or has missing or unusable ids, gene names repeat, a column of
        obs cannot be stored, or a CSC matrix is too large for the budget.
    """
    sources = [source for source in sources if len(source.obs)]
    if not sources:
        raise ValueError("The cells are empty: none of the sources has a cell.")
    donor_key = sources[0].donor_key
    donor_map = donor_map or {}
    donors = [donors_as_text(source) for source in sources]
    unused = set(donor_map).difference(*(values.categories for values in donors))
    donors = [rename_donors(values, donor_map) for values in donors]
    present = sorted({donor for values in donors for donor in values.categories})
    names = [source.name for source in sources]
    others = [source.obs.drop(columns=[donor_key, "src_path"], errors="ignore") for source in sources]
    obs, incomplete = harmonise_obs(others, names)
    counts = np.zeros(len(present), dtype=np.int64)
    for frame, values in zip(obs, donors, strict=True):
        frame[donor_key] = pd.Categorical(values, categories=present)
        counts += np.bincount(frame[donor_key].array.codes, minlength=len(present))
    var, positions = union_of_genes(sources)
    for source in sources:
        _read_by_rows(source, memory)
    return CellTable(
        sources=sources,
        obs=obs,
        var=var,
        positions=positions,
        dtype=common_dtype([source.X for source in sources]),
        sparse=any(source.X.layout == "csr" for source in sources),
        donor_key=donor_key,
        donors=np.array(present, dtype=object),
        cells_per_donor=counts,
        incomplete_columns=incomplete,
        unused_renames=sorted(unused),
    )


def collect_cells(
    table: CellTable, path: Path, *, memory: int, seed: int, on_rows: Callable[[int], None] | None = None
) -> WrittenCells:
    """Write cells as a shuffled annbatch collection.

    Parameters
    ----------
    table
        The cells.
    path
        The collection to make; must not exist.
    memory
        Bytes that the cells may take while they are shuffled, obs included. [Unit: byte]
    seed
        Seed of the shuffle: the same cells and seed, and budget, give the same order.
    on_rows
        Called with the number of cells just read, from several threads.

    Raises
    ------
    ValueError
        If the budget is too small for a dataset of a few chunks.
    """
    dataset_rows, slice_rows = _plan(table, memory)
    starts = np.cumsum([0, *(len(obs) for obs in table.obs)])
    by_name = {source.name: i for i, source in enumerate(table.sources)}
    blocks = _Blocks(slices_per_dataset=dataset_rows // slice_rows, on_rows=on_rows)

    def load(name: str) -> ad.AnnData:
        i = by_name[name]
        X = _lazy_rows(table, i, int(starts[i]), slice_rows, blocks)
        return ad.AnnData(X=X, obs=table.obs[i].copy(deep=False), var=table.var.copy(deep=False))

    with _quiet():
        collection = DatasetCollection(str(path), mode="a").add_adatas(
            list(by_name),
            load_adata=load,
            dataset_size=dataset_rows,
            shuffle_chunk_size=slice_rows,
            shard_size=_shard_rows(dataset_rows),
            n_obs_per_chunk=_CHUNK_ROWS,
            merge="same",
            rng=np.random.default_rng(seed),
        )
        return WrittenCells(n_datasets=sum(1 for _ in collection), whole_numbers=blocks.whole_numbers)


class _Blocks:
    """What is to be done as each block of cells is read, on whichever thread that is."""

    def __init__(self, *, slices_per_dataset: int, on_rows: Callable[[int], None] | None) -> None:
        self.whole_numbers = True
        self._slices_per_dataset = max(1, slices_per_dataset)
        self._on_rows = on_rows
        self._slices: set[int] = set()
        self._lock = threading.Lock()

    def before(self, slice_number: int) -> None:
        with self._lock:
            if slice_number in self._slices:  # its other part, from the source before
                return
            if len(self._slices) % self._slices_per_dataset == 0:
                # A new dataset begins. The one before is garbage, but in cycles, which few and large objects as these
                # leave uncollected for long: several datasets would be in memory at once.
                gc.collect()
            self._slices.add(slice_number)

    def after(self, block: sp.csr_matrix | NDArray[Any]) -> None:
        if self.whole_numbers and not _whole_numbers(block):
            self.whole_numbers = False
        if self._on_rows is not None:
            self._on_rows(block.shape[0])


def _read_by_rows(source: RawCells, memory: int) -> None:
    """Turn a CSC matrix into CSR, if it and its copy fit the budget."""
    X = source.X
    if X.layout != "csc":
        return
    needed = 2 * X.nnz * (X.dtype.itemsize + 8)
    if needed > memory // 2:
        raise ValueError(
            f"Cells are read by rows, but X of {source.name} is stored by columns (CSC), and turning it round takes "
            f"{needed:,} bytes, more than half the memory budget. Give more memory, or write it with adata.X.tocsr()."
        )
    source.X = X.to_csr()


def _plan(table: CellTable, memory: int) -> tuple[int, int]:
    """Rows of a dataset and of the slices that it is made of."""
    n_obs = table.n_obs
    nnz = sum(source.X.nnz for source in table.sources)
    row_values = nnz / n_obs if table.sparse else float(len(table.var))
    row_bytes = max(1.0, row_values * (table.dtype.itemsize + 4 * table.sparse)) + 8
    obs_bytes = sum(int(obs.memory_usage(deep=True).sum()) for obs in table.obs)
    free = memory - int(_PEAK_PER_OBS * obs_bytes)
    most = min(int(free / (_PEAK_PER_DATASET * row_bytes)), int(0.9 * _MAX_NNZ / max(row_values, 1.0)))
    if most < min(n_obs, 4 * _CHUNK_ROWS):
        needed = int(_PEAK_PER_OBS * obs_bytes + min(n_obs, 4 * _CHUNK_ROWS) * _PEAK_PER_DATASET * row_bytes)
        raise ValueError(
            f"The memory budget is too small for these cells: obs takes {obs_bytes:,} bytes and a cell {row_bytes:,.0f}, "
            f"so {needed:,} bytes are needed and {max(memory, 0):,} are left. Give more memory, or keep fewer columns "
            "with obs_columns=… (--obs-column)."
        )
    if most >= n_obs:
        return n_obs, min(n_obs, _SLICE_ROWS)
    slice_rows = min(_SLICE_ROWS, most // 4)
    # Datasets of about the same size rather than full ones and a rest, which would be a tiny dataset.
    n_datasets = -(-n_obs // (most // slice_rows * slice_rows))
    dataset_rows = -(-n_obs // n_datasets)
    return -(-dataset_rows // slice_rows) * slice_rows, slice_rows


def _shard_rows(dataset_rows: int) -> int:
    """Eight shards or more in a dataset, as a shard is held whole while it is written."""
    return max(_CHUNK_ROWS, dataset_rows // 8 // _CHUNK_ROWS * _CHUNK_ROWS)


def _lazy_rows(
    table: CellTable,
    i: int,
    start: int,
    slice_rows: int,
    blocks: _Blocks,
) -> da.Array:
    """X of one source as a dask array, cut where annbatch's slices of all cells begin: each block is read once."""
    matrix, positions = table.sources[i].X, table.positions[i]
    n_obs, n_genes = matrix.shape[0], len(table.var)
    first = min(n_obs, -start % slice_rows) or min(n_obs, slice_rows)
    bounds = [0, *range(first, n_obs, slice_rows), n_obs]

    def read(block_id: tuple[int, int]) -> sp.csr_matrix | NDArray[Any]:
        begin, end = bounds[block_id[0]], bounds[block_id[0] + 1]
        blocks.before((start + begin) // slice_rows)
        block = _into_genes(_read(matrix, begin, end, sparse=table.sparse), positions, n_genes)
        blocks.after(block)
        return block.astype(table.dtype, copy=False)

    meta = sp.csr_matrix((0, 0), dtype=table.dtype) if table.sparse else np.empty((0, 0), dtype=table.dtype)
    chunks = (tuple(np.diff(bounds).tolist()), (n_genes,))
    return da.map_blocks(read, chunks=chunks, dtype=table.dtype, meta=meta, name=f"donorloader-cells-{i}")


def _read(matrix: RawMatrix, begin: int, end: int, *, sparse: bool) -> sp.csr_matrix | NDArray[Any]:
    block = matrix.rows(begin, end)
    return sp.csr_matrix(block) if sparse and isinstance(block, np.ndarray) else block


def _whole_numbers(block: sp.csr_matrix | NDArray[Any]) -> bool:
    values = block if isinstance(block, np.ndarray) else block.data
    return values.dtype.kind in "iu" or bool((values == np.floor(values)).all())


def _into_genes(
    block: sp.csr_matrix | NDArray[Any], positions: NDArray[np.int32] | None, n_genes: int
) -> sp.csr_matrix | NDArray[Any]:
    """Columns of one source put where its genes are among all; the others are 0."""
    if positions is None:
        return block
    if isinstance(block, np.ndarray):
        out = np.zeros((len(block), n_genes), dtype=block.dtype)
        out[:, positions] = block
        return out
    moved = sp.csr_matrix((block.data, positions[block.indices], block.indptr), shape=(block.shape[0], n_genes))
    moved.sort_indices()
    return moved


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep annbatch's progress bars, which cannot be switched off, and warnings that a user cannot act on, from showing."""
    with (
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
        dask.config.set(scheduler="threads", num_workers=2),
    ):
        # Repeated names are in the report; what zarr says of consolidated metadata is annbatch's choice.
        warnings.filterwarnings("ignore", message="Observation names are not unique")
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        warnings.simplefilter("ignore", category=DeprecationWarning)  # of the libraries among each other
        yield
