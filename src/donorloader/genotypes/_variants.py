"""Which variants to read: names, positions, a boolean mask or a slice, as column numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader._ids import duplicates, shorten

if TYPE_CHECKING:
    from ._rows import Columns, GenotypeRows

__all__ = ["resolve_variants"]


def resolve_variants(store: GenotypeRows, variants: Any) -> Columns:
    """Column numbers of chosen variants, in the order given; a slice where they are contiguous.

    Parameters
    ----------
    store
        The genotypes.
    variants
        `None` for all, names, positions (negative ones count from the end), a boolean mask over all variants, or a
        slice of positions.

    Raises
    ------
    KeyError
        If a name is not in the store.
    IndexError
        If a position is out of range.
    ValueError
        If a mask has the wrong length, a name stands for several variants, or nothing is chosen.
    """
    n = store.n_variants
    if variants is None:
        return slice(0, n)
    if isinstance(variants, slice):
        chosen = range(*variants.indices(n))
        if len(chosen) == 0:
            raise ValueError(f"variants={variants} chooses none of the {n:,} variants.")
        if chosen.step == 1:
            return slice(chosen.start, chosen.stop)
        return np.asarray(chosen, dtype=np.int64)
    if isinstance(variants, str):
        raise TypeError(f"variants must be a list of names, got the text {variants!r}; use [{variants!r}].")
    array = np.asarray(variants)
    if array.ndim != 1:
        raise ValueError(f"variants must be one-dimensional, got shape {array.shape}.")
    if array.size == 0:
        raise ValueError("variants is empty: choose at least one variant, or None for all.")
    if array.dtype.kind == "b":
        if array.size != n:
            raise ValueError(f"A mask of variants needs one entry for each of the {n:,} variants, got {array.size:,}.")
        columns = np.flatnonzero(array)
        if columns.size == 0:
            raise ValueError(f"The mask chooses none of the {n:,} variants.")
    elif array.dtype.kind in "iu":
        columns = array.astype(np.int64)
        if (wrong := columns[(columns < -n) | (columns >= n)]).size:
            raise IndexError(f"Positions of variants must be below {n:,}, got {shorten(wrong)}.")
        columns = np.where(columns < 0, columns + n, columns)
    elif array.dtype.kind in "OUT":
        columns = _by_name(store, array)
    else:
        raise TypeError(f"variants must be names, positions, a boolean mask or a slice, got {array.dtype}.")
    if (np.diff(columns) == 1).all():
        return slice(int(columns[0]), int(columns[-1]) + 1)
    return columns.astype(np.int64, copy=False)


def _by_name(store: GenotypeRows, names: Any) -> Any:
    names = np.asarray([str(name) for name in names], dtype=object)
    all_names = store.names(slice(0, store.n_variants))
    if ambiguous := sorted(set(duplicates(all_names)) & set(names)):
        raise ValueError(f"The names {shorten(ambiguous)} stand for several variants each. Choose these by position.")
    position = {name: i for i, name in enumerate(all_names)}
    columns = np.asarray([position.get(name, -1) for name in names], dtype=np.int64)
    if (columns < 0).any():
        unknown = names[columns < 0]
        raise KeyError(
            f"The genotypes have no variants named {shorten(unknown)}. Their names look like {shorten(all_names[:3])}."
        )
    return columns
