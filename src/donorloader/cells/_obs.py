"""Which cells to use: a query on obs and a choice of donors, as row numbers."""

from __future__ import annotations

import re
from io import StringIO
from tokenize import NAME, TokenError, generate_tokens
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import as_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ._source import CellSource

__all__ = ["mask_of", "select_cells", "words_of"]


def select_cells(
    source: CellSource,
    codes: NDArray[np.int32],
    ids: NDArray[np.object_],
    *,
    cells_query: str | None = None,
    donors: Iterable[Any] | None = None,
) -> NDArray[np.bool_] | None:
    """Mask of the cells that satisfy a query and belong to given donors; `None` where neither is asked for.

    Parameters
    ----------
    source
        The cells.
    codes, ids
        Donor of each cell and the donors' ids, from :meth:`CellSource.donors`.
    cells_query
        Expression for :meth:`pandas.DataFrame.query` over the columns of ``obs``.
    donors
        Ids of the donors to keep.

    Raises
    ------
    ValueError
        If the query is not a condition, or nothing is left.
    KeyError
        If a donor is not among the cells'.
    """
    if cells_query is None and donors is None:
        return None
    keep = np.ones(source.n_obs, dtype=bool)
    if cells_query is not None:
        keep &= _query(source, cells_query)
        if not keep.any():
            raise ValueError(f"No cell satisfies cells_query={cells_query!r}. Loosen it.")
    if donors is not None:
        if isinstance(donors, str):
            raise TypeError(f"donors must be a list of ids, got the text {donors!r}; use [{donors!r}].")
        donors = list(donors)
        if not donors:
            raise ValueError("donors is empty: name at least one donor, or None for all.")
        wanted = as_text(donors, "donors")
        unknown = sorted(set(wanted) - set(ids))
        if unknown:
            raise KeyError(f"No cell is of the donors {shorten(unknown)}. The cells have {shorten(ids)}.")
        keep &= np.isin(ids, wanted)[codes]
        if not keep.any():
            raise ValueError(f"None of the selected donors has a cell that satisfies cells_query={cells_query!r}.")
    return keep


def words_of(query: str) -> set[str]:
    """Names in a query: those of Python, and those in backticks. Text in quotes is none."""
    quoted = re.findall(r"`([^`]+)`", query)
    plain = re.sub(r"`[^`]+`", " ", query)
    tokens = generate_tokens(StringIO(plain).readline)
    return {*quoted, *(token.string for token in tokens if token.type == NAME)}


def mask_of(answer: Any, index: pd.Index[Any], what: str, each: str) -> NDArray[np.bool_]:
    """What a condition on a table says, row by row of the table.

    Parameters
    ----------
    answer
        What it gave: a Series, whose rows are told by its index, as a condition may have sorted them; or a sequence
        in the order of the table.
    index
        Of the table, each row once.
    what, each
        The condition and a row, for messages.

    Returns
    -------
    (n_rows,) mask; missing values count as no.

    Raises
    ------
    ValueError
        If it has not one bool for each row.
    """
    if isinstance(answer, pd.Series):
        # by label, never by place: a sorted Series would choose other rows
        if not answer.index.equals(index):
            if answer.index.has_duplicates or set(answer.index) != set(index):
                raise ValueError(
                    f"{what} must give one bool per {each}, {len(index):,} in all, but gave {answer.dtype} of shape "
                    f"{answer.shape}, with an index that is not that of the table: leave rows and index as they are."
                )
            answer = answer.reindex(index)
        answer = answer.fillna(False)
    mask = np.asarray(answer)
    if mask.dtype == object and all(isinstance(value, bool | np.bool_) for value in mask.ravel()):
        mask = mask.astype(bool)
    if mask.shape != (len(index),) or mask.dtype != bool:
        raise ValueError(
            f"{what} must give one bool per {each}, {len(index):,} in all, but gave {mask.dtype} of shape {mask.shape}."
        )
    return mask


def _query(source: CellSource, query: str) -> NDArray[np.bool_]:
    try:
        words = words_of(query)
        names = dict.fromkeys(c for dataset in source.datasets for c in dataset.columns if c in words)
        frame = source.obs(list(names))
        mask = frame.eval(query)
    except pd.errors.UndefinedVariableError as error:
        columns = shorten(source.datasets[0].columns, 12)
        raise KeyError(f"cells_query={query!r}: {error}. The columns of obs are {columns}.") from error
    except (SyntaxError, TokenError, TypeError) as error:
        raise ValueError(
            f"cells_query must be a condition on columns of obs, but {query!r} cannot be evaluated: {error}"
        ) from error
    if not isinstance(mask, pd.Series) or not pd.api.types.is_bool_dtype(mask.dtype):
        raise ValueError(f"cells_query must be a condition on columns of obs, but {query!r} is not: {mask!r}.")
    return mask_of(mask, frame.index, f"cells_query={query!r}", "cell")
