"""numpy and scipy arrays as torch tensors that share their memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch

__all__ = ["silence_csr_warning", "to_torch"]


def silence_csr_warning() -> None:
    """Use up torch's once-per-process warning that CSR tensors are in beta, where no other thread runs yet.

    Catching it at each batch would change the warning filters of the whole process from a lane's thread.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled", UserWarning)
        empty = torch.zeros(0, dtype=torch.int64)
        # without a word on invariants, as torch itself makes the tensors that come from a DataLoader's worker
        torch.sparse_csr_tensor(torch.zeros(1, dtype=torch.int64), empty, empty.float(), size=(0, 0))


def to_torch(array: Any) -> torch.Tensor:
    """A tensor over the memory of a numpy array or a scipy CSR matrix; tensors are returned as they are."""
    if isinstance(array, torch.Tensor):
        return array
    if sp.issparse(array):
        indptr, indices = array.indptr, array.indices
        if indptr.dtype != indices.dtype:  # torch wants one type for both
            indptr, indices = indptr.astype(np.int64), indices.astype(np.int64)
        return torch.sparse_csr_tensor(
            torch.from_numpy(indptr),
            torch.from_numpy(indices),
            torch.from_numpy(array.data),
            size=array.shape,
            check_invariants=False,  # scipy has checked them
        )
    return torch.from_numpy(array)
