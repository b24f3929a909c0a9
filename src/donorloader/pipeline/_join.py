"""Join the two lanes: the cells of a batch with the rows of their donors, proven to be theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from donorloader._ids import shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Joiner"]


class _Cells(Protocol):
    @property
    def index(self) -> NDArray[np.int64]: ...


class _Donors(Protocol):
    @property
    def donors(self) -> NDArray[np.int64]: ...
    @property
    def rows(self) -> NDArray[np.int64] | None: ...
    @property
    def donor_idx(self) -> NDArray[np.int64]: ...


class Joiner:
    """Compare, for each batch, the donor of every cell as it was read with the donor whose row was read for it.

    Parameters
    ----------
    codes
        (n_cells,) donor code of each row of the collection.
    ids
        (n_donors,) donor ids by code.
    store_ids
        Donor ids by row of the genotypes, or `None` without genotypes.
    """

    def __init__(self, codes: NDArray[Any], ids: NDArray[np.object_], store_ids: NDArray[np.object_] | None):
        self._codes, self._ids, self._store_ids = codes, ids, store_ids
        if store_ids is not None:
            # made from the texts alone, so it does not repeat an error of the table from codes to rows
            position = {donor: code for code, donor in enumerate(ids)}
            self._code_of_row = np.asarray([position.get(donor, -1) for donor in store_ids], dtype=np.int64)

    def check(self, cells: _Cells, donors: _Donors) -> None:
        """Raise if a cell would be joined with a row that is not its donor's.

        Costs a few integer comparisons per cell, no text is compared.

        Raises
        ------
        RuntimeError
            Naming the cell, its donor and the donor that it would have got.
        """
        if cells.index.size != donors.donor_idx.size:
            raise RuntimeError(
                f"Cells and genotypes do not belong together: a batch has {cells.index.size} cells, but the plan for "
                f"it has {donors.donor_idx.size}. {_CAUSE}"
            )
        planned = donors.donors
        if donors.rows is not None:
            planned = np.where(donors.rows >= 0, self._code_of_row[donors.rows], planned)
        read, joined = self._codes[cells.index], planned[donors.donor_idx]
        if not np.array_equal(read, joined):
            wrong = np.flatnonzero(read != joined)
            j = int(wrong[0])
            other = self._ids[joined[j]] if joined[j] >= 0 else "a donor that no cell has"
            raise RuntimeError(
                f"Cells and genotypes do not belong together: {wrong.size} of {read.size} cells of a batch would get "
                f"the row of another donor. Row {int(cells.index[j])} of the cells is of donor "
                f"{shorten([self._ids[read[j]]])}, but would get the genotypes of {shorten([other])}. {_CAUSE}"
            )


_CAUSE = (
    "The order of a sampler must depend on its own generators alone: one that draws from global random state, or from "
    "what an earlier pass left behind, cannot be replayed."
)
