"""Any sampler on several ranks: its load requests, dealt out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._rows import complete_requests, cover_unsorted, request_rows
from ._wrapper import WrappingSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

    from ._share import Share

__all__ = ["DealSampler"]


class DealSampler(WrappingSampler):
    """One rank's share of what any sampler draws.

    Every rank takes one of each next W load requests, whole. Where these have different numbers of batches, and at the
    end, their batches are dealt one by one.

    Parameters
    ----------
    sampler
        Any annbatch sampler; a copy is kept.
    share
        Which rank of how many, and what to do with a last round of fewer batches than ranks.
    """

    def __init__(self, sampler: Sampler, share: Share):
        super().__init__(sampler)
        self._share = share
        self._split_rng = np.random.default_rng(0)  # only for splits that the wrapped sampler leaves open

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a pass, the same on every rank."""
        whole, rest = divmod(self._sampler.n_batches(n_obs), self._share.world_size)
        return whole + (rest > 0 and self._share.uneven == "pad")

    def validate(self, n_obs: int) -> None:
        """Check that there is a batch for each rank, and let the wrapped sampler check its settings."""
        self._sampler.validate(n_obs)
        if (there := self._sampler.n_batches(n_obs)) < self._share.world_size:
            raise ValueError(f"Every rank needs a batch, but there are {there:,} for {self._share.world_size:,} ranks.")

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rank, ranks = self._share.rank, self._share.world_size
        turn: list[LoadRequest] = []
        loose: list[NDArray[np.int64]] = []  # batches to be dealt one by one
        for request in complete_requests(self._sampler, n_obs, self._split_rng):
            if "part_of" in request or "bags" in request:
                raise ValueError(
                    "Bags are shared among ranks by a BagLoader, not by a sampler of bags given to another."
                )
            if not request["splits"]:
                continue
            turn.append(request)
            if len(turn) < ranks:
                continue
            if len({len(each["splits"]) for each in turn}) == 1:
                yield turn[rank]
            else:
                loose += _batches(turn)
            turn = []
            if whole := len(loose) // ranks * ranks:
                yield _request(loose[rank:whole:ranks])
                loose = loose[whole:]
        loose += _batches(turn)
        whole = len(loose) // ranks * ranks
        mine, rest = loose[rank:whole:ranks], loose[whole:]
        if rest and self._share.uneven == "pad":
            mine.append(rest[rank % len(rest)])
        if mine:
            yield _request(mine)


def _batches(requests: list[LoadRequest]) -> list[NDArray[np.int64]]:
    return [request_rows(each["requests"])[split] for each in requests for split in each["splits"]]


def _request(batches: list[NDArray[np.int64]]) -> LoadRequest:
    runs, position = cover_unsorted(np.concatenate(batches))
    return {"requests": runs, "splits": np.split(position, np.cumsum([batch.size for batch in batches])[:-1])}
