"""What every loader does, whatever its batches look like: two lanes, one join, pass after pass."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from donorloader._buffers import BufferPool
from donorloader.cells import stream_cells, stream_dense, stream_windows
from donorloader.genotypes import plan_windows, stream_genotypes
from donorloader.pipeline import Conveyor, DeviceCopier, Joiner, Pass, join_lanes, silence_csr_warning, to_torch
from donorloader.samplers import DonorSampler, EpochSampler, SubsetSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler

    from donorloader._match import DonorMatch
    from donorloader._options import ReadOptions
    from donorloader.cells import CellBatch, CellSource
    from donorloader.genotypes import DonorTable, GenotypeBatch

__all__ = ["Engine"]

# Gathered rows that may wait for the loop: enough to stay ahead, however wide the genotypes. Unit: bytes.
_GATHERED_BYTES = 256 << 20


class Engine:
    """Runs passes over joined batches.

    Parameters
    ----------
    source
        The cells.
    match
        The donors in use, and where their cells and rows are.
    table
        The genotype rows, or `None` for cells only.
    sampler
        Order of the cells in use; samples from these alone.
    seed
        Seed of all passes.
    window_cells
        Cells of a load request, as far as known.
    options
        How batches are read and handed over.
    device
        Where tensors go; `None` leaves them on the CPU.
    """

    def __init__(
        self,
        source: CellSource,
        match: DonorMatch,
        table: DonorTable | None,
        sampler: Sampler,
        *,
        seed: int,
        window_cells: int,
        options: ReadOptions,
        device: torch.device | None,
    ):
        self.source, self.match, self.table, self._options, self._device = source, match, table, options, device
        if (used := match.keep) is not None:
            sampler = SubsetSampler(sampler, used)
        sampler.validate(source.n_obs)
        # dense batches are filled one by one from a window in CSR; all other batches are split by annbatch
        self._by_window = options.densify and source.sparse and not options.preload_to_gpu
        self._sampler = EpochSampler(sampler, seed=seed, whole_windows=self._by_window)
        self._loader = source.loader(self._sampler, preload_to_gpu=options.preload_to_gpu)
        self._joiner = Joiner(match.codes, match.ids, None if table is None else table.store.ids)
        self._obs = source.obs(options.obs_columns) if options.obs_columns else None
        self._ahead = options.batches_ahead(sampler.batch_size, window_cells)
        self._pool = BufferPool(keep=4)
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.seconds: dict[str, dict[str, float]] = {}
        if options.to == "torch":
            silence_csr_warning()

    @property
    def n_batches(self) -> int:
        """Number of batches of a pass."""
        return self._sampler.n_batches(self.source.n_obs)

    def start(self, epoch: int) -> Pass:
        """Begin a pass; its lanes run at once."""
        conveyor = Conveyor(epoch, threads=self._options.prefetch != 0)
        try:
            pass_ = Pass(conveyor, self._joined(conveyor, epoch))
        except BaseException:
            conveyor.stop()
            raise
        self._passes.add(pass_)
        self.seconds = conveyor.seconds
        return pass_

    def close(self) -> None:
        """End all passes."""
        for pass_ in list(self._passes):
            pass_.close()

    def _joined(self, conveyor: Conveyor, epoch: int) -> Iterator[dict[str, Any]]:
        """The batches of one pass: lanes → join → device."""
        batches = join_lanes(
            self._cell_lane(conveyor, epoch),
            self._genotype_lane(conveyor, epoch),
            self._joiner,
            self._assemble,
            check=self._options.check,
        )
        if self._device is None:
            return batches
        copier = DeviceCopier(self._device)
        return copier.finish(conveyor.lane("device", copier.start(batches), capacity=2))

    def _cell_lane(self, conveyor: Conveyor, epoch: int) -> Iterator[CellBatch]:
        if not self._by_window:
            cells = stream_cells(self._loader, self._sampler, epoch, self.source.nodes)
            return conveyor.lane("cells", cells, capacity=self._ahead)
        windows = conveyor.lane(
            "cells",
            stream_windows(self._loader, self._sampler, epoch, self.source.nodes),
            capacity=1,
            batches=lambda window: len(window.sizes),
        )
        return conveyor.lane("dense cells", stream_dense(windows, self._pool), capacity=self._ahead)

    def _genotype_lane(self, conveyor: Conveyor, epoch: int) -> Iterator[GenotypeBatch]:
        sampler = DonorSampler(self._sampler.sampler, self.match.codes, seed=self._sampler.seed, epoch=epoch)
        windows = plan_windows(sampler.sample(self.source.n_obs), self.table, self._pool)
        ahead = self._ahead
        if self.table is not None:
            if not self.table.resident:
                # reading is a lane of its own, so that the next window is read while this one is gathered
                windows = conveyor.lane("genotype rows", windows, capacity=1, batches=lambda w: len(w[0]["splits"]))
            if self._options.donor_rows == "batch":
                rows = min(self.match.ids.size, self._sampler.batch_size or self.match.ids.size)
                ahead = max(2, min(ahead, _GATHERED_BYTES // (rows * self.table.row_bytes)))
        genotypes = stream_genotypes(windows, self.table, self._pool, self._options.donor_rows)
        return conveyor.lane("genotypes", genotypes, capacity=ahead)

    def _assemble(self, cells: CellBatch, genotypes: GenotypeBatch) -> dict[str, Any]:
        X = cells.X
        if self._options.densify and not self._by_window:
            X = X.to_dense().float() if isinstance(X, torch.Tensor) else np.asarray(X, dtype=np.float32)
        batch = {
            "X": X,
            "index": cells.index,
            "obs": None if self._obs is None else self._obs.take(cells.index),
            "unique_donors": self.match.ids[genotypes.donors],
            "donor_idx": genotypes.donor_idx,
            "donor_features": genotypes.features,
        }
        if self._options.to == "torch":
            for key in ("X", "index", "donor_idx", "donor_features"):
                batch[key] = None if batch[key] is None else to_torch(batch[key])
        return batch
