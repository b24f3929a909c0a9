"""The naive join, one batch at a time: what every batch must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import sparse

from _data import as_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd

    from _data import Cells, Genotypes

FIELDS = {"X", "index", "obs", "unique_donors", "donor_idx", "donor_features"}


def check_batch(
    batch: dict[str, Any],
    cells: Cells,
    genotypes: Genotypes | None,
    *,
    columns: Any = slice(None),
    to: str = "torch",
    densify: bool = False,
    layout: str = "csr",
    donor_rows: str = "batch",
    missing: str = "error",
    obs_columns: Iterable[str] = (),
) -> None:
    """Compare every field of a batch with rows looked up one by one."""
    assert set(batch) == FIELDS
    container = torch.Tensor if to == "torch" else np.ndarray
    for name in ("index", "donor_idx"):
        assert isinstance(batch[name], container), name
        assert as_numpy(batch[name]).dtype == np.int64, name
        assert as_numpy(batch[name]).ndim == 1, name
    index = as_numpy(batch["index"])
    assert index.size > 0

    x = batch["X"]
    if densify or layout == "dense":
        assert isinstance(x, container)
        assert not isinstance(x, torch.Tensor) or x.layout == torch.strided
    elif to == "torch":
        assert isinstance(x, torch.Tensor)
        assert x.layout == torch.sparse_csr
    else:
        assert isinstance(x, sparse.csr_matrix)
    assert as_numpy(x).dtype == np.float32
    np.testing.assert_array_equal(as_numpy(x), cells.x[index])

    donors = batch["unique_donors"]
    assert isinstance(donors, np.ndarray)
    assert donors.dtype == object
    assert all(type(d) is str for d in donors)
    assert list(donors) == sorted(set(donors)), "unique_donors are distinct and in text order"
    position = as_numpy(batch["donor_idx"])
    assert position.shape == index.shape
    np.testing.assert_array_equal(donors[position], cells.donor[index])
    if donor_rows == "batch":
        assert set(donors) == set(cells.donor[index])

    features = batch["donor_features"]
    if genotypes is None:
        assert features is None
    else:
        assert isinstance(features, container)
        expected = genotypes.rows(donors, columns)
        got = as_numpy(features)
        assert got.dtype == (np.float32 if missing == "nan" else genotypes.values.dtype)
        np.testing.assert_array_equal(got, expected)

    check_obs(batch["obs"], index, cells, tuple(obs_columns))


def check_obs(obs: pd.DataFrame | None, index: np.ndarray, cells: Cells, columns: tuple[str, ...]) -> None:
    if not columns:
        assert obs is None
        return
    assert obs is not None
    assert tuple(obs.columns) == columns
    np.testing.assert_array_equal(obs.index.to_numpy(), index)
    for column in columns:
        np.testing.assert_array_equal(
            np.asarray(obs[column].astype(object), dtype=object),
            np.asarray(cells.obs[column].iloc[index].astype(object), dtype=object),
        )


def orders(batches: Iterable[dict[str, Any]]) -> list[list[int]]:
    """Rows of each batch, as lists."""
    return [as_numpy(batch["index"]).tolist() for batch in batches]


def flat(batches: Iterable[dict[str, Any]]) -> np.ndarray:
    """Rows of all batches, in order."""
    parts = [as_numpy(batch["index"]) for batch in batches]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
