"""The genotype lane's work: for every batch to come, the rows of its donors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ._cache import LOOK, PassStopped

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool
    from donorloader.samplers import DonorRequest

    from ._table import DonorTable, WindowRows

__all__ = ["GenotypeBatch", "plan_windows", "stream_genotypes"]


@dataclass(frozen=True)
class GenotypeBatch:
    """What the genotype side knows of one batch.

    Attributes
    ----------
    donors
        (n_donors,) int64 codes of the donors, one per row of `features`.
    rows
        (n_donors,) int64 row of the store that was read for each donor, -1 where it has none; `None` without store.
    features
        (n_donors, n_variants) genotypes, or `None` without a store. The same object for all batches that share it.
    donor_idx
        (n_cells,) int64, the row of `features` of each cell.
    bags
        (n_bags,) int64, the bags of the batch, one per row of `features`; `None` where batches are not of bags.
    """

    donors: NDArray[np.int64]
    rows: NDArray[np.int64] | None
    features: NDArray[Any] | None
    donor_idx: NDArray[np.int64]
    bags: NDArray[np.int64] | None


def plan_windows(
    requests: Iterable[DonorRequest],
    table: DonorTable | None,
    trace: Callable[[], Iterable[DonorRequest]],
    donor_rows: Literal["batch", "window"],
    stopped: Callable[[], bool],
    called: threading.Event | None = None,
) -> Iterator[tuple[DonorRequest, WindowRows | None]]:
    """Each donor request with the rows of its donors.

    Parameters
    ----------
    requests
        The donors of each load request to come.
    table
        The rows; `None` without genotypes.
    trace
        Plans the same requests, and those of the next pass after them; called where rows do not stay, so that their
        order matters.
    donor_rows
        Where one load request's rows are more than the budget holds, those of its batches are read one after the other,
        unless its batches share them.
    stopped
        Says whether the pass is over, at whatever point.
    called
        Set once the pass before is over: rows that do not stay are not read before.
    """
    if table is None:
        yield from ((request, None) for request in requests)
        return
    order = _Order() if table.resident else _Order.of(trace, table, donor_rows)
    while not table.resident and called is not None and not called.wait(LOOK):
        if stopped():
            return
    rows = table.begin(lambda: order.donors, order.largest)
    try:
        for whole in requests:
            for request in _by_batch(whole) if order.by_batch else (whole,):
                yield request, rows.request(request["requests"], stopped)
    except PassStopped:
        return
    finally:
        rows.close()


def stream_genotypes(
    windows: Iterable[tuple[DonorRequest, WindowRows | None]],
    table: DonorTable | None,
    pool: BufferPool,
    donor_rows: Literal["batch", "window"],
) -> Iterator[GenotypeBatch]:
    """Rows of every batch's donors, in order of the batches."""
    for request, window in windows:
        donors, features = request["requests"], None
        if donor_rows == "window" and window is not None:
            features = window.gather(np.arange(donors.size), pool)
        bags: Sequence[Any] = request["bags"] or [None] * len(request["splits"])
        for split, donor_idx, in_bags in zip(request["splits"], request["donor_idx"], bags, strict=True):
            if donor_rows == "window":
                batch, index = donors, split[donor_idx]
            else:
                batch, index = donors[split], donor_idx
                features = None if window is None else window.gather(split, pool)
            rows = None if table is None else table.rows[batch]
            yield GenotypeBatch(batch, rows, features, index, in_bags)
        if window is not None:
            window.release()
        del window  # its rows may be given up while the next request is waited for


@dataclass(frozen=True)
class _Order:
    """The donors of the requests to come.

    Attributes
    ----------
    donors
        Distinct codes of each request; none where their order does not matter.
    largest
        Donors of the largest one.
    by_batch
        Whether each batch is a request of its own.
    """

    donors: Sequence[NDArray[np.int32]] = ()
    largest: int = 0
    by_batch: bool = False

    @classmethod
    def of(
        cls, trace: Callable[[], Iterable[DonorRequest]], table: DonorTable, donor_rows: Literal["batch", "window"]
    ) -> _Order:
        by_window = [request["requests"].astype(np.int32) for request in trace()]
        largest = max((donors.size for donors in by_window), default=0)
        if donor_rows == "window" or table.fits(largest):
            return cls(by_window, largest)
        by_batch = [part["requests"].astype(np.int32) for request in trace() for part in _by_batch(request)]
        return cls(by_batch, max(donors.size for donors in by_batch), by_batch=True)


def _by_batch(request: DonorRequest) -> Iterator[DonorRequest]:
    """A load request as one request for each of its batches."""
    bags: Sequence[Any] = request["bags"] or [None] * len(request["splits"])
    for split, donor_idx, in_bags in zip(request["splits"], request["donor_idx"], bags, strict=True):
        donors, position = np.unique(request["requests"][split], return_inverse=True)  # bags may share a donor
        yield {
            "requests": donors,
            "splits": [position],
            "donor_idx": [donor_idx],
            "bags": None if in_bags is None else [in_bags],
        }
