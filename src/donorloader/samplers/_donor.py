"""Which donors the coming batches need: a replay of the cells' sampler, told in donors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from ._replay import replay
from ._resume import delivered_batches
from ._rows import request_rows
from ._wrapper import WrappingSampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

__all__ = ["DonorRequest", "DonorSampler", "donor_requests"]


class DonorRequest(TypedDict):
    """The donors of one load request of cells (a window), and where each cell of its batches finds its own.

    Attributes
    ----------
    requests
        (n_window_donors,) int64, the distinct donors of the window, ascending: rows of the donor table.
    splits
        Per batch, (n_donors,) int64: positions in `requests` of the batch's distinct donors, ascending.
    donor_idx
        Per batch, (n_cells,) int64: position in the batch's split of each cell's donor, so that cell j of batch b is
        of donor ``requests[splits[b][donor_idx[b][j]]]``. Where batches are of bags, `splits` has one entry per bag,
        in order of the bags, and this is the bag of each cell.
    bags
        Per batch, (n_bags,) int64: the bags, as the sampler numbers them; `None` where batches are not of bags.
    """

    requests: NDArray[np.int64]
    splits: list[NDArray[np.int64]]
    donor_idx: list[NDArray[np.int64]]
    bags: list[NDArray[np.int64]] | None


class DonorSampler(WrappingSampler):
    """Say which donors each batch of another sampler needs, without reading a cell.

    The order of cells is a function of a seed, so a replica of the cells' sampler with the same seed and epoch tells
    the donors of every batch ahead of time. Its load requests are over the donor table: the distinct donors of each
    load request of cells, split into the donors of each batch.

    Parameters
    ----------
    sampler
        The sampler of the cells: any annbatch sampler or chain of them. A copy is kept and never advanced.
    codes
        (n_cells,) integers, the donor of each cell as a row of the donor table; -1 for cells that are not in use, which
        the sampler must not draw.
    seed
        Seed of the passes, the one that the cells' side uses.
    epoch
        Epoch of the next pass; :meth:`set_epoch` changes it.
    skip
        Batches of every pass to leave out, from the first on.

    Examples
    --------
    >>> from annbatch.samplers import SequentialSampler
    >>> cells = SequentialSampler(chunk_size=2, preload_nchunks=2, batch_size=2)
    >>> donors = DonorSampler(cells, np.array([3, 3, 0, 3]))
    >>> [request] = donors.sample(4)
    >>> request["requests"].tolist(), [i.tolist() for i in request["donor_idx"]]
    ([0, 3], [[0, 0], [0, 1]])
    """

    def __init__(self, sampler: Sampler, codes: NDArray[Any], *, seed: int = 0, epoch: int = 0, skip: int = 0):
        codes = np.asarray(codes)
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise TypeError(f"codes must be one integer per cell, got an array of {codes.dtype}, shape {codes.shape}.")
        super().__init__(sampler)
        self._codes = codes
        self._seed, self._epoch, self._skip = seed, epoch, skip

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self._epoch = epoch

    def validate(self, n_obs: int) -> None:
        """Check that each of `n_obs` cells has a donor, and let the wrapped sampler check its settings."""
        if n_obs != self._codes.size:
            raise ValueError(f"codes must name the donor of each of the {n_obs} cells, but has {self._codes.size}.")
        self._sampler.validate(n_obs)

    def sample(self, n_obs: int) -> Iterator[DonorRequest]:  # type: ignore[override] # a load request, and more
        """Donor requests of a pass over `n_obs` cells, one per load request of the cells' sampler."""
        self.validate(n_obs)
        return self._sample(n_obs)

    def _sample(self, n_obs: int) -> Iterator[DonorRequest]:  # type: ignore[override]
        requests = replay(self._sampler, n_obs, seed=self._seed, epoch=self._epoch, skip=self._skip)
        return donor_requests(requests, self._codes)


def donor_requests(requests: Iterable[LoadRequest], codes: NDArray[Any]) -> Iterator[DonorRequest]:
    """Load requests of cells, told in donors; the parts of a batch that takes several requests become one.

    Parameters
    ----------
    requests
        Complete load requests of cells.
    codes
        (n_cells,) the donor of each cell, as for :class:`DonorSampler`.
    """
    n_donors = int(codes.max()) + 1 if codes.size else 0
    parts: list[NDArray[np.int64]] = []  # of a batch that is read in several requests
    for request in requests:
        if not request["splits"]:
            continue
        # a donor may be on rows that no split uses (a dropped tail, a gap that a filter reads across)
        drawn = codes[request_rows(request["requests"])][np.concatenate(request["splits"])]
        if drawn.min() < 0:
            raise ValueError("The sampler draws a cell that is not selected (its donor code is -1).")
        sizes = [len(split) for split in request["splits"]]
        more = cast("dict[str, Any]", request)
        if (whole := more.get("part_of")) is not None:
            parts.append(drawn)
            sizes = [sum(part.size for part in parts)]
            if sizes[0] < whole:
                continue
            drawn, parts = np.concatenate(parts), []
        donors, position = _distinct(drawn, n_donors)
        batches = np.split(position, np.cumsum(sizes)[:-1])
        if (offsets := more.get("offsets")) is None:
            pairs = [_distinct(batch, donors.size) for batch in batches]
        else:
            pairs = [_by_bag(batch, bounds) for batch, bounds in zip(batches, offsets, strict=True)]
        done, bags = delivered_batches(request), more.get("bags")
        yield {
            "requests": donors,
            "splits": [split for split, _ in pairs[done:]],
            "donor_idx": [index for _, index in pairs[done:]],
            "bags": None if bags is None else bags[done:],
        }


def _by_bag(position: NDArray[np.int64], offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Donor of each bag, and bag of each cell."""
    split = position[offsets[:-1]]
    bag = np.repeat(np.arange(split.size), np.diff(offsets))
    if not np.array_equal(split[bag], position):
        raise ValueError("A bag may hold cells of one donor only, but the sampler draws one with cells of several.")
    return split, bag


def _distinct(codes: NDArray[Any], n_codes: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct codes, ascending, and the position of each code among them.

    Marks in a table of all codes: 20 times faster than the sort in :func:`numpy.unique`, at one byte a donor.
    """
    present = np.zeros(n_codes, dtype=bool)
    present[codes] = True
    distinct = np.flatnonzero(present).astype(np.int64, copy=False)
    position = np.empty(n_codes, dtype=np.int64)
    position[distinct] = np.arange(distinct.size)
    return distinct, position[codes]
