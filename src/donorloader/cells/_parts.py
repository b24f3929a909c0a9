"""A batch too large for one read: its parts, put together without holding all of them twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Parts", "stack_tensors"]

# Room for stored values beyond what the first part lets expect. Pages that nothing is written to take no memory.
_MARGIN = 1.2


class Parts:
    """The cells of one batch, as its parts arrive.

    Parameters
    ----------
    n_cells
        Cells of the whole batch.
    """

    def __init__(self, n_cells: int):
        self.n_cells = n_cells
        self._filled = 0
        self._index = np.empty(n_cells, dtype=np.int64)
        self._rows: _DenseRows | _SparseRows | _TensorRows | None = None

    @property
    def missing(self) -> int:
        """Cells that are still to come."""
        return self.n_cells - self._filled

    def add(self, X: Any, index: NDArray[np.int64]) -> None:
        """Take over the next cells: scipy CSR, numpy array, or torch tensor in CSR."""
        if self._rows is None:
            kind = _SparseRows if sp.issparse(X) else _TensorRows if isinstance(X, torch.Tensor) else _DenseRows
            self._rows = kind(self.n_cells, X)
        self._rows.add(X, self._filled)
        self._index[self._filled : self._filled + index.size] = index
        self._filled += index.size

    def whole(self) -> tuple[Any, NDArray[np.int64]]:
        """X and index of the whole batch, in the form of its parts."""
        if self._rows is None or self.missing:
            raise RuntimeError(f"A batch of {self.n_cells:,} cells lacks {self.missing:,}.")
        return self._rows.whole(), self._index


class _DenseRows:
    def __init__(self, n_cells: int, first: NDArray[Any]):
        self._out = np.empty((n_cells, first.shape[1]), dtype=first.dtype)

    def add(self, X: NDArray[Any], start: int) -> None:
        self._out[start : start + X.shape[0]] = X

    def whole(self) -> NDArray[Any]:
        return self._out


class _SparseRows:
    def __init__(self, n_cells: int, first: sp.csr_matrix):
        self._n_columns, self._n_values = first.shape[1], 0
        room = int(first.nnz * _MARGIN * n_cells / first.shape[0])
        self._data = np.empty(room, dtype=first.data.dtype)
        self._indices = np.empty(room, dtype=first.indices.dtype)
        self._indptr = np.zeros(n_cells + 1, dtype=np.int64)

    def add(self, X: sp.csr_matrix, start: int) -> None:
        stop = self._n_values + X.nnz
        if stop > self._data.size:
            # moves pages instead of copying them, so that the old and the new are not held both
            room = int(stop * _MARGIN)
            self._data.resize(room, refcheck=False)
            self._indices.resize(room, refcheck=False)
        self._data[self._n_values : stop] = X.data
        self._indices[self._n_values : stop] = X.indices
        self._indptr[start + 1 : start + X.shape[0] + 1] = X.indptr[1:].astype(np.int64) + self._n_values
        self._n_values = stop

    def whole(self) -> sp.csr_matrix:
        n = self._n_values
        index_type = np.promote_types(self._indices.dtype, np.int32)  # columns may be narrower
        X = sp.csr_matrix((self._indptr.size - 1, self._n_columns), dtype=self._data.dtype)
        # set, as scipy would make columns of its own type
        X.data, X.indices = self._data[:n], self._indices[:n]
        X.indptr = self._indptr.astype(index_type) if n <= np.iinfo(index_type).max else self._indptr
        return X


class _TensorRows:
    """Parts that annbatch has put on a GPU; these are joined there, as one allocation after the other."""

    def __init__(self, n_cells: int, first: torch.Tensor):
        self._parts: list[torch.Tensor] = []

    def add(self, X: torch.Tensor, start: int) -> None:
        self._parts.append(X)

    def whole(self) -> torch.Tensor:
        return stack_tensors(self._parts)


def stack_tensors(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors, dense or CSR, one below the other."""
    if parts[0].layout == torch.strided:
        return torch.cat(list(parts))
    ends = np.cumsum([part.values().numel() for part in parts])
    crow = [parts[0].crow_indices()]
    crow += [part.crow_indices()[1:] + int(end) for part, end in zip(parts[1:], ends, strict=False)]
    return torch.sparse_csr_tensor(
        torch.cat(crow),
        torch.cat([part.col_indices() for part in parts]),
        torch.cat([part.values() for part in parts]),
        size=(sum(part.shape[0] for part in parts), parts[0].shape[1]),
        check_invariants=False,
    )
