"""What models do with bags: pad, nest, reduce, and map results back to donors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from donorloader._buffers import BufferPool
from donorloader._ids import shorten
from donorloader.cells import fill_dense

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from donorloader.bags import BagLoader

__all__ = ["bag_reduce", "collect_bags", "nested_bags", "pad_bags", "to_torchmil"]

# Fresh pages cost more than filling them
_pool = BufferPool(keep=2)


def pad_bags(batch: dict[str, Any], *, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bags side by side, the shorter ones filled up with zeros.

    Fastest from a sparse ``X``, whose cells are written once, where they belong; those of a dense one are copied.

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

    Raises
    ------
    KeyError, TypeError, ValueError
        If it is no batch of bags, if `length` is no integer, or below the longest bag.
    """
    X, offsets = _tensors(batch, "pad_bags")
    _check_cells(X, offsets)
    sizes = offsets.diff()
    longest = int(sizes.max())
    if length is not None and (isinstance(length, bool) or not isinstance(length, int | np.integer)):
        raise TypeError(f"length must be an integer, the cells to pad to, got {length!r}.")
    length = longest if length is None else int(length)
    if length < longest:
        raise ValueError(
            f"length must not be below that of the longest bag, {longest}, got {length}. Bound bags with max_cells."
        )
    mask = torch.arange(length, device=offsets.device) < sizes[:, None]
    if X.layout == torch.strided and int(sizes.min()) == length:
        return X.reshape(sizes.numel(), length, X.shape[1]), mask
    x = _empty((sizes.numel(), length, X.shape[1]), X)
    bounds = offsets.tolist()
    if _fills_fast(X):
        # in one call, as lanes want Python's lock after each; a row that only pads begins where its bag ends: no values
        first = np.minimum(offsets.numpy()[:-1, None] + np.arange(length), offsets.numpy()[1:, None])
        _fill(X, np.append(first.ravel(), bounds[-1]), x.view(-1, X.shape[1]))
        return x, mask
    for i, (start, stop) in enumerate(itertools.pairwise(bounds)):
        _densify(X, slice(start, stop), x[i, : stop - start])
        x[i, stop - start :] = 0
    return x, mask


def nested_bags(batch: dict[str, Any]) -> torch.Tensor:
    """Bags as a jagged :func:`torch.nested.nested_tensor` of shape (n_bags, cells of each, n_genes), unpadded.

    Raises
    ------
    KeyError, TypeError, ValueError
        If it is no batch of bags.
    """
    X, offsets = _tensors(batch, "nested_bags")
    _check_cells(X, offsets)
    if X.layout != torch.strided:
        X = _empty(X.shape, X)
        _densify(batch["X"], slice(0, X.shape[0]), X)
    return torch.nested.nested_tensor_from_jagged(X, offsets)


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
        each bag, as attention weights are. Sums of integers and of bool are int64, their means float.

    Raises
    ------
    KeyError, TypeError, ValueError
        If it is no batch of bags, if `values` are sparse or not one row per cell, or `how` is none of these.
    """
    _tensors(batch, "bag_reduce")
    if not isinstance(values, torch.Tensor) or values.layout != torch.strided:
        raise TypeError(
            "values must be a dense tensor: load with densify=True, or use what a model makes of the cells."
        )
    bag, n_bags = batch["donor_idx"], batch["offsets"].numel() - 1
    if values.dim() == 0 or values.shape[0] != bag.numel():
        raise ValueError(
            f"values needs one row for each of the {bag.numel()} cells of the batch, got shape {tuple(values.shape)}."
        )
    if values.device != bag.device:
        raise ValueError(f"values must be where the batch is, on {bag.device}, but are on {values.device}.")
    if how not in ("mean", "sum", "max", "softmax"):
        raise ValueError(f"how must be 'mean', 'sum', 'max' or 'softmax', got {how!r}.")
    if not (values.is_floating_point() or values.is_complex()) and how != "max":
        # as torch's own sum() and mean() do, small integers do not overflow
        values = values.to(torch.int64 if how == "sum" else torch.get_default_dtype())
    index = bag.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values)
    zeros = values.new_zeros((n_bags, *values.shape[1:]))
    if how == "sum":
        return zeros.index_add(0, bag, values)
    if how == "mean":
        sizes = batch["offsets"].diff().to(values.dtype)
        return zeros.index_add(0, bag, values) / sizes.reshape(-1, *[1] * (values.dim() - 1))
    if values.is_floating_point():
        # from -inf on: torch's gradient takes an initial value that equals the maximum for one more that shares it,
        # also where it is told to leave the initial values out
        lowest = torch.full_like(zeros, -torch.inf)
        largest = lowest.scatter_reduce(0, index, values, reduce="amax", include_self=True)
    else:
        largest = zeros.scatter_reduce(0, index, values, reduce="amax", include_self=False)
    if how == "max":
        return largest
    # the largest value cancels out; no gradient is needed through it
    powers = torch.exp(values - largest.detach()[bag])
    return powers / zeros.index_add(0, bag, powers)[bag]


def collect_bags(
    batches: BagLoader | Iterable[dict[str, Any]], predictions: Iterable[torch.Tensor | NDArray[Any]]
) -> pd.DataFrame:
    """Predictions as a table with one row per bag, by id, so that none can lose its donor.

    Parameters
    ----------
    batches
        The batches; or the :class:`BagLoader` that gave them, which knows the bags of its last pass and is not iterated
        again: another pass would come in another order.
    predictions
        Per batch, (n_bags,) or (n_bags, k), in order of the batches. May be computed while it is taken.

    Returns
    -------
    Columns ``prediction``, or ``prediction_0`` and so on; the index has the ids of the bags.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        If there are not as many predictions as batches, or one has not a row for each bag, or another number of
        columns than the first; if `batches` can be iterated again in another order, such as a DataLoader; if the
        loader's last pass was cut short.
    """
    if not (hasattr(batches, "bag_ids") or hasattr(batches, "__next__") or isinstance(batches, list | tuple)):
        raise TypeError(
            f"Give the batches as a list, or the BagLoader that they are of, not a {type(batches).__name__}, which may "
            "yield others in another order when it is iterated again."
        )
    if not hasattr(predictions, "__iter__"):
        raise TypeError(f"Predictions must be a list with one tensor per batch, got {type(predictions).__name__}.")
    # takes the first one before it asks for ids: predictions may be made from the loader's batches as they come
    values = [_as_array(value) for value in predictions]
    ids: list[Any] = batches.bag_ids() if hasattr(batches, "bag_ids") else [_donors(batch) for batch in batches]
    if not ids:
        raise ValueError("There is no batch to collect predictions of.")
    if len(values) != len(ids):
        raise ValueError(f"A prediction is needed for each of {len(ids):,} batches, got {len(values):,}.")
    frames = []
    for bags, value in zip(ids, values, strict=True):
        if value.ndim == 0 or value.shape[0] != len(bags):
            raise ValueError(f"A prediction is needed for each of {len(bags):,} bags, got shape {value.shape}.")
        if value.ndim > 2 or value.shape[1:] != values[0].shape[1:]:
            raise ValueError(
                f"Predictions must be (n_bags,) or (n_bags, k), with one k for all batches, got shape {value.shape}"
                f"{'' if value.ndim > 2 else f' after {values[0].shape}'}. Flatten what a bag has into one row."
            )
        columns = ["prediction"] if value.ndim == 1 else [f"prediction_{i}" for i in range(value.shape[1])]
        index = pd.Index(list(bags), tupleize_cols=False)
        frames.append(pd.DataFrame(value.reshape(value.shape[0], -1), columns=columns, index=index))
    return pd.concat(frames)


def _donors(batch: Any) -> Any:
    if not isinstance(batch, Mapping) or "donors" not in batch:
        raise TypeError(
            f"Batches must be those of a BagLoader, with their bags as 'donors', got {type(batch).__name__}"
            f"{f' with {shorten(list(batch))}' if isinstance(batch, Mapping) else ''}."
        )
    return batch["donors"]


def _as_array(values: torch.Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(values, torch.Tensor):
        try:
            return np.asarray(values)
        except ValueError as error:  # numpy's, of lists of different lengths
            raise ValueError(f"A prediction must be one array per batch, of one row per bag: {error}.") from error
    if values.layout != torch.strided or values.is_nested:
        raise TypeError("A prediction must be a dense tensor of one row per bag: reduce it with bag_reduce first.")
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # numpy has no bfloat16


def to_torchmil(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The dict that models of torchmil take, read from the source of its version 1.0.2.

    Parameters
    ----------
    batch
        Of a :class:`BagLoader` with torch tensors.

    Returns
    -------
    X
        (n_bags, length, n_genes) float32, the type of the models' weights, padded with zeros.
    mask
        (n_bags, length) bool, whether there is a cell. ``torchmil.data.collate_fn`` makes it of bytes; the models take
        either, and ``torchmil.nn.MaxPool`` only bool.
    Y
        (n_bags,) the labels, as ``torchmil.models.MILModel.compute_loss`` takes them. Without labels there is no ``Y``.
    """
    x, mask = pad_bags(batch)
    out = {"X": x.float(), "mask": mask}
    if batch["labels"] is not None:
        out["Y"] = batch["labels"]
    return out


def _tensors(batch: dict[str, Any], what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """X and offsets of a batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(f"{what} takes batches of a BagLoader, got {type(batch).__name__}.")
    if "offsets" not in batch:
        raise KeyError(f"{what} takes batches of a BagLoader; this one has no bags (no 'offsets').")
    X, offsets = batch["X"], batch["offsets"]
    if not isinstance(X, torch.Tensor):
        raise TypeError(f"{what} takes batches of torch tensors, got X as {type(X).__name__}: load with to='torch'.")
    return X, offsets


def _check_cells(X: torch.Tensor, offsets: torch.Tensor) -> None:
    """Check that offsets tell the bag of each row of X."""
    n_cells = int(offsets[-1]) if offsets.numel() else -1
    if X.dim() != 2 or offsets.numel() < 2 or X.shape[0] != n_cells:
        raise ValueError(
            f"X must have one row for each cell of its bags, {max(n_cells, 0):,} in {max(offsets.numel() - 1, 0):,} "
            f"bags as 'offsets' says, got shape {tuple(X.shape)}. Take the batch as the BagLoader gave it; for what a "
            "model makes of the cells, replace 'X' by one row per cell."
        )


def _empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Uninitialised memory, on the CPU that of an earlier tensor that is no longer in use."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:  # which numpy does not have
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.from_numpy(_pool.empty(shape, torch.empty(0, dtype=like.dtype).numpy().dtype))


def _fills_fast(X: torch.Tensor) -> bool:
    """Whether X is a CSR tensor that numpy and numba can read."""
    sparse = X.layout != torch.strided
    return sparse and X.device.type == "cpu" and not X.requires_grad and X.dtype not in (torch.float16, torch.bfloat16)


def _fill(X: torch.Tensor, rows: NDArray[np.int64], out: torch.Tensor) -> None:
    """Write rows into a dense tensor: row i has the values of ``rows[i]`` until ``rows[i + 1]``, one or none.

    In a twentieth of the time of torch's ``to_dense()``.
    """
    fill_dense(X.values().numpy(), X.col_indices().numpy(), X.crow_indices().numpy()[rows], out.numpy())


def _densify(X: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
    """Write contiguous rows into a dense tensor."""
    if X.layout == torch.strided:
        out.copy_(X[rows])
    elif _fills_fast(X):
        _fill(X, np.arange(rows.start, rows.stop + 1), out)
    else:
        crow = X.crow_indices()[rows.start : rows.stop + 1]
        first, last = int(crow[0]), int(crow[-1])
        part = torch.sparse_csr_tensor(
            crow - first, X.col_indices()[first:last], X.values()[first:last], size=(out.shape[0], X.shape[1])
        )
        out.copy_(part.to_dense())
