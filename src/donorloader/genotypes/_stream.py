"""The genotype lane's work: for every batch to come, the rows of its donors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from donorloader._buffers import BufferPool
    from donorloader.samplers import DonorRequest

    from ._table import DonorTable, WindowTable

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
    requests: Iterable[DonorRequest], table: DonorTable | None, pool: BufferPool
) -> Iterator[tuple[DonorRequest, WindowTable | None]]:
    """Each window's donor request with the rows of its donors."""
    previous: WindowTable | None = None
    for request in requests:
        window = None if table is None else table.window(request["requests"], previous, pool)
        yield request, window
        previous = window


def stream_genotypes(
    windows: Iterable[tuple[DonorRequest, WindowTable | None]],
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
