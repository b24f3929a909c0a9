"""One gene space, one type of X and one form of each obs column for cells from several sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import as_text, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ._raw import RawCells, RawMatrix

__all__ = ["categories_as_text", "common_dtype", "donors_as_text", "harmonise_obs", "rename_donors", "union_of_genes"]

# Rows read at once to see whether values fit float32.
_SCAN_ROWS = 1000


def union_of_genes(sources: Sequence[RawCells]) -> tuple[pd.DataFrame, list[NDArray[np.int32] | None]]:
    """The genes of all sources, in order of first appearance.

    Returns
    -------
    var
        One row per gene. Of the columns, those that all sources have and agree on.
    positions
        Per source, the (n_genes,) position of each of its genes in `var`; `None` where it has just these genes.

    Raises
    ------
    ValueError
        If a source has a gene name twice: it would not be known which column of another source it is.
    """
    names = [pd.Index(np.asarray(source.var.index.astype(str), dtype=object)) for source in sources]
    for source, index in zip(sources, names, strict=True):
        if not index.is_unique:
            repeated = index[index.duplicated()].unique()
            raise ValueError(
                f"Gene names must be unique, but in {source.name} {shorten(repeated)} occur more than once. "
                "Call adata.var_names_make_unique() and write the file again."
            )
    union = names[0]
    for index in names[1:]:
        union = union.append(index.difference(union, sort=False))
    positions: list[NDArray[np.int32] | None] = [
        None if index.equals(union) else union.get_indexer(index).astype(np.int32) for index in names
    ]
    return _agreed_columns([s.var.set_axis(i, axis=0) for s, i in zip(sources, names, strict=True)], union), positions


def common_dtype(matrices: Sequence[RawMatrix]) -> np.dtype[Any]:
    """One type that holds the values of all matrices exactly; float32 where that does.

    A single type stays as it is. Otherwise matrices whose type may exceed float32 (64-bit floats, 32- and 64-bit
    integers) are read through once.
    """
    dtypes = {matrix.dtype for matrix in matrices}
    if len(dtypes) == 1:
        return dtypes.pop()
    if all(np.can_cast(m.dtype, np.float32) or _fits_float32(m) for m in matrices):
        return np.dtype(np.float32)
    return np.result_type(*dtypes, np.float64)


def donors_as_text(source: RawCells) -> pd.Categorical:
    """The donor of each cell as text, in a categorical without unused categories.

    Raises
    ------
    KeyError
        If obs has no donor column.
    ValueError, TypeError
        If an id is missing, or neither text nor integer.
    """
    key = source.donor_key
    if key not in source.obs.columns:
        raise KeyError(
            f"The donor column must be in obs of the cells, but {key!r} is not in that of {source.name}. "
            f"Its columns are {shorten(source.obs.columns, 12)}: name the right one with donor_key=… (--donor-key)."
        )
    codes, levels = pd.factorize(as_text(source.obs[key], f"obs[{key!r}] of {source.name}"))
    return pd.Categorical.from_codes(codes, categories=levels)


def rename_donors(donors: pd.Categorical, donor_map: Mapping[str, str]) -> pd.Categorical:
    """Donors by their new ids. Ids that the map does not name stay; several may become one."""
    new = np.array([donor_map.get(donor, donor) for donor in donors.categories], dtype=object)
    codes, levels = pd.factorize(new)
    return pd.Categorical.from_codes(codes[donors.codes], categories=levels)


def harmonise_obs(frames: Sequence[pd.DataFrame], names: Sequence[str]) -> tuple[list[pd.DataFrame], list[str]]:
    """Give each column one type over all frames, and each categorical the same categories in the same order.

    A column that a frame lacks is missing there: NaN, `NA`, or no category. Categories are the union over the frames,
    sorted; an order among them stays where all frames have the same. Columns of text in some frames and of numbers in
    others become text.

    Parameters
    ----------
    frames
        Annotation of the cells of each source.
    names
        Names of the sources, for messages.

    Returns
    -------
    frames
        With the same columns and types in all.
    incomplete
        Columns that some frame lacks.

    Raises
    ------
    TypeError
        If a column holds something that an AnnData file cannot, such as dates.
    """
    columns = list(dict.fromkeys(column for frame in frames for column in frame.columns))
    out = [pd.DataFrame(index=pd.Index(np.asarray(frame.index.astype(str), dtype=object))) for frame in frames]
    incomplete = []
    for column in columns:
        parts = [frame[column] if column in frame.columns else None for frame in frames]
        if any(part is None for part in parts):
            incomplete.append(str(column))
        sizes = [len(frame) for frame in frames]
        for frame, values in zip(out, _harmonise_column(str(column), parts, sizes, names), strict=True):
            frame[str(column)] = values
    return out, incomplete


def _agreed_columns(frames: list[pd.DataFrame], genes: pd.Index) -> pd.DataFrame:
    var = pd.DataFrame(index=genes)
    for column in frames[0].columns:
        if not all(column in frame.columns for frame in frames):
            continue
        if len(frames) == 1:
            var[column] = frames[0][column].array
            continue
        values = pd.concat([frame[column].astype(object) for frame in frames])
        values = values[~values.index.duplicated()].reindex(genes)
        if all(values.loc[frame.index].equals(frame[column].astype(object)) for frame in frames):
            var[column] = values.infer_objects().array
    return var


def _fits_float32(matrix: RawMatrix) -> bool:
    for start in range(0, matrix.shape[0], _SCAN_ROWS):
        block = matrix.rows(start, min(start + _SCAN_ROWS, matrix.shape[0]))
        values = block if isinstance(block, np.ndarray) else block.data
        with np.errstate(over="ignore"):
            if not np.array_equal(
                values.astype(np.float32).astype(values.dtype), values, equal_nan=values.dtype.kind == "f"
            ):
                return False
    return True


def _harmonise_column(column: str, parts: list[pd.Series | None], sizes: list[int], names: Sequence[str]) -> list[Any]:
    """The values of one column in each source, of one type; `None` stands for a source that lacks it."""
    present = [part for part in parts if part is not None]
    kinds = {_kind(column, part, name) for part, name in zip(parts, names, strict=True) if part is not None}
    if kinds <= {"number", "bool"}:
        dtype = _common_number([part.dtype for part in present], complete=len(present) == len(parts))
        missing = np.nan if isinstance(dtype, np.dtype) else pd.NA
        return [
            pd.array([missing] * size, dtype=dtype) if part is None else part.astype(dtype).array
            for part, size in zip(parts, sizes, strict=True)
        ]
    if kinds == {"text"} and len(present) == len(parts) and not any(part.hasnans for part in present):
        return [part.to_numpy(dtype=object) for part in present]
    nothing = pd.Categorical([])
    return _one_categorical(
        [
            pd.Categorical.from_codes(np.full(size, -1), dtype=nothing.dtype) if part is None else pd.Categorical(part)
            for part, size in zip(parts, sizes, strict=True)
        ]
    )


def _kind(column: str, part: pd.Series, name: str) -> str:
    dtype = part.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        return "categorical"
    if pd.api.types.is_bool_dtype(dtype):
        return "bool"
    if pd.api.types.is_numeric_dtype(dtype) and not pd.api.types.is_complex_dtype(dtype):
        return "number"
    if all(isinstance(value, str) for value in part.dropna()):
        return "text"
    raise TypeError(
        f"Columns of obs must be text, numbers, booleans or categories, but obs[{column!r}] of {name} is {dtype}. "
        "Convert it, or choose the columns to keep with obs_columns=… (--obs-column)."
    )


def _common_number(dtypes: list[Any], *, complete: bool) -> Any:
    """One type for numbers and booleans; one that knows `NA` where some source lacks the column."""
    first = dtypes[0]
    if complete and all(dtype == first for dtype in dtypes):
        return first
    common = np.result_type(*(dtype if isinstance(dtype, np.dtype) else dtype.numpy_dtype for dtype in dtypes))
    if common.kind == "f":
        return np.dtype(np.float64)
    if complete and all(isinstance(dtype, np.dtype) for dtype in dtypes):
        return common
    return pd.BooleanDtype() if common.kind == "b" else pd.Int64Dtype()


def _one_categorical(parts: list[pd.Categorical]) -> list[pd.Categorical]:
    first = parts[0]
    if all(part.ordered == first.ordered and part.categories.equals(first.categories) for part in parts):
        return parts
    levels = [level for part in parts for level in part.categories]
    if not all(isinstance(level, int | float | np.number) and not isinstance(level, bool) for level in levels):
        parts = [categories_as_text(part) for part in parts]
        levels = [str(level) for level in levels]  # those without cells too
    order = _common_order([list(part.categories) for part in parts]) if all(p.ordered for p in parts) else None
    union = sorted(set(levels)) if order is None else order
    return [pd.Categorical(part, categories=union, ordered=order is not None) for part in parts]


def categories_as_text(values: pd.Categorical) -> pd.Categorical:
    """A categorical with the same values as text; categories that are one as text become one."""
    codes, texts = pd.factorize(np.array(list(map(str, values.categories)), dtype=object))
    table = np.append(codes, -1)  # the last entry is that of missing values, whose code is -1
    return pd.Categorical.from_codes(
        table[values.codes], categories=pd.Index(texts, dtype=object), ordered=values.ordered
    )


def _common_order(orders: list[list[Any]]) -> list[Any] | None:
    """The longest of several orders, if all others are parts of it; else there is no one order, and `None`."""
    longest = max(orders, key=len)
    position = {level: i for i, level in enumerate(longest)}
    for order in orders:
        places = [position.get(level, -1) for level in order]
        if -1 in places or places != sorted(places):
            return None
    return longest
