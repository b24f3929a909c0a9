"""Donor ids as text: one rule for cells and genotypes, so that the two can be compared."""

from __future__ import annotations

import unicodedata
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = ["as_text", "duplicates", "explain_no_overlap", "shorten"]


def as_text(values: Any, what: str) -> NDArray[np.object_]:
    """Donor ids as text, so that ``7`` in one table and ``"7"`` in another are the same donor.

    Parameters
    ----------
    values
        One id per row: any array-like of integers or strings, or a categorical of these.
    what
        What the ids are, for messages, e.g. ``"obs['donor_id'] of cells.zarr"``.

    Returns
    -------
    (n,) array of `str` objects.

    Raises
    ------
    ValueError
        If an id is missing (``NaN``, ``None``, ``NA``), or empty.
    TypeError
        If ids are floats, booleans or anything but integers and strings: the text of a float depends on how it
        was written (``101.0`` or ``101``), so it can join the wrong donor or none.
    """
    if isinstance(values, pd.Series | pd.Index):
        values = values.array
    if isinstance(values, pd.Categorical):
        if (missing := np.flatnonzero(values.codes < 0)).size:
            raise _missing_error(what, missing, len(values))
        used = np.unique(values.codes)  # an unused category need not be a valid id
        text = np.empty(len(values.categories), dtype=object)
        text[used] = as_text(values.categories[used], what)
        return np.asarray(text[values.codes], dtype=object)
    array = np.asarray(values, dtype=object if isinstance(values, list | tuple) else None)
    if array.ndim != 1:
        raise ValueError(f"Donor ids must be one-dimensional, but {what} has shape {array.shape}.")
    if array.dtype.kind in "iu":
        return array.astype(str).astype(object)
    if array.dtype.kind in "fbc":
        if (missing := np.flatnonzero(pd.isna(array))).size:
            raise _missing_error(what, missing, array.size)
        raise _type_error(what, array[:5].tolist(), str(array.dtype))
    objects = array.astype(object)
    if (missing := np.flatnonzero(pd.isna(objects))).size:
        raise _missing_error(what, missing, objects.size)
    text = np.empty(objects.size, dtype=object)
    for i, value in enumerate(objects):
        if isinstance(value, str):
            text[i] = str(value)
        elif isinstance(value, bytes):
            text[i] = value.decode()
        elif isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_):
            text[i] = str(int(value))
        else:
            raise _type_error(what, [value], type(value).__name__)
    if (empty := np.flatnonzero(text == "")).size:
        raise _missing_error(what, empty, text.size)
    return text


def duplicates(ids: NDArray[np.object_]) -> list[str]:
    """The ids that occur more than once, in order of first occurrence."""
    index = pd.Index(ids, dtype=object)
    return [str(i) for i in index[index.duplicated()].unique()]


def shorten(ids: Iterable[Any], limit: int = 5) -> str:
    """The first ids of a list for a message: ``'a', 'b', … (12 in all)``."""
    ids = list(ids)
    head = ", ".join(repr(i) if isinstance(i, tuple) else repr(str(i)) for i in ids[:limit])
    return head if len(ids) <= limit else f"{head}, … ({len(ids):,} in all)"


def explain_no_overlap(cell_ids: Sequence[str], genotype_ids: Sequence[str]) -> str:
    """Message for donors of cells and genotypes that have no id in common: five of each, and the likely cause."""
    cells, genotypes = sorted(map(str, cell_ids)), sorted(map(str, genotype_ids))
    return (
        "No donor of the cells has a row in the genotypes: their ids have nothing in common.\n"
        f"  cells:     {shorten(cells)}\n"
        f"  genotypes: {shorten(genotypes)}\n"
        f"  likely cause: {_guess(cells, genotypes)}"
    )


def _guess(cells: list[str], genotypes: list[str]) -> str:
    """Why ids do not match, from trying the usual differences one by one."""
    wanted = set(cells)

    def matches(transformed: Iterable[str], target: set[str] = wanted) -> bool:
        return bool(target & set(transformed))

    rename = "rename the donors of the cells with a donor map (`donorloader prepare --donor-map two_columns.tsv`)"
    if matches(g.strip() for g in genotypes) or matches((c.strip() for c in cells), set(genotypes)):
        return f"white space around the ids; {rename}."
    if matches({g.casefold() for g in genotypes}, {c.casefold() for c in cells}):
        return f"upper and lower case differ; {rename}."
    normal = partial(unicodedata.normalize, "NFC")
    if matches({normal(g) for g in genotypes}, {normal(c) for c in cells}):
        return f"the same characters are encoded in two ways (Unicode NFC and NFD); {rename}."
    if matches(_tail(g, 0) for g in genotypes):
        return "the cells have the FID of each donor, not the IID; use the IIDs as donor column, or a donor map."
    for separator in "_-:.":
        if matches(g.rpartition(separator)[2] for g in genotypes) or matches(
            g.partition(separator)[2] for g in genotypes
        ):
            return (
                f"the genotype ids carry a prefix before {separator!r}, as FID_IID does; "
                "prepare them again with `--id-by iid`, or use a donor map."
            )
        if matches((c.rpartition(separator)[2] for c in cells), set(genotypes)) or matches(
            (c.partition(separator)[2] for c in cells), set(genotypes)
        ):
            return (
                f"the cells' ids carry a prefix before {separator!r}, as FID_IID does; {rename}, "
                "or prepare with `--id-by fid_iid`."
            )
    if matches(_number(g) for g in genotypes) or matches({_number(g) for g in genotypes}, {_number(c) for c in cells}):
        return f"int vs text: the numbers are the same but for a prefix, leading zeros or a '.0'; {rename}."
    if len(set(genotypes)) == 1:
        return "all genotype ids are the same (a FID column of zeros?); use the IIDs as ids."
    return f"the ids come from two naming schemes, or `donor_key` names the wrong column; {rename}."


def _tail(text: str, part: int) -> str:
    return text.split("_")[part]


def _number(text: str) -> str:
    digits = "".join(c for c in text.removesuffix(".0") if c.isdigit())
    return digits.lstrip("0") or "0"


def _missing_error(what: str, rows: NDArray[np.intp], total: int) -> ValueError:
    return ValueError(
        f"Every row needs a donor id, but {what} is missing (NaN or empty) in {rows.size:,} of {total:,} rows "
        f"(first at row {int(rows[0])}). Remove these rows, or give them an id, before loading."
    )


def _type_error(what: str, examples: list[Any], dtype: str) -> TypeError:
    shown = ", ".join(repr(e) for e in examples)
    return TypeError(
        f"Donor ids must be text or integers, but {what} holds {dtype} ({shown}). The text of such a value depends on "
        "how it was written, so it could join the wrong donor: cast the column to str (or to int, then str) first."
    )
