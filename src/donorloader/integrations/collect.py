"""Results for cells, from many batches in whatever order, as one table in the order of the collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = ["collect_cells"]


def collect_cells(loader: Any, results: Iterable[Any]) -> pd.DataFrame:
    """Results of one pass over a loader as a table with one row per cell, in the order of the collection.

    Parameters
    ----------
    loader
        The loader whose cells must all be there: a :class:`DonorLoader`, :class:`LIVIBatches`, or a
        :class:`DonorDataModule`, which stands for its loader of predictions. It is not iterated.
    results
        Per batch, a dict with the batch's ``index`` and any number of arrays or tensors of (n_cells,) or (n_cells, k);
        or a pair of the ``index`` and one of these. What ``trainer.predict`` returns, where ``predict_step`` returns
        such. Batches may come in any order.

    Returns
    -------
    One row per cell, by its row in the collection, ascending. A column per (n_cells,), named as in the dict, and
    ``name_0`` and so on per (n_cells, k). Of pairs the name is ``prediction``.

    Raises
    ------
    ValueError
        If a cell is missing or comes twice, or is not the loader's; if a result has not one row per cell.
    TypeError
        If the results have no ``index``.
    """
    if hasattr(loader, "predict_dataloader"):
        loader = loader.loader("predict")
    tables = getattr(loader, "loader", loader)._tables
    expected = np.flatnonzero(tables.match.codes >= 0)
    parts = [_columns(result, number) for number, result in enumerate(results)]
    rows = np.concatenate([index for index, _ in parts]) if parts else np.empty(0, dtype=np.int64)
    found, counts = np.unique(rows, return_counts=True)
    for wrong, what in (
        (found[counts > 1], "come more than once"),
        (np.setdiff1d(found, expected), "are not the loader's"),
        (np.setdiff1d(expected, found), "are missing"),
    ):
        if wrong.size:
            raise ValueError(
                f"Each of the loader's {expected.size:,} cells must have one result, but {wrong.size:,} {what}, such "
                f"as row {int(wrong[0])}. Collect one whole pass, of a loader with drop_last=False."
            )
    names = list(parts[0][1])
    if any(list(columns) != names for _, columns in parts):
        raise ValueError(f"The results of all batches must have the same columns, those of the first: {names}.")
    order = np.argsort(rows, kind="stable")
    values = {name: np.concatenate([columns[name] for _, columns in parts])[order] for name in names}
    return pd.DataFrame(values, index=pd.Index(rows[order], name="index"))


def _columns(result: Any, number: int) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Rows of a batch's cells, and their results by column."""
    if isinstance(result, tuple | list) and len(result) == 2:
        result = {"index": result[0], "prediction": result[1]}
    if not isinstance(result, dict) or "index" not in result:
        raise TypeError(
            f"The result of a batch is a dict with its 'index', or a pair (index, values), but that of batch {number} "
            f"is a {type(result).__name__}. Return {{'index': batch['index'], 'z': z}}."
        )
    index = _array(result["index"]).astype(np.int64)
    columns: dict[str, NDArray[Any]] = {}
    for name, value in result.items():
        if name == "index":
            continue
        array = _array(value)
        if array.ndim not in (1, 2) or array.shape[0] != index.size:
            raise ValueError(
                f"{name!r} of batch {number} must be ({index.size},) or ({index.size}, k), one row per cell, but is "
                f"{array.shape}."
            )
        if array.ndim == 1:
            columns[name] = array
        else:
            columns |= {f"{name}_{i}": array[:, i] for i in range(array.shape[1])}
    return index, columns


def _array(values: Any) -> NDArray[Any]:
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # numpy has no bfloat16
