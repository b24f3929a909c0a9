"""Options of the loaders: checked together, before anything is opened."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import humanfriendly
import numpy as np
import torch
from annbatch.samplers import RandomSampler, SequentialSampler

from donorloader.samplers import WINDOW_CELLS, DealSampler, Geometry, ShardSampler, choose_geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from annbatch.abc import Sampler

    from donorloader.genotypes import Encoding, MissingCalls
    from donorloader.samplers import Share

__all__ = ["LEAST_SHARDS", "GenotypeOptions", "ReadOptions", "SamplingOptions", "parse_memory"]

_WINDOW_BATCHES = 16  # ready ahead where the sampler does not tell its batch size
_DENSE_BATCHES = 4

#: Canonical shards of small data, so that other numbers of ranks can take over there too.
LEAST_SHARDS = 16


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Which order: the options that a `batch_sampler` replaces."""

    batch_size: int = 1024
    shuffle: bool = True
    drop_last: bool = False
    chunk_size: int | None = None
    preload_nchunks: int | None = None

    def make(self, batch_sampler: Sampler | None) -> tuple[Sampler, int]:
        """The sampler to run, and the cells of a load request as far as known.

        Raises
        ------
        ValueError
            If sizes are impossible, or one of these options is set beside a `batch_sampler`, which decides all of them.
        """
        if batch_sampler is not None:
            changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
            if changed:
                raise ValueError(
                    f"batch_sampler={type(batch_sampler).__name__}(…) decides {', '.join(changed)} itself: set these "
                    "on the sampler, and leave them out here."
                )
            return batch_sampler, WINDOW_CELLS
        geometry = choose_geometry(self.batch_size, self.chunk_size, self.preload_nchunks)
        window = geometry.chunk_size * geometry.preload_nchunks
        settings = {**geometry._asdict(), "batch_size": self.batch_size, "drop_last": self.drop_last}
        if not self.shuffle:
            return SequentialSampler(**settings), window
        # every replica gets the generator of its epoch in place of this one
        return RandomSampler(**settings, rng=np.random.default_rng(0)), window

    def share(
        self, batch_sampler: Sampler | None, share: Share, *, unit: int | None, resumed: tuple[int, int] | None
    ) -> Sampler:
        """The sampler of one rank; `unit` and `resumed` as :class:`donorloader._ordering.MakeSampler` has them."""
        if batch_sampler is not None:
            return DealSampler(batch_sampler, share)
        return ShardSampler(
            share,
            **self._shared_geometry()._asdict(),
            batch_size=unit or self.batch_size,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            resumed=resumed,
        )

    def _shared_geometry(self) -> Geometry:
        """Sizes for the order that ranks share, which batches of other sizes on other ranks continue: any will do."""
        return choose_geometry(1, self.chunk_size, self.preload_nchunks)

    def most_shards(self, n_obs: int) -> int:
        """Canonical shards at the most, where their number is open: each has a chunk in every load request."""
        geometry = self._shared_geometry()
        return max(LEAST_SHARDS, min(geometry.preload_nchunks, n_obs // geometry.chunk_size))


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How batches are read and handed over."""

    obs_columns: tuple[str, ...]
    donor_rows: Literal["batch", "window"]
    to: Literal["torch", "numpy", "jax"]
    device: torch.device | None
    densify: bool
    prefetch: int | None
    preload_to_gpu: bool
    genotypes_on_device: bool | None
    check: bool
    read_next_epoch: bool = False

    @classmethod
    def checked(
        cls,
        *,
        obs_columns: Sequence[str],
        device: str | torch.device | None,
        **options: Any,
    ) -> ReadOptions:
        """Options, or an error that names the wrong one."""
        if isinstance(obs_columns, str):
            raise TypeError(
                f"obs_columns must be a list of names, got the text {obs_columns!r}; use [{obs_columns!r}]."
            )
        choices = {
            "donor_rows": ("batch", "window"),
            "to": ("torch", "numpy", "jax"),
        }
        for name, allowed in choices.items():
            if options[name] not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {options[name]!r}.")
        prefetch = options["prefetch"]
        if prefetch is not None and (
            isinstance(prefetch, bool) or not isinstance(prefetch, int | np.integer) or prefetch < 0
        ):
            raise ValueError(f"prefetch must be a number of batches, 0 for no threads, or None, got {prefetch!r}.")
        if options.get("read_next_epoch") and prefetch == 0:
            raise ValueError("read_next_epoch=True reads ahead on threads, and prefetch=0 allows none: leave one out.")
        if options["preload_to_gpu"] and options["to"] != "torch":
            raise ValueError("preload_to_gpu=True yields torch tensors: use to='torch'.")
        if device is not None and options["to"] != "torch":
            raise ValueError(f"device={device!r} needs to='torch', got to={options['to']!r}.")
        return cls(
            obs_columns=tuple(obs_columns),
            device=None if device is None else torch.device(device),
            **options,
        )

    def batches_ahead(self, batch_size: int | None, window_cells: int) -> int:
        """Batches that may wait for the loop.

        For sparse cells one load request's worth: the next request is then read while the batches of this one are
        consumed. Dense batches are large, and made one by one from sparse ones that are read ahead.
        """
        return self.dense_ahead() if self.densify else self.cells_ahead(batch_size, window_cells)

    def dense_ahead(self) -> int:
        """Batches that may wait where each is large, as dense ones are."""
        return _DENSE_BATCHES if self.prefetch is None else self.prefetch

    def cells_ahead(self, batch_size: int | None, window_cells: int) -> int:
        """Batches that may wait as they are read: what keeps the next stage busy while a load request is read."""
        if self.prefetch is not None:
            return self.prefetch
        return _WINDOW_BATCHES if not batch_size else max(_DENSE_BATCHES, math.ceil(window_cells / batch_size))


@dataclass(frozen=True, kw_only=True)
class GenotypeOptions:
    """Which genotypes, and what they become; each as for :class:`donorloader.DonorLoader`."""

    variants: Any = None
    missing_donors: Literal["error", "drop", "nan"] = "error"
    genotype_layer: str | None = None
    genotype_encoding: Encoding | None = None
    missing_calls: MissingCalls | None = None
    genotype_memory: int = 0

    @classmethod
    def checked(cls, *, genotype_memory: int | str, missing_donors: Any, **options: Any) -> GenotypeOptions:
        """Options, or an error that names the wrong one. What depends on the store is checked when that is open."""
        if missing_donors not in ("error", "drop", "nan"):
            raise ValueError(f"missing_donors must be one of 'error', 'drop', 'nan', got {missing_donors!r}.")
        memory = free_memory() // 4 if genotype_memory == "auto" else parse_memory(genotype_memory, "genotype_memory")
        return cls(genotype_memory=memory, missing_donors=missing_donors, **options)

    def about_genotypes(self) -> list[str]:
        """Names of the options that are set and have no meaning without genotypes."""
        names = ("variants", "genotype_layer", "genotype_encoding", "missing_calls")
        return [name for name in names if getattr(self, name) is not None]


def free_memory() -> int:
    """Memory that this machine can still give, or the half of it all where the system does not tell. Unit: bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def parse_memory(memory: int | str, name: str = "memory") -> int:
    """Bytes of a budget such as ``"2GB"`` (binary units, as annbatch reads them) or ``500_000_000``."""
    if isinstance(memory, int) and not isinstance(memory, bool) and memory >= 0:
        return memory
    if isinstance(memory, str):
        try:
            return int(humanfriendly.parse_size(memory, binary=True))
        except humanfriendly.InvalidSize:
            pass
    raise ValueError(f"{name} must be a number of bytes or a text like '2GB', got {memory!r}.")
