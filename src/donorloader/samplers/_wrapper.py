"""A sampler around another: what both have in common."""

from __future__ import annotations

import copy

from annbatch.abc import Sampler

__all__ = ["WrappingSampler"]


class WrappingSampler(Sampler):
    """Base of samplers that run another one, of which they keep a copy.

    Parameters
    ----------
    sampler
        Any annbatch sampler; later changes to it have no effect.
    """

    def __init__(self, sampler: Sampler):
        self._sampler = copy.deepcopy(sampler)

    @property
    def batch_size(self) -> int | None:
        return self._sampler.batch_size

    @property
    def shuffle(self) -> bool:
        return self._sampler.shuffle

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a pass over `n_obs` rows."""
        return self._sampler.n_batches(n_obs)

    def validate(self, n_obs: int) -> None:
        """Let the wrapped sampler check its settings against `n_obs`."""
        self._sampler.validate(n_obs)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a sampler that takes it."""
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
