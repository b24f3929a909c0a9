"""The sampler that cells are read by: any sampler, made a function of (seed, epoch)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ._replay import replay
from ._resume import delivered_batches
from ._wrapper import WrappingSampler

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

__all__ = ["EpochSampler", "RequestPlan"]


class RequestPlan(NamedTuple):
    """What a load request holds.

    Attributes
    ----------
    sizes
        Cells of each of its batches, or of its part of one.
    part_of
        Cells of the whole batch, where the request is a part of it; else `None`.
    """

    sizes: list[int]
    part_of: int | None


class EpochSampler(WrappingSampler):
    """Run a sampler so that its order is a pure function of (seed, epoch).

    Parameters
    ----------
    sampler
        Any annbatch sampler; a copy is kept, so later changes to the original have no effect.
    seed
        With the epoch, what the order depends on.
    """

    def __init__(self, sampler: Sampler, *, seed: int):
        super().__init__(sampler)
        self._seed = seed
        self._armed = threading.local()

    @property
    def sampler(self) -> Sampler:
        """The sampler that is replayed."""
        return self._sampler

    @property
    def seed(self) -> int:
        """The seed of every pass."""
        return self._seed

    def arm(self, epoch: int, plan: deque[RequestPlan], *, skip: int = 0) -> None:
        """Set the epoch of the next pass begun on this thread.

        One reader serves every pass, also passes that run side by side on threads of their own, and it calls
        :meth:`sample` without an epoch; hence the thread-local.

        Parameters
        ----------
        epoch
            The epoch to run.
        plan
            Gains an entry per load request, before its batches come.
        skip
            Batches that were delivered before, which do not come again.
        """
        self._armed.epoch, self._armed.plan, self._armed.skip = epoch, plan, skip

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        """Load requests of the armed epoch."""
        if (epoch := getattr(self._armed, "epoch", None)) is None:
            raise RuntimeError("EpochSampler.sample needs `arm(epoch)` on the same thread before.")
        plan = self._armed.plan
        self._armed.epoch = self._armed.plan = None
        requests = replay(self._sampler, n_obs, seed=self._seed, epoch=epoch, skip=self._armed.skip)
        return self._run(requests, plan)

    def _run(self, requests: Iterator[LoadRequest], plan: deque[RequestPlan]) -> Iterator[LoadRequest]:
        for request in requests:
            splits = request["splits"][delivered_batches(request) :]
            if not splits:
                continue
            plan.append(RequestPlan([len(split) for split in splits], cast("dict[str, Any]", request).get("part_of")))
            yield {**request, "splits": splits}

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.sample(n_obs)
