"""Cells in a global order that any number of ranks can share, each reading only its own chunks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from annbatch.abc import Sampler

from ._rows import cover_unsorted, split_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

    from ._share import Share

__all__ = ["ShardSampler"]


class ShardSampler(Sampler):
    """One rank's share of a pass over all cells, in random or stored order.

    Chunks come in an order that depends on the epoch. A *canonical window* is the next ones, as many to each canonical
    shard; the cells of a shard's chunks are shuffled, and the window's order takes one cell of each shard in turn. A
    rank takes the cells of its shards, so it reads no other chunks (but for one that two shards share at the end of
    the epoch), and its batches are of cells of all of its chunks of a window.

    Parameters
    ----------
    share
        Which rank of how many; their number divides that of the shards.
    chunk_size, preload_nchunks
        Contiguous cells a read, and reads a load request, as near as whole windows allow.
    batch_size
        Cells a batch of one rank.
    shuffle
        Whether the order is random.
    drop_last
        Whether to leave out a last batch that is not full.
    resumed
        An epoch, and how many cells of its global order were delivered by any number of ranks: what is left of it is
        shared. Other epochs are whole.
    rng
        Generator of the order; a loader replaces it by that of each epoch.
    """

    _rng: np.random.Generator

    def __init__(
        self,
        share: Share,
        *,
        chunk_size: int,
        preload_nchunks: int,
        batch_size: int,
        shuffle: bool = True,
        drop_last: bool = False,
        resumed: tuple[int, int] | None = None,
        rng: np.random.Generator | None = None,
    ):
        self._share, self._resumed, self._epoch = share, resumed, 0
        self._chunk_size, self._preload_nchunks, self._batch_size = chunk_size, preload_nchunks, batch_size
        self._shuffle, self._drop_last = shuffle, drop_last
        self._rng = np.random.default_rng(0) if rng is None else rng
        # chunks of each shard in a window, and cells of the window
        self._each = max(1, round(preload_nchunks / share.n_shards))
        self._window = self._each * share.n_shards * chunk_size

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def shuffle(self) -> bool:
        return self._shuffle

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch, to know whether it is the resumed one."""
        self._epoch = epoch

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a whole pass, the same on every rank."""
        return self._share.n_batches(n_obs, self._batch_size, drop_last=self._drop_last)

    def validate(self, n_obs: int) -> None:
        """Check that there is a cell for each rank."""
        if n_obs < self._share.world_size:
            raise ValueError(f"Every rank needs a cell, but there are {n_obs:,} for {self._share.world_size:,} ranks.")

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        share, size = self._share, self._batch_size
        begin = self._resumed[1] if self._resumed is not None and self._resumed[0] == self._epoch else 0
        left, repeat = share.take(n_obs, size, begin, drop_last=self._drop_last)
        starts, short = self._chunks(n_obs)
        seed = int(self._rng.integers(2**63))
        column = (begin + share.rank) % share.world_size  # the first of this rank's shards
        group, held = self._windows_per_request(), np.empty(0, dtype=np.int64)
        for number in range(begin // self._window, -(-n_obs // self._window)):
            if not left:
                break
            rows = self._rows_of(number, starts, short, seed, column)
            done = begin - number * self._window - column  # up to here in the window, all is delivered
            rows = rows[max(0, -(-done // share.world_size)) :][:left]
            held, left = np.concatenate([held, rows]), left - rows.size
            if left and (number + 1) % group == 0 and held.size >= size:
                whole = held.size // size * size
                yield _request(held[:whole], size)
                held = held[whole:]
        if repeat and not held.size:  # nothing is left for this rank: its cell before
            number, place = divmod(begin + share.rank - share.world_size, self._window)
            rows = self._rows_of(number, starts, short, seed, column)
            held, repeat = rows[place // share.world_size :][:1], 0
        if held.size:
            yield _request(np.concatenate([held, held[-1:].repeat(repeat)]), size)

    def _chunks(self, n_obs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First row of each whole chunk, in order of the epoch, and the rows of the one that is short."""
        n_chunks, n_short = divmod(n_obs, self._chunk_size)
        place = int(self._rng.integers(n_chunks + 1)) if self._shuffle else n_chunks  # not always the same cells
        starts = np.arange(n_chunks, dtype=np.int64) * self._chunk_size
        starts[place:] += n_short
        first = place * self._chunk_size
        return self._rng.permutation(starts) if self._shuffle else starts, np.arange(first, first + n_short)

    def _windows_per_request(self) -> int:
        """Windows that are read at once: near the cells that a load request should have, and whole batches."""
        mine, wanted = self._window // self._share.world_size, self._chunk_size * self._preload_nchunks
        step = self._batch_size // math.gcd(self._batch_size, mine)
        windows = step * max(1, round(wanted / (mine * step)))
        # else some cells of a request wait for the next, which reads their chunks again
        return windows if windows * mine <= 2 * max(wanted, mine) else max(1, round(wanted / mine))

    def _rows_of(
        self, number: int, starts: NDArray[np.int64], short: NDArray[np.int64], seed: int, column: int
    ) -> NDArray[np.int64]:
        """Rows of a window that are of this rank's shards, in order."""
        n_shards = self._share.n_shards
        mine = range(column, n_shards, self._share.world_size)
        offsets = np.arange(self._chunk_size)
        chunks = starts[number * self._each * n_shards :][: self._each * n_shards]
        if chunks.size == self._each * n_shards:
            parts = [(chunks[c * self._each : (c + 1) * self._each, None] + offsets).ravel() for c in mine]
        else:  # the last window: shards of as many cells, but for one more in the first ones
            rows = np.concatenate([(chunks[:, None] + offsets).ravel(), short])
            parts_of_all = np.array_split(rows, n_shards)
            parts = [parts_of_all[c] for c in mine]
        if self._shuffle:
            parts = [np.random.default_rng([seed, number, c]).permutation(p) for c, p in zip(mine, parts, strict=True)]
        least = min(part.size for part in parts)
        in_turn = np.stack([part[:least] for part in parts], axis=1).ravel()
        return np.concatenate([in_turn, *(part[least:] for part in parts)])


def _request(rows: NDArray[np.int64], size: int) -> LoadRequest:
    runs, position = cover_unsorted(rows, bridge=False)  # chunks in between are of other ranks
    return {"requests": runs, "splits": split_evenly(position, size)}
