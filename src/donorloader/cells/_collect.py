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
import scipy.sparse as sp
from annbatch import DatasetCollection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from ._raw import RawMatrix
    from ._table import CellTable

__all__ = ["WrittenCells", "collect_cells"]

# Cells of one chunk: what annbatch recommends for random access, and what the loader's requests are made of. Smaller
# where cells are grouped, as a bag begins and ends inside of chunks, whose other cells are decoded for nothing.
_CHUNK_ROWS, _GROUPED_CHUNK_ROWS = 64, 32

# Cells that are neighbours in a source and go to the same dataset, which is then shuffled in memory: long enough to be
# read in one go, and short enough that a dataset has many, from all over the sources.
_SLICE_ROWS = 1000
_SLICES_PER_DATASET = 64

# Peak of annbatch's shuffle of one dataset, in units of the dataset's own size: the blocks as read and their
# concatenation, then that and its permuted copy, then the shards being written. Measured, with room for the allocator.
_PEAK_PER_DATASET = 4.5

# obs is held whole: as read, harmonised, and concatenated.
_PEAK_PER_OBS = 3.0

# A dataset with more stored values than an int32 can number takes 64-bit indices, and half as much memory again.
_MAX_NNZ = 2**31 - 1


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


def collect_cells(
    table: CellTable,
    path: Path,
    *,
    memory: int,
    seed: int,
    grouped: bool = False,
    on_rows: Callable[[int], None] | None = None,
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
    grouped
        Whether the cells of a donor lie together in each dataset, shuffled among themselves.
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
            n_obs_per_chunk=_GROUPED_CHUNK_ROWS if grouped else _CHUNK_ROWS,
            groupby=table.donor_key if grouped else None,
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
            if self._slices and len(self._slices) % self._slices_per_dataset == 0:
                # Another dataset begins. The one before is garbage, but in cycles, which Python leaves uncollected for
                # long where they are few and large: several datasets would be in memory at once.
                gc.collect()
            self._slices.add(slice_number)

    def after(self, block: sp.csr_matrix | NDArray[Any]) -> None:
        if self.whole_numbers and not _whole_numbers(block):
            self.whole_numbers = False
        if self._on_rows is not None:
            self._on_rows(block.shape[0])


def _plan(table: CellTable, memory: int) -> tuple[int, int]:
    """Rows of a dataset and of the slices that it is made of."""
    n_obs = table.n_obs
    nnz = sum(source.X.nnz for source in table.sources)
    row_values = nnz / n_obs if table.sparse else float(len(table.var))
    row_bytes = max(1.0, row_values * (table.dtype.itemsize + 4 * table.sparse)) + 8
    obs_bytes = sum(int(obs.memory_usage(deep=True).sum()) for obs in table.obs)
    free = memory - table.held_bytes - int(_PEAK_PER_OBS * obs_bytes)
    most = min(int(free / (_PEAK_PER_DATASET * row_bytes)), int(0.9 * _MAX_NNZ / max(row_values, 1.0)))
    if most < min(n_obs, 4 * _CHUNK_ROWS):
        least = _PEAK_PER_DATASET * row_bytes * min(n_obs, 4 * _CHUNK_ROWS)
        needed = table.held_bytes + int(_PEAK_PER_OBS * obs_bytes + least)
        raise ValueError(
            f"The memory budget is too small for these cells: obs takes {obs_bytes:,} bytes, a cell {row_bytes:,.0f}; "
            f"{needed:,} bytes are needed, and {max(memory, 0):,} are left. Give more memory, or keep fewer columns "
            "with obs_columns=… (--obs-column)."
        )
    if most >= n_obs:
        return n_obs, min(n_obs, _SLICE_ROWS)
    slice_rows = max(1, min(_SLICE_ROWS, most // _SLICES_PER_DATASET))
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
    """Hide annbatch's progress bars, which cannot be switched off, and warnings that a user cannot act on."""
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
