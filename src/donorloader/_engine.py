"""What every loader does, whatever its batches look like: two lanes, one join, pass after pass."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch

from donorloader._buffers import BufferPool
from donorloader.cells import stream_cells, stream_dense
from donorloader.genotypes import DeviceRows, may_lie_on_device, plan_windows, stream_genotypes
from donorloader.pipeline import (
    Conveyor,
    DeviceCopier,
    Joiner,
    Pass,
    jax_converter,
    join_lanes,
    silence_csr_warning,
    to_torch,
)
from donorloader.samplers import DonorSampler, EpochSampler

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from annbatch.abc import Sampler

    from donorloader._options import ReadOptions
    from donorloader._tables import Tables
    from donorloader.cells import CellBatch
    from donorloader.genotypes import GenotypeBatch
    from donorloader.samplers import DonorRequest

    type Transform = Callable[[dict[str, Any]], dict[str, Any]]

__all__ = ["Engine"]

# Batches between the lanes and the join; those that are ready wait behind it.
_HAND_OVER = 2

# Batches that do not wait behind the join: at work, between lanes, and with the loop. Their memory is used again too.
_ON_THE_WAY, _FEW = 8, 4

# Memory of sparse batches that is used again: that of two load requests, unless they are large. Unit: batches; bytes.
_CELLS_KEPT, _CELL_BYTES_KEPT = 32, 256 << 20


class Engine:
    """Runs passes over joined batches.

    Parameters
    ----------
    tables
        Cells and genotypes, matched.
    sampler
        Order of the cells, or of the bags; draws only cells in use.
    seed
        Seed of all passes.
    window_cells
        Cells of a load request, as far as known.
    options
        How batches are read and handed over.
    room
        What the batches that wait for the loop may take; one that is larger waits alone. Default: no limit but their
        number. Unit: bytes of X.
    add_fields
        Adds the fields of a batch that only some loaders have, given what the genotype side knows of it.
    """

    def __init__(
        self,
        tables: Tables,
        sampler: Sampler,
        *,
        seed: int,
        window_cells: int,
        options: ReadOptions,
        room: int | None = None,
        add_fields: Callable[[dict[str, Any], GenotypeBatch], None] | None = None,
    ):
        source, match, table = tables.source, tables.match, tables.table
        sampler.validate(source.n_obs)
        self._source, self._match, self._table, self._options = source, match, table, options
        self._room, self._add_fields = room, add_fields
        self._fills_dense = options.densify and source.sparse and not options.preload_to_gpu
        self._seed = seed
        self._cells_pool = BufferPool(keep=_CELLS_KEPT, keep_bytes=_CELL_BYTES_KEPT)
        self.set_sampler(sampler)
        self._joiner = Joiner(match.codes, match.ids, None if table is None else table.store.ids)
        self._obs = source.obs(options.obs_columns) if options.obs_columns else None
        self._ahead = options.batches_ahead(sampler.batch_size, window_cells)
        self._cells_ahead = options.cells_ahead(sampler.batch_size, window_cells)
        # where a budget limits what waits, only a few batches are under way, of sizes that may differ much
        self._dense_pool = BufferPool(keep=self._ahead + _ON_THE_WAY if room is None else _FEW)
        self._genotypes_pool = BufferPool(keep=self._ahead + _ON_THE_WAY)
        self._device_rows = None
        if table is not None and may_lie_on_device(table, options.device, options.genotypes_on_device):
            self._device_rows = DeviceRows(table, options.device)  # type: ignore[arg-type] # there is one, it says
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._convert: Callable[[Any], Any] | None = None
        if options.to == "torch":
            silence_csr_warning()
            self._convert = to_torch
        elif options.to == "jax":
            self._convert = jax_converter()

    @property
    def reads_next_epoch(self) -> bool:
        """Whether a pass is to begin while the one before it ends."""
        return self._options.read_next_epoch

    @property
    def n_batches(self) -> int:
        """Number of batches of a pass."""
        return self._sampler.n_batches(self._source.n_obs)

    def set_sampler(self, sampler: Sampler) -> None:
        """Set the order of passes that are begun from now on."""
        self._sampler = EpochSampler(sampler, seed=self._seed)
        self._loader = self._source.loader(
            self._sampler,
            preload_to_gpu=self._options.preload_to_gpu,
            pool=self._cells_pool,
            threads=self._options.prefetch != 0,
            as_stored=self._fills_dense,
        )

    @property
    def sampler(self) -> EpochSampler:
        """The order of the batches."""
        return self._sampler

    def plan(self, epoch: int, *, skip: int = 0) -> Iterator[DonorRequest]:
        """The donors of every batch of a pass from batch `skip` on, without reading anything."""
        inner, seed = self._sampler.sampler, self._sampler.seed
        sampler = DonorSampler(inner, self._match.codes, seed=seed, epoch=epoch, skip=skip)
        return sampler.sample(self._source.n_obs)

    def start(
        self, epoch: int, *, skip: int = 0, transform: Transform | None = None, called: threading.Event | None = None
    ) -> Pass:
        """Begin a pass; its lanes run at once.

        Parameters
        ----------
        epoch, skip
            Which epoch, and from which of its batches on.
        transform
            Makes something else of each batch: on a lane, too, unless batches are on a device, where the loop's own
            thread does, as it waits for their copies.
        called
            Set once the pass before this one is over. Where rows of genotypes do not all stay in memory, they are read
            from then on: their budget is for one pass.
        """
        conveyor = Conveyor(epoch, threads=self._options.prefetch != 0)
        try:
            batches = self._joined(conveyor, epoch, skip, called)
            if transform is not None:
                batches = map(transform, batches)
                if self._options.device is None:
                    batches = conveyor.lane("transform", batches, capacity=self._options.dense_ahead())
            pass_ = Pass(conveyor, batches, skipped=skip)
        except BaseException:
            conveyor.stop()
            raise
        self._passes.add(pass_)
        return pass_

    def close(self) -> None:
        """End all passes, and release what is held for the next one."""
        for pass_ in list(self._passes):
            pass_.cut_short()
        for pool in (self._cells_pool, self._dense_pool, self._genotypes_pool):
            pool.clear()

    def _joined(
        self, conveyor: Conveyor, epoch: int, skip: int, called: threading.Event | None
    ) -> Iterator[dict[str, Any]]:
        """The batches of one pass: lanes → join → device."""
        batches = join_lanes(
            self._cell_lane(conveyor, epoch, skip),
            self._genotype_lane(conveyor, epoch, skip, called),
            self._joiner,
            self._assemble,
            check=self._options.check,
        )
        # on a lane of its own, so that the loop takes a batch that is ready and does nothing else between two steps
        batches = conveyor.lane("join", batches, capacity=self._joined_ahead(), room=self._room, size=_size)
        if self._options.device is None:
            return batches
        copier = DeviceCopier(self._options.device, None if self._device_rows is None else self._gather_on_device)
        return copier.finish(conveyor.lane("device", copier.start(batches), capacity=2))

    def _joined_ahead(self) -> int:
        """Batches that may wait behind the join: fewer where their rows of genotypes are wide."""
        if self._table is None or self._options.donor_rows != "batch":
            return self._ahead
        return self._table.batches_ahead(self._ahead, self._sampler.batch_size)

    def _cell_lane(self, conveyor: Conveyor, epoch: int, skip: int) -> Iterator[CellBatch]:
        cells = stream_cells(self._loader, self._sampler, epoch, self._source.nodes, skip=skip)
        # where few batches wait behind the join, more do here: the next load request is read when all of this one have
        # left, and what makes them dense, or gathers wide rows for them, is to be busy meanwhile
        joined = 0 if self._fills_dense else self._joined_ahead()
        capacity = max(_HAND_OVER, self._cells_ahead - joined)
        cells = conveyor.lane("cells", cells, capacity=capacity, room=self._room, size=_size)
        if not self._fills_dense:
            return cells
        dense = stream_dense(cells, self._dense_pool)
        return conveyor.lane("dense cells", dense, capacity=_HAND_OVER, room=self._room, size=_size)

    def _genotype_lane(
        self, conveyor: Conveyor, epoch: int, skip: int, called: threading.Event | None
    ) -> Iterator[GenotypeBatch]:
        read_here = self._table if self._device_rows is None else None  # else rows are taken where they lie
        windows = plan_windows(
            self.plan(epoch, skip=skip),
            read_here,
            lambda: chain(self.plan(epoch, skip=skip), self.plan(epoch + 1)),
            self._options.donor_rows,
            lambda: conveyor.stopped,
            called,
        )
        if read_here is not None and not read_here.resident:
            # reading is a lane of its own, so that the next window is read while this one is gathered
            windows = conveyor.lane("genotype rows", windows, capacity=1, batches=lambda w: len(w[0]["splits"]))
        genotypes = stream_genotypes(windows, self._table, self._genotypes_pool, self._options.donor_rows)
        return conveyor.lane("genotypes", genotypes, capacity=_HAND_OVER)

    def _gather_on_device(self, batch: dict[str, Any]) -> None:
        if self._device_rows is not None:
            batch["donor_features"] = self._device_rows.gather(batch["donor_features"])

    def _assemble(self, cells: CellBatch, genotypes: GenotypeBatch) -> dict[str, Any]:
        X = cells.X
        if self._options.densify and not self._fills_dense:
            X = X.to_dense().float() if isinstance(X, torch.Tensor) else np.asarray(X, dtype=np.float32)
        batch = {
            "X": X,
            "index": cells.index,
            "obs": None if self._obs is None else self._obs.take(cells.index),
            "unique_donors": self._match.ids[genotypes.donors],
            "donor_idx": genotypes.donor_idx,
            # where rows lie on the device, the codes of the donors go there and become their rows
            "donor_features": genotypes.features if self._device_rows is None else genotypes.donors,
        }
        if self._add_fields is not None:
            self._add_fields(batch, genotypes)
        if self._convert is not None:
            _convert_fields(batch, self._convert)
        return batch


def _convert_fields(fields: dict[str, Any], convert: Callable[[Any], Any]) -> None:
    """Turn arrays and matrices into those of another library, in place."""
    for key, value in fields.items():
        if isinstance(value, dict):
            _convert_fields(value, convert)
        elif sp.issparse(value) or (isinstance(value, np.ndarray) and value.dtype != object):
            fields[key] = convert(value)


def _size(batch: CellBatch | dict[str, Any]) -> int:
    """What the cells of a batch take. Unit: bytes."""
    X = batch["X"] if isinstance(batch, dict) else batch.X
    if sp.issparse(X) or hasattr(X, "indptr"):
        return int(X.data.nbytes + X.indices.nbytes)
    if isinstance(X, torch.Tensor) and X.layout != torch.strided:
        return X.values().nbytes + X.col_indices().nbytes
    return int(X.nbytes)
