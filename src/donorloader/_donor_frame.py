"""What is known of each donor: columns of the genotypes' obs, and of the cells' obs where constant within donors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from donorloader.cells import CellSource
    from donorloader.genotypes import GenotypeStore

__all__ = ["donor_frame"]


def donor_frame(
    source: CellSource,
    codes: NDArray[Any],
    ids: NDArray[np.object_],
    store: GenotypeStore | None,
    *,
    columns: Sequence[str] | None = None,
    keep: NDArray[np.bool_] | None = None,
) -> pd.DataFrame:
    """A table of donors.

    Parameters
    ----------
    source, codes, ids
        The cells, the donor of each, and the donors' ids.
    store
        The genotypes, or `None`.
    columns
        Columns to look up: first in ``obs`` of the genotypes, then in ``obs`` of the cells. Default: all that tell of
        donors.
    keep
        Mask of the cells that count, `None` for all.

    Returns
    -------
    One row per donor with cells that count, by id, and the number of these as ``n_cells`` unless a column has that
    name. Donors without genotypes have missing values in the columns that come from there.

    Raises
    ------
    KeyError
        If a column that is asked for is in neither table.
    ValueError
        If it is a column of the cells that varies within a donor.
    """
    if keep is not None:
        codes = codes[keep]
    used, first, code, counts = np.unique(codes, return_index=True, return_inverse=True, return_counts=True)
    index = pd.Index(ids[used], dtype=object, name="donor")
    of_store = None if store is None else store.obs().set_axis(pd.Index(store.ids, dtype=object))
    of_cells = list(dict.fromkeys(name for dataset in source.datasets for name in dataset.columns))
    wanted = [*([] if of_store is None else of_store), *of_cells] if columns is None else columns
    frame = pd.DataFrame(index=index)
    for name in dict.fromkeys(wanted):
        if of_store is not None and name in of_store:
            frame[name] = of_store[name].reindex(index)
            continue
        if name == "n_cells" and name not in of_cells:
            continue
        if name not in of_cells:
            known = [*([] if of_store is None else of_store), *of_cells]
            raise KeyError(f"No table has a column {name!r} of donors. The columns are {shorten(known, 12)}.")
        if columns is None and any(name not in dataset.columns for dataset in source.datasets):
            continue
        values = source.column(name)
        values = values if keep is None else values[keep]
        number = pd.factorize(values)[0]
        varies = number != number[first][code]
        if not varies.any():
            frame[name] = values.iloc[first].array
        elif columns is not None:
            donors = ids[np.unique(codes[varies])]
            raise ValueError(
                f"{name!r} must be constant within each donor to tell of donors, but varies in {donors.size:,} of "
                f"{used.size:,}: {shorten(donors)}. Take a column of donors, or leave cells out with cells_query=…"
            )
    if "n_cells" not in frame:
        frame["n_cells"] = counts
    return frame
