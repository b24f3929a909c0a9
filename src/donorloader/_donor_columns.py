"""Columns that tell something of a donor, or a bag: labels, covariates, what to balance by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import as_text, duplicates, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from donorloader._tables import Tables

__all__ = ["BagColumn", "bag_codes", "bag_column"]


class BagColumn:
    """A value for each bag, as numbers.

    Attributes
    ----------
    name
        Of the column.
    values
        (n_bags,) float32 of a numeric column, or int64 codes of a categorical one; NaN or -1 for bags that are never
        drawn.
    categories
        (n_categories,) what the codes stand for; `None` for a numeric column.
    groups
        (n_bags,) int64, the same for bags of the same value, which float32 might not tell apart.

    Parameters
    ----------
    name
        Of the column.
    values
        One for each of the bags that can be drawn, by their ids.
    drawn, n_bags
        Which bags these are, and of how many.
    """

    def __init__(self, name: str, values: pd.Series, drawn: NDArray[np.int64], n_bags: int):
        self.name = name
        if values.isna().any():
            missing = values.index[values.isna()]
            raise ValueError(
                f"Every bag needs a value of {name!r}, but {len(missing):,} have none: {shorten(missing)}. Fill these "
                "in, or leave the donors out with donors=…"
            )
        self.categories: NDArray[np.object_] | None = None
        self.groups = _spread(pd.factorize(values)[0].astype(np.int64), drawn, n_bags)
        numbers: NDArray[Any]
        if isinstance(values.dtype, pd.CategoricalDtype):
            numbers = values.cat.codes.to_numpy(dtype=np.int64)
            self.categories = np.asarray(values.cat.categories, dtype=object)
        elif pd.api.types.is_bool_dtype(values.dtype):
            numbers = values.to_numpy(dtype=np.int64)
            self.categories = np.array([False, True], dtype=object)
        else:
            numbers = _as_float32(name, values)
        self.values = _spread(numbers, drawn, n_bags)


def _spread(values: NDArray[Any], drawn: NDArray[np.int64], n_bags: int) -> NDArray[Any]:
    """Values of some bags in an array of all."""
    out = np.full(n_bags, np.nan if values.dtype.kind == "f" else -1, dtype=values.dtype)
    out[drawn] = values
    return out


def _as_float32(name: str, values: pd.Series) -> NDArray[np.float32]:
    """Numbers as models take them, or an error where they would become others."""
    if not pd.api.types.is_numeric_dtype(values.dtype) or pd.api.types.is_complex_dtype(values.dtype):
        raise TypeError(
            f"{name!r} must be of numbers, text or categories to be yielded per bag, but is {values.dtype}. Convert it "
            "first, e.g. dates to days."
        )
    exact = values.to_numpy(dtype=np.int64 if pd.api.types.is_integer_dtype(values.dtype) else np.float64)
    with np.errstate(over="ignore"):
        single = exact.astype(np.float32)
    wrong = single.astype(np.float64) != exact if exact.dtype.kind == "i" else np.isinf(single) & ~np.isinf(exact)
    if wrong.any():
        raise ValueError(
            f"Numbers are yielded as float32, which has no {exact[wrong][0]!r} of {name!r}. If these are codes, make "
            "the column categorical; else scale it."
        )
    return single


def _coded(values: Any) -> Any:
    """A column with its text as categories: those of the whole column, so that every split has the same codes."""
    column = pd.Series(values)
    if column.dtype == object and pd.api.types.infer_dtype(column) in ("integer", "floating", "mixed-integer-float"):
        return pd.to_numeric(column).array
    if column.dtype == object or pd.api.types.is_string_dtype(column.dtype):
        return pd.Categorical(column)
    return values


def bag_codes(tables: Tables, bag_by: list[str] | None) -> tuple[NDArray[np.int64], list[Any], NDArray[np.int64]]:
    """Which bag each cell is in.

    Parameters
    ----------
    tables
        The cells in use.
    bag_by
        Columns of ``obs`` whose combinations make bags, the donor column among them; `None` for the donor alone.

    Returns
    -------
    codes
        (n_cells,) int64 bag of each cell, -1 for cells not in use.
    ids
        Per bag, the donor's id; a tuple with one value per column of `bag_by`.
    donors
        (n_bags,) int64 donor code of each bag.

    Raises
    ------
    ValueError
        If the donor column is not in `bag_by`, or a cell has no value in one of the columns.
    """
    match = tables.match
    if bag_by is None:
        return match.codes, list(match.ids), np.arange(match.ids.size)
    if len(set(bag_by)) < len(bag_by):
        raise ValueError(f"bag_by must name each column once, got {bag_by}.")
    if tables.donor_key not in bag_by:
        raise ValueError(
            f"bag_by must contain the donor column {tables.donor_key!r}, got {bag_by}: a bag is of one donor."
        )
    used = match.codes >= 0
    columns: list[NDArray[Any]] = []
    levels: list[list[Any]] = []
    for name in bag_by:
        if name == tables.donor_key:
            columns.append(match.codes[used])
            levels.append(list(match.ids))
            continue
        categorical = pd.Categorical(tables.source.column(name)[used])
        if missing := int((categorical.codes < 0).sum()):
            raise ValueError(f"bag_by needs a value of {name!r} for every cell in use, but {missing:,} have none.")
        columns.append(categorical.codes.astype(np.int64))
        levels.append(list(categorical.categories))
    # one number per combination: far faster to sort than rows of several
    number = np.zeros(int(used.sum()), dtype=np.int64)
    for column, level in zip(columns, levels, strict=True):
        number = number * len(level) + column
    _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    codes = np.full(used.size, -1, dtype=np.int64)
    codes[used] = inverse
    distinct = np.stack(columns, axis=1)[first]
    ids = [tuple(level[code] for level, code in zip(levels, row, strict=True)) for row in distinct]
    return codes, ids, distinct[:, bag_by.index(tables.donor_key)].astype(np.int64)


def bag_column(
    name: str,
    tables: Tables,
    donor_table: pd.DataFrame | None,
    codes: NDArray[np.int64],
    ids: NDArray[np.object_],
    donors: NDArray[np.int64],
    drawn: NDArray[np.int64],
) -> BagColumn:
    """A column with one value per bag, from the donor table, ``G.obs``, or ``C.obs`` where it is constant in each bag.

    Only the bags of `drawn` are looked at: the others may lack a value, or have several.

    Raises
    ------
    KeyError
        If no table has the column.
    ValueError
        If it varies within a bag, or a bag has no value.
    """
    if donor_table is not None and not isinstance(donor_table, pd.DataFrame):
        raise TypeError(
            f"donor_table must be a DataFrame with donor ids as index, got {type(donor_table).__name__}. "
            "Make one with pandas.DataFrame(...).set_index(...)."
        )
    # numbers of rows, which integer ids would match
    if donor_table is not None and isinstance(donor_table.index, pd.RangeIndex) and donor_table.index.name is None:
        raise ValueError(
            "donor_table must have donor ids as its index, but has pandas' default, numbers from 0. Use "
            f"donor_table.set_index({tables.donor_key!r})."
        )
    donor_ids = tables.match.ids[donors[drawn]]
    index_of_drawn = pd.Index(ids[drawn], tupleize_cols=False)
    for what, frame in (("the donor table", donor_table), ("obs of the genotypes", _store_obs(tables))):
        if frame is None or name not in frame:
            continue
        index = as_text(frame.index, f"the index of {what}")
        if repeated := duplicates(index):
            raise ValueError(f"{what} must have one row per donor, but {shorten(repeated)} occur more than once.")
        column = pd.Series(_coded(frame[name].array), index=index).reindex(donor_ids)
        return BagColumn(name, column.set_axis(index_of_drawn), drawn, ids.size)
    if not any(name in dataset.columns for dataset in tables.source.datasets):
        raise KeyError(
            f"{name!r} is a column of neither the donor table, nor obs of the genotypes, nor obs of the cells."
        )
    values = tables.source.column(name)
    used = np.isin(codes, drawn)
    frame = pd.DataFrame({"bag": codes[used], "value": pd.Categorical(values[used]).codes})
    spread = frame.groupby("bag")["value"].agg(["min", "max"])
    if (varying := spread.index[spread["min"] != spread["max"]]).size:
        first = ids[varying[0]]
        found = values[codes == varying[0]].unique()
        raise ValueError(
            f"{name!r} must be constant in each bag to be its label, but varies in {varying.size:,} of {drawn.size:,}: "
            f"{first!r} has {shorten(found)}. Take a column of donors, or make finer bags with bag_by=[…, {name!r}]."
        )
    where = np.zeros(ids.size, dtype=np.int64)
    where[codes[used]] = np.flatnonzero(used)
    column = pd.Series(_coded(values.array)).iloc[where[drawn]]
    return BagColumn(name, column.set_axis(index_of_drawn), drawn, ids.size)


def _store_obs(tables: Tables) -> pd.DataFrame | None:
    return None if tables.store is None else tables.store.obs()
