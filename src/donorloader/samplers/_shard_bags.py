"""Bags in a global order that any number of ranks can share, balanced by their cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._bag import BagBatch, BagSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ._share import Share

__all__ = ["ShardBagSampler"]


class ShardBagSampler(BagSampler):
    """One rank's share of a pass over all bags.

    Bags come in random order, or as they are drawn by weight. Of each next ``n_shards`` of them, the largest goes to
    the shard that has the fewest cells so far; without `shuffle`, they come in their own order. Which cells stand for a
    bag depends on its place in the order, and not on the rank that it comes to.

    Parameters
    ----------
    codes
        As for :class:`BagSampler`.
    share
        Which rank of how many; their number divides that of the shards.
    resumed
        An epoch, and how many bags of its global order were delivered: what is left of it is shared.
    options
        The others of :class:`BagSampler`.

    Raises
    ------
    ValueError
        If there are fewer bags than ranks.
    """

    def __init__(self, codes: NDArray[Any], *, share: Share, resumed: tuple[int, int] | None = None, **options: Any):
        super().__init__(codes, **options)
        self._share, self._resumed, self._epoch = share, resumed, 0
        if self._n_draws < share.world_size:
            raise ValueError(
                f"Every rank needs a bag, but there are {self._n_draws:,} bags for {share.world_size:,} ranks. Use "
                "fewer ranks, or finer bags (bag_by)."
            )

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, to know whether it is the resumed one."""
        self._epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a whole pass, the same on every rank."""
        return self._share.n_batches(self._n_draws, self._bags_per_batch)

    def _draw_batches(self) -> Iterator[BagBatch]:
        share, size = self._share, self._bags_per_batch
        begin = self._resumed[1] if self._resumed is not None and self._resumed[0] == self._epoch else 0
        bags = self._balanced(self._draw_bags())
        seed = int(self._rng.integers(2**63))
        taken, repeated = share.take(bags.size, size, begin)
        places = begin + share.rank + share.world_size * np.arange(taken)
        last = begin + share.rank + share.world_size * (taken - 1)  # of this rank, if only before `begin`
        places = np.concatenate([places, np.full(repeated, last)])
        for start in range(0, places.size, size):
            chosen = places[start : start + size]
            rows = [self.draw_cells(bags[place], np.random.default_rng([seed, int(place)])) for place in chosen]
            yield BagBatch.of(bags[chosen], rows)

    def _balanced(self, bags: NDArray[np.int64]) -> NDArray[np.int64]:
        """The bags, ordered such that every ``n_shards``-th of them have as many cells, wherever one starts."""
        if not self._shuffle:
            return bags
        n_shards = self._share.n_shards
        sizes = self._drawn_sizes(bags)
        cells, out = np.zeros(n_shards, dtype=np.int64), np.empty_like(bags)
        for start in range(0, bags.size, n_shards):
            row = slice(start, start + n_shards)
            smallest_first = np.argsort(sizes[row], kind="stable")
            fullest_first = self._rng.permutation(smallest_first.size)  # so that the first ones are not the smallest
            fullest_first = fullest_first[np.argsort(-cells[fullest_first], kind="stable")]
            out[row][fullest_first] = bags[row][smallest_first]
            cells[fullest_first] += sizes[row][smallest_first]
        return out
