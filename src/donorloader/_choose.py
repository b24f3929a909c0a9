"""Which cells a loader uses: a query on obs, and donors by id, by a condition, or by a selection drawn before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd

from donorloader._donor_frame import donor_frame
from donorloader._ids import shorten
from donorloader.cells import mask_of, select_cells, words_of
from donorloader.selections import CellSelection, DonorSelection, Splits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from donorloader.cells import CellSource
    from donorloader.genotypes import GenotypeStore

__all__ = ["Donors", "as_donors", "choose_cells"]

#: What the argument `donors` of a loader takes.
type Donors = Iterable[Any] | str | Callable[[pd.DataFrame], Any] | DonorSelection | CellSelection | None


def as_donors(donors: Any) -> Any:
    """The argument `donors`, kept so that it can be used again and sent to another process."""
    if donors is None or isinstance(donors, str | DonorSelection | CellSelection | Splits) or callable(donors):
        return donors
    return list(donors)


def choose_cells(
    source: CellSource,
    codes: NDArray[Any],
    ids: NDArray[np.object_],
    store: GenotypeStore | None,
    *,
    cells_query: str | None,
    donors: Donors,
) -> NDArray[np.bool_] | None:
    """Mask of the cells to use, `None` for all.

    Parameters
    ----------
    source, codes, ids, store
        The cells, the donor of each, the donors' ids, and the genotypes.
    cells_query, donors
        As for :class:`donorloader.DonorLoader`.

    Raises
    ------
    ValueError, KeyError, TypeError
        If a condition is none, an id is unknown, a selection was drawn from something else, or nothing is left.
    """
    if isinstance(donors, Splits):
        raise TypeError(f"donors takes one split of these, such as donors=split[{next(iter(donors))!r}].")
    if isinstance(donors, CellSelection):
        chosen = donors.mask(codes, ids)
        queried = select_cells(source, codes, ids, cells_query=cells_query)
        keep = chosen if queried is None else chosen & queried
        if not keep.any():
            raise ValueError(f"No cell of the split {donors.split!r} satisfies cells_query={cells_query!r}.")
        return keep
    if isinstance(donors, DonorSelection):
        donors = donors.check(ids)
    elif isinstance(donors, str) or callable(donors):
        donors = _by_condition(source, codes, ids, store, cells_query, donors)
    return select_cells(source, codes, ids, cells_query=cells_query, donors=donors)


def _by_condition(
    source: CellSource,
    codes: NDArray[Any],
    ids: NDArray[np.object_],
    store: GenotypeStore | None,
    cells_query: str | None,
    condition: str | Callable[[pd.DataFrame], Any],
) -> list[str]:
    """Ids of the donors, among those with cells that satisfy the query, for which a condition holds."""
    keep = select_cells(source, codes, ids, cells_query=cells_query)
    if isinstance(condition, str):
        if re.fullmatch(r"[\w.:-]*", condition.strip()):
            raise TypeError(
                f"donors must be a list of ids, or a condition on columns of donors, got the text {condition!r}; use "
                f"[{condition!r}] for that donor, or a condition such as \"disease == 'case'\"."
            )
        known = {*(() if store is None else store.obs()), *(c for d in source.datasets for c in d.columns)}
        try:
            names = [name for name in words_of(condition) if name in known]
            frame = donor_frame(source, codes, ids, store, columns=sorted(names), keep=keep)
            answer = frame.eval(condition)
        except pd.errors.UndefinedVariableError as error:
            raise KeyError(f"donors={condition!r}: {error}. The columns are {shorten(sorted(known), 12)}.") from error
        except (SyntaxError, TypeError) as error:
            raise ValueError(f"donors={condition!r} cannot be evaluated as a condition on donors: {error}") from error
        index = frame.index
    else:
        frame = donor_frame(source, codes, ids, store, keep=keep)
        index = frame.index
        answer = condition(frame)
        if not frame.index.equals(index):
            raise ValueError(
                f"donors={_told(condition)} must leave the table of donors as it is, but has changed its rows or "
                "index. Sort or reset the index of a copy."
            )
    mask = mask_of(answer, index, f"donors={_told(condition)}", "donor")
    if not mask.any():
        raise ValueError(f"No donor satisfies donors={_told(condition)}. Its columns are {shorten(frame.columns, 12)}.")
    return list(index[mask])


def _told(condition: str | Callable[[pd.DataFrame], Any]) -> str:
    return repr(condition) if isinstance(condition, str) else getattr(condition, "__name__", repr(condition))
