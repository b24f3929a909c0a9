"""Any sampler over a chosen set of rows: filters and splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._rows import complete_requests, cover_rows, request_rows
from ._wrapper import WrappingSampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

__all__ = ["SubsetSampler"]


class SubsetSampler(WrappingSampler):
    """Run any sampler over a chosen set of rows of a collection.

    The wrapped sampler sees a table of ``len(rows)`` rows, numbered from 0; what it asks for is translated into rows
    of the collection. Chunks are thus of `chunk_size` *chosen* rows, each row is yielded once where the sampler yields
    each row once, and batches are as full as without a filter.

    Parameters
    ----------
    sampler
        The sampler to run; a copy is kept.
    rows
        Row numbers of the collection, or a boolean mask with one entry per row. Order and repeats do not matter: they
        are sorted and made unique.

    Raises
    ------
    ValueError
        If no row is chosen.
    """

    def __init__(self, sampler: Sampler, rows: NDArray[Any]):
        rows = np.asarray(rows)
        if rows.dtype == bool:
            rows = np.flatnonzero(rows)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise TypeError(f"rows must be row numbers or a boolean mask, got an array of {rows.dtype}.")
        if rows.size == 0:
            raise ValueError("A subset needs at least one row, but `rows` chooses none. Widen the filter.")
        super().__init__(sampler)
        self._rows = np.unique(rows.astype(np.int64))
        if self._rows[0] < 0:
            raise ValueError(f"rows must be 0 or more, got {self._rows[0]}.")
        self._split_rng = np.random.default_rng(0)  # only for splits that the wrapped sampler leaves open

    @property
    def rows(self) -> NDArray[np.int64]:
        """The chosen rows, ascending."""
        return self._rows

    def n_batches(self, n_obs: int) -> int:
        """Number of batches of a pass; depends on the chosen rows, not on `n_obs`."""
        return self._sampler.n_batches(self._rows.size)

    def validate(self, n_obs: int) -> None:
        """Check that the rows exist, and let the wrapped sampler check its settings against their number."""
        if self._rows[-1] >= n_obs:
            raise ValueError(f"rows must be below the {n_obs} rows of the data, got {self._rows[-1]}.")
        try:
            self._sampler.validate(self._rows.size)
        except ValueError as error:
            error.add_note(f"The sampler runs over the {self._rows.size:,} selected of {n_obs:,} cells.")
            raise

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for request in complete_requests(self._sampler, self._rows.size, self._split_rng):
            if not request["splits"]:
                continue
            rows = self._rows[request_rows(request["requests"])]
            runs, position = cover_rows(rows)
            yield {"requests": runs, "splits": [position[split] for split in request["splits"]]}
