"""What models do with bags: pad, nest, reduce, and map results back to donors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from donorloader._buffers import BufferPool
from donorloader.cells import fill_dense

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["bag_reduce", "collect_bags", "nested_bags", "pad_bags", "to_torchmil"]

# Fresh pages cost more than filling them
_pool = BufferPool(keep=2)


def pad_bags(batch: dict[str, Any], *, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags side by side, the shorter ones filled up with zeros.

    Parameters
    ----------
    batch
        Of a :class:`BagLoader` with torch tensors.
    length
        Cells to pad to. Default: those of the longest bag.

    Returns
    -------
    x
        (n_bags, length, n_genes) dense, in the type of ``X``. A view of ``X`` where that is dense and all bags have
        `length` cells.
    mask
        (n_bags, length) bool, whether there is a cell.
    """
    X, offsets = batch["X"], batch["offsets"]
    sizes = offsets.diff()
    longest = int(sizes.max())
    length = longest if length is None else length
    if length < longest:
        raise ValueError(f"length must not be below that of the longest bag, {longest}, got {length}.")
    mask = torch.arange(length, device=offsets.device) < sizes[:, None]
    if X.layout == torch.strided and int(sizes.min()) == length:
        return X.reshape(sizes.numel(), length, X.shape[1]), mask
    x = _empty((sizes.numel(), length, X.shape[1]), X)
    bounds = offsets.tolist()
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        _densify(X, slice(start, stop), x[i, : stop - start])
        x[i, stop - start :] = 0
    return x, mask


def nested_bags(batch: dict[str, Any]) -> torch.Tensor:
    """Bags as a jagged :func:`torch.nested.nested_tensor` of shape (n_bags, cells of each, n_genes), unpadded."""
    X = batch["X"]
    if X.layout != torch.strided:
        X = _empty(X.shape, X)
        _densify(batch["X"], slice(0, X.shape[0]), X)
    return torch.nested.nested_tensor_from_jagged(X, batch["offsets"])


def bag_reduce(
    values: torch.Tensor, batch: dict[str, Any], how: Literal["mean", "sum", "max", "softmax"]
) -> torch.Tensor:
    """Reduce values of cells bag by bag.

    Parameters
    ----------
    values
        (n_cells, ...) one row per cell of the batch; gradients pass through.
    batch
        The batch.
    how
        ``"mean"``, ``"sum"`` and ``"max"`` give (n_bags, ...); ``"softmax"`` gives (n_cells, ...), normalised within
        each bag, as attention weights are.
    """
    bag, n_bags = batch["donor_idx"], batch["offsets"].numel() - 1
    if values.shape[0] != bag.numel():
        raise ValueError(
            f"values needs one row for each of the {bag.numel()} cells of the batch, got {values.shape[0]}."
        )
    index = bag.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    zeros = values.new_zeros((n_bags, *values.shape[1:]))
    if how == "sum":
        return zeros.index_add(0, bag, values)
    if how == "mean":
        sizes = batch["offsets"].diff().to(values.dtype)
        return zeros.index_add(0, bag, values) / sizes.reshape(-1, *[1] * (values.dim() - 1))
    largest = zeros.scatter_reduce(0, index, values, reduce="amax", include_self=False)
    if how == "max":
        return largest
    if how == "softmax":
        # the largest value cancels out; no gradient is needed through it
        powers = torch.exp(values - largest.detach()[bag])
        return powers / zeros.index_add(0, bag, powers)[bag]
    raise ValueError(f"how must be 'mean', 'sum', 'max' or 'softmax', got {how!r}.")


def collect_bags(batches: Iterable[dict[str, Any]], predictions: Iterable[torch.Tensor]) -> pd.DataFrame:
    """Predictions as a table with one row per bag, by id, so that none can lose its donor.

    Parameters
    ----------
    batches
        The batches, or a loader that is iterated.
    predictions
        Per batch, (n_bags,) or (n_bags, k).
    """
    frames = []
    for batch, prediction in zip(batches, predictions, strict=True):
        values = prediction.detach().cpu().numpy() if isinstance(prediction, torch.Tensor) else np.asarray(prediction)
        if values.shape[0] != len(batch["donors"]):
            raise ValueError(f"A prediction is needed for each of {len(batch['donors'])} bags, got {values.shape[0]}.")
        columns = ["prediction"] if values.ndim == 1 else [f"prediction_{i}" for i in range(values.shape[1])]
        frames.append(
            pd.DataFrame(
                values.reshape(values.shape[0], -1),
                columns=columns,
                index=pd.Index(list(batch["donors"]), tupleize_cols=False),
            )
        )
    return pd.concat(frames)


def to_torchmil(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The dict that models of torchmil take: ``X`` padded, ``mask``, and ``Y`` the labels."""
    x, mask = pad_bags(batch)
    out = {"X": x, "mask": mask}
    if batch["labels"] is not None:
        out["Y"] = batch["labels"]
    return out


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory, on the CPU that of an earlier tensor that is no longer in use."""
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(_pool.empty(shape, torch.empty(0, dtype=like.dtype).numpy().dtype))


def _densify(X: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
    """Write contiguous rows into a dense tensor; on the CPU in a twentieth of the time of torch's ``to_dense()``."""
    if X.layout == torch.strided:
        out.copy_(X[rows])
    elif X.device.type == "cpu":
        parts = (X.values().numpy(), X.col_indices().numpy(), X.crow_indices().numpy())
        fill_dense(*parts, rows.start, out.numpy())
    else:
        crow = X.crow_indices()[rows.start : rows.stop + 1]
        first, last = int(crow[0]), int(crow[-1])
        part = torch.sparse_csr_tensor(
            crow - first, X.col_indices()[first:last], X.values()[first:last], size=(out.shape[0], X.shape[1])
        )
        out.copy_(part.to_dense())
