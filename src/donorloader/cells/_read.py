"""Given rows, read at once: what a map-style dataset needs, where a loader streams."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
from annbatch.abc import Sampler

from donorloader._zarr import local_pipeline
from donorloader.samplers import read_requests

from ._parts import Parts
from ._stream import CellBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest
    from numpy.typing import NDArray

    from ._source import CellSource

__all__ = ["RowReader"]


class RowReader:
    """Read rows of cells, in any order.

    Parameters
    ----------
    source
        The cells.
    window_cells
        Cells that are read at once; more rows are read in parts.
    """

    def __init__(self, source: CellSource, *, window_cells: int):
        self._nodes, self._window_cells = source.nodes, window_cells
        self._sampler = _GivenRequests()
        self._loader = source.loader(self._sampler)
        self._lock = threading.Lock()

    def read(self, rows: NDArray[np.int64]) -> CellBatch:
        """The cells of the given rows, X as the source has it: scipy CSR or a numpy array."""
        parts = Parts(rows.size)
        # one at a time: requests are taken from the sampler that the loader was made with
        with self._lock, local_pipeline(*self._nodes), closing(iter(self._loader)) as batches:  # type: ignore[type-var]
            self._sampler.requests = read_requests(rows, self._window_cells)
            for batch in batches:
                index = np.asarray(batch["index"], dtype=np.int64)
                if index.size == rows.size:
                    return CellBatch(batch["X"], index)
                parts.add(batch["X"], index)
        return CellBatch(*parts.whole())


class _GivenRequests(Sampler):
    """Yields the requests that it is handed."""

    requests: Iterator[LoadRequest] = iter(())

    @property
    def batch_size(self) -> None:
        """`None`: a batch is what was asked for."""

    @property
    def shuffle(self) -> bool:
        return False

    def n_batches(self, n_obs: int) -> int:
        """Not known before they are read."""
        return 0

    def validate(self, n_obs: int) -> None:
        """Nothing to check: requests are made of rows of the table."""

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        """The requests at hand."""
        return self.requests

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return self.requests
