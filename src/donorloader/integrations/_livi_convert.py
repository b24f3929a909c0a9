"""From a batch of a loader to one that LIVI takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from donorloader._buffers import BufferPool

from ._livi_inputs import no_counts
from ._presence import dense_counts, dense_counts_by_torch, not_a_count, presence, presence_by_torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["LIVIConverter"]


class LIVIConverter:
    """Makes LIVI's batches. It runs on a lane, and holds on to no loader, which would keep its own lanes alive.

    Parameters
    ----------
    codes
        (n_cells,) int32, the model's code of each cell's donor; anything for cells that are not in use.
    covariates
        (n_cells,) codes of each covariate.
    size_factor
        (n_cells,) float32; `None`: the sum of the counts.
    known_cis
        (n_variants, n_genes) int64, or `None`: no genotypes are asked for.
    fill
        (n_variants,) float32, what a missing call counts as.
    """

    def __init__(
        self,
        codes: NDArray[np.int32],
        covariates: Sequence[NDArray[np.integer[Any]]],
        size_factor: NDArray[np.float32] | None,
        known_cis: torch.Tensor | None,
        fill: NDArray[np.float32] | None,
    ):
        self._codes, self._covariates, self._size_factor = codes, list(covariates), size_factor
        self._known_cis, self._fill = known_cis, fill
        self._pool = BufferPool()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One batch of the loader as LIVI takes it."""
        if not isinstance(batch["index"], torch.Tensor | np.ndarray):
            raise TypeError("LIVIBatches makes torch tensors: make the loader with to='torch'.")
        index = batch["index"].cpu().numpy() if isinstance(batch["index"], torch.Tensor) else batch["index"]
        device = batch["X"].device if isinstance(batch["X"], torch.Tensor) else torch.device("cpu")
        on_cpu = device.type == "cpu"
        if on_cpu:
            x, sums, bad = dense_counts(batch["X"], self._pool)
            if bad >= 0:
                raise no_counts(f"row {int(index[bad])} of the cells", not_a_count(x[bad]))
            counts, size_factor = torch.from_numpy(x), torch.from_numpy(sums)
        else:
            counts, size_factor = dense_counts_by_torch(batch["X"])
        if self._size_factor is not None:
            size_factor = torch.from_numpy(self._size_factor[index][:, None]).to(device)
        y = torch.from_numpy(self._codes[index].astype(np.int64)).to(device)
        made: dict[str, Any] = {"x": counts, "y": y, "size_factor": size_factor}
        made["covariates"] = [torch.from_numpy(c[index].astype(np.int64)).to(device) for c in self._covariates]
        if self._known_cis is not None and self._fill is not None:
            made["GT_cells"] = self._presence(batch["donor_features"], batch["donor_idx"], self._fill, on_cpu)
            if self._known_cis.device != device:
                self._known_cis = self._known_cis.to(device)
            made["known_cis"] = self._known_cis
        made["index"] = torch.from_numpy(index).to(device)
        return made

    def _presence(self, features: Any, donor_idx: Any, fill: NDArray[np.float32], on_cpu: bool) -> torch.Tensor:
        if on_cpu:
            values, rows = (a.numpy() if isinstance(a, torch.Tensor) else a for a in (features, donor_idx))
            return torch.from_numpy(presence(values, rows, fill, self._pool))
        return presence_by_torch(features, donor_idx, torch.from_numpy(fill))
