"""The front door for joined batches: shuffled cells with the genotype row of every donor among them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import pandas as pd
import torch
from torch.utils.data import IterableDataset, get_worker_info

from donorloader._engine import Engine
from donorloader._match import match_donors
from donorloader._options import ReadOptions, SamplingOptions
from donorloader.cells import is_donor_data, open_cells, select_cells
from donorloader.genotypes import DonorTable, GenotypeStore, open_genotypes, resolve_variants
from donorloader.study import Study, is_study, open_study

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from annbatch.abc import Sampler
    from numpy.typing import NDArray

__all__ = ["DonorLoader"]


class DonorLoader(IterableDataset[dict[str, Any]]):
    """Stream shuffled cells together with the genotypes of their donors.

    Cells are read by annbatch on one thread. On another, a replica of the same sampler says which donors the coming
    batches need, and their genotype rows are read and gathered ahead of time. Each batch is joined from both, and
    the donors of the two sides are compared.

    Parameters
    ----------
    cells
        A study (its folder, or :func:`open_study`), which brings its genotypes along; or the path of an annbatch
        collection, of an AnnData ``.zarr`` or of a DonorData ``.dd.zarr``; a :class:`annbatch.DatasetCollection`; an
        AnnData in memory or a list of these; a cellink ``DonorData``, which brings its genotypes along.
    genotypes
        Donors × variants with donor ids as ``obs_names``: the path of an AnnData ``.h5ad`` or ``.zarr`` or of an
        annbatch collection; an AnnData, in memory or backed; a :class:`GenotypeStore`; `None` for cells only.
    donor_key
        Column of the cells' ``obs`` with the donor of each cell. Default: that of the study or DonorData, else
        ``"donor_id"``. Ids are compared as text.
    batch_size
        Cells a batch.
    shuffle
        Whether cells come in random order: chunks of `chunk_size` cells are drawn at random, and the cells of a window
        of `preload_nchunks` chunks are shuffled together.
    drop_last
        Whether to leave out a last batch that is not full.
    seed
        With the epoch, what the order depends on, and all it depends on.
    chunk_size, preload_nchunks
        Contiguous cells a read, and reads a window. Default: near 64 and 16,384 cells a window, chosen so that a
        window holds whole batches, as annbatch requires.
    batch_sampler
        Any annbatch sampler, in place of the six options above it but for `seed`. With `donors` or `cells_query`, it
        samples from the cells that are left, numbered from 0.
    obs_columns
        Columns of ``obs`` to yield with each batch.
    variants
        The variants to yield, in this order: names, positions, a boolean mask or a slice. Default: all.
    donors
        Ids of the donors to use. Default: all.
    cells_query
        Condition on columns of ``obs``, as :meth:`pandas.DataFrame.query` takes it, e.g. ``"cell_type == 'B'"``.
    missing_donors
        What to do about donors that have cells but no row of genotypes: ``"error"``, ``"drop"`` their cells, or give
        them rows of ``"nan"``, with `donor_features` in floating point.
    donor_rows
        Which rows a batch brings: those of its own donors (``"batch"``), or one table with those of all donors of its
        load request, shared by the batches of that request (``"window"``), which spares a copy where genotypes are
        wide.
    genotype_layer
        Layer of the genotypes to read in place of `X`.
    genotype_memory
        Budget for genotype rows that stay in memory, in bytes or as text. Rows of the chosen variants that fit stay
        once they are read; otherwise those of a window are read for it.
    to
        ``"torch"``, or ``"numpy"`` for numpy arrays and scipy CSR.
    device
        Device for the tensors. Default: they stay on the CPU.
    densify
        Whether `X` is dense float32. On the CPU this is many times faster than torch's ``to_dense()``.
    prefetch
        Batches that may be ready ahead of the loop. Default: those of one load request, so that the next request is
        read while they are used (4 if `densify`, whose windows are read ahead on their own). 0: no threads at all.
    preload_to_gpu
        Passed to annbatch, which then handles X on the GPU by cupy.
    check
        Whether to compare, in every batch, the donor of each cell with the donor whose row it gets. Costs under 1% of
        the time.

    Raises
    ------
    ValueError, KeyError, TypeError, FileNotFoundError
        If an option, a store or an id is wrong; the message gives the rule, the value, and the remedy.

    Notes
    -----
    A batch is a dict:

    ``X``
        (n_cells, n_genes) torch sparse CSR in the type of the store; dense float32 with `densify`.
    ``index``
        (n_cells,) int64, the row of each cell in the collection.
    ``obs``
        DataFrame of `obs_columns`, indexed by ``index``; `None` without. Categories are the same in every batch.
    ``unique_donors``
        (n_donors,) ids, as an object array of text, in the order of :attr:`donors`.
    ``donor_idx``
        (n_cells,) int64, the row of ``donor_features`` (and of ``unique_donors``) of each cell.
    ``donor_features``
        (n_donors, n_variants) genotypes in the type of the store; `None` without genotypes.

    Every call of ``iter()`` begins a new pass, of the next epoch, also if the one before was cut short.

    Examples
    --------
    >>> with DonorLoader("study/", batch_size=512) as loader:  # doctest: +SKIP
    ...     for batch in loader:
    ...         genotype_of_each_cell = batch["donor_features"][batch["donor_idx"]]
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any = None,
        *,
        donor_key: str | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        chunk_size: int | None = None,
        preload_nchunks: int | None = None,
        batch_sampler: Sampler | None = None,
        obs_columns: Sequence[str] = (),
        variants: Any = None,
        donors: Iterable[Any] | None = None,
        cells_query: str | None = None,
        missing_donors: Literal["error", "drop", "nan"] = "error",
        donor_rows: Literal["batch", "window"] = "batch",
        genotype_layer: str | None = None,
        genotype_memory: int | str = "1GB",
        to: Literal["torch", "numpy"] = "torch",
        device: str | torch.device | None = None,
        densify: bool = False,
        prefetch: int | None = None,
        preload_to_gpu: bool = False,
        check: bool = True,
    ):
        super().__init__()
        options = ReadOptions.checked(
            obs_columns=obs_columns,
            donor_rows=donor_rows,
            missing_donors=missing_donors,
            genotype_memory=genotype_memory,
            to=to,
            densify=densify,
            prefetch=prefetch,
            preload_to_gpu=preload_to_gpu,
            check=check,
        )
        if device is not None and to != "torch":
            raise ValueError(f"device={device!r} needs to='torch', got to={to!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"seed must be an integer of at least 0, got {seed!r}.")
        sampling = SamplingOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            chunk_size=chunk_size,
            preload_nchunks=preload_nchunks,
        )
        sampler, window_cells = sampling.make(batch_sampler)
        cells, genotypes, donor_key = _resolve_sources(cells, genotypes, donor_key)

        source = open_cells(cells)
        codes, ids = source.donors(donor_key or source.donor_key or "donor_id")
        keep = select_cells(source, codes, ids, cells_query=cells_query, donors=donors)
        self._owns_store = not isinstance(genotypes, GenotypeStore)
        self._store = None if genotypes is None else open_genotypes(genotypes, layer=genotype_layer)
        if self._store is None and (variants is not None or genotype_layer is not None):
            raise ValueError("variants and genotype_layer choose among genotypes, but genotypes is None.")
        match = match_donors(codes, ids, keep, None if self._store is None else self._store.ids, missing_donors)
        table = None
        if self._store is not None and match.rows is not None:
            columns = resolve_variants(self._store, variants)
            table = DonorTable(
                self._store, columns, match.rows, memory=options.genotype_memory, nan=missing_donors == "nan"
            )
        self._engine = Engine(
            source,
            match,
            table,
            sampler,
            seed=int(seed),
            window_cells=window_cells,
            options=options,
            device=None if device is None else torch.device(device),
        )
        self._epoch, self._next_epoch = 0, 0
        self._closed = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a new pass: the next epoch."""
        if self._closed:
            raise ValueError("This loader is closed. Make a new one to iterate again.")
        if get_worker_info() is not None:
            raise RuntimeError(
                "DonorLoader has threads of its own and cannot run in the workers of a DataLoader, where each would "
                "yield all cells again. Use num_workers=0."
            )
        self._epoch = self._next_epoch
        self._next_epoch += 1
        return self._engine.start(self._epoch)

    def __repr__(self) -> str:
        table = self._engine.table
        cells = f"{self.n_obs:,} cells × {self.var_names.size:,} genes"
        variants = "" if table is None else f" × {table.n_variants:,} variants"
        return f"DonorLoader({cells}, {self.donors.size:,} donors{variants}, {len(self):,} batches)"

    def __len__(self) -> int:
        """Number of batches of a pass."""
        return self._engine.n_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the passes after it count on from there."""
        if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
            raise ValueError(f"epoch must be an integer of at least 0, got {epoch!r}.")
        self._epoch = self._next_epoch = int(epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the pass that was begun last; before any, of the one to come."""
        return self._epoch

    @property
    def n_obs(self) -> int:
        """Number of cells in use, after `donors`, `cells_query` and ``missing_donors="drop"``."""
        return int((self._engine.match.codes >= 0).sum())

    @property
    def donors(self) -> NDArray[np.object_]:
        """(n_donors,) ids of the donors in use, sorted as text."""
        return self._engine.match.ids

    @property
    def var_names(self) -> NDArray[np.object_]:
        """(n_genes,) names of the columns of ``X``."""
        return self._engine.source.var_names

    @property
    def variant_names(self) -> NDArray[np.object_] | None:
        """(n_variants,) names of the columns of ``donor_features``; `None` without genotypes."""
        table = self._engine.table
        return None if table is None else table.store.names(table.columns)

    def timings(self) -> pd.DataFrame:
        """Where the time of the last pass went, per lane. Unit: seconds.

        ``work``: making its items. ``blocked``: waiting for room, i.e. for a slower reader. ``waited_for``: time that
        its reader waited for it: the lane to look at, where the loop is slow.
        """
        return pd.DataFrame.from_dict(self._engine.seconds, orient="index", columns=["work", "blocked", "waited_for"])

    def close(self) -> None:
        """End all passes and their threads, and close the files that this loader opened. Safe to call again."""
        self._closed = True
        self._engine.close()
        if self._store is not None and self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _resolve_sources(cells: Any, genotypes: Any, donor_key: str | None) -> tuple[Any, Any, str | None]:
    """Cells, genotypes and donor column, where a study or a DonorData brings several of them."""
    if isinstance(cells, str | os.PathLike) and is_study(cells):
        cells = open_study(cells)
    if isinstance(cells, Study):
        brought = cells.genotypes
        donor_key, cells_path = donor_key or cells.donor_key, cells.cells
        return cells_path, brought if genotypes is None else genotypes, donor_key
    if isinstance(cells, os.PathLike):
        cells = Path(cells)
    if genotypes is None and is_donor_data(cells):
        return cells, cells.G, donor_key
    if genotypes is None and isinstance(cells, str | Path) and str(cells).rstrip("/").endswith(".dd.zarr"):
        return cells, cells, donor_key
    return cells, genotypes, donor_key
