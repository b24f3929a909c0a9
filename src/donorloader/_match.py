"""Match the donors of the cells to the rows of the genotypes, by id, once and for all."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from donorloader._ids import explain_no_overlap, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DonorMatch", "match_donors"]

_log = logging.getLogger("donorloader")


@dataclass(frozen=True)
class DonorMatch:
    """Which donors are in use, and where their rows are.

    Attributes
    ----------
    ids
        (n_donors,) ids of the donors that have a cell in use, sorted; the donor table of a loader.
    codes
        (n_cells,) int64 position in `ids` of each cell's donor; -1 for cells not in use.
    rows
        (n_donors,) int64 row of the genotypes of each donor, -1 for none; `None` without genotypes.
    """

    ids: NDArray[np.object_]
    codes: NDArray[np.int64]
    rows: NDArray[np.int64] | None

    @property
    def keep(self) -> NDArray[np.bool_] | None:
        """Mask of the cells in use; `None` for all."""
        used = self.codes >= 0
        return None if used.all() else used


def match_donors(
    codes: NDArray[np.int32],
    ids: NDArray[np.object_],
    keep: NDArray[np.bool_] | None,
    store_ids: NDArray[np.object_] | None,
    missing_donors: Literal["error", "drop", "nan"],
) -> DonorMatch:
    """Match by the text of the ids.

    Parameters
    ----------
    codes, ids
        Donor code of each cell, and ids by code.
    keep
        Mask of the cells to use, `None` for all.
    store_ids
        Ids of the rows of the genotypes; `None` without genotypes.
    missing_donors
        What to do with donors that have cells in use but no row: refuse, leave their cells out, or give NaN.

    Raises
    ------
    ValueError
        If no donor has a row, or some have none and the policy is ``"error"``.
    """
    used = np.unique(codes if keep is None else codes[keep])
    rows, dropped = None, used[:0]
    if store_ids is not None:
        row_of = {donor: row for row, donor in enumerate(store_ids)}
        rows = np.asarray([row_of.get(ids[code], -1) for code in used], dtype=np.int64)
        absent = rows < 0
        if absent.all():
            raise ValueError(explain_no_overlap(list(ids[used]), list(store_ids)))
        if absent.any() and missing_donors == "error":
            raise ValueError(
                f"Every donor of the cells needs a row of genotypes, but {int(absent.sum()):,} of {used.size:,} have "
                f"none: {shorten(ids[used[absent]])}. Use missing_donors='drop' to leave their cells out, "
                "missing_donors='nan' for rows of NaN, or correct the ids."
            )
        if missing_donors == "drop":
            dropped, used, rows = used[absent], used[~absent], rows[~absent]
    table = np.full(ids.size, -1, dtype=np.int64)
    table[used] = np.arange(used.size)
    new_codes = table[codes]
    if keep is not None:
        new_codes[~keep] = -1
    if dropped.size:
        before = codes.size if keep is None else int(keep.sum())
        _log.info(
            "missing_donors='drop' leaves out %s of %s cells, which are of %s donors without a row of genotypes: %s.",
            f"{before - int((new_codes >= 0).sum()):,}",
            f"{before:,}",
            f"{dropped.size:,}",
            shorten(ids[dropped]),
        )
    return DonorMatch(ids[used], new_codes, rows)
