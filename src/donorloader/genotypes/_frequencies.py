"""How frequent the counted allele of each variant is: as the store says, or counted anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ._rows import count_columns
from ._write_rows import CallCounts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ._rows import Columns
    from ._store import GenotypeStore

__all__ = ["FREQUENCY", "frequencies"]

#: Column of var that a prepared store keeps it in.
FREQUENCY = "counted_freq"

# Read at once while counting. Unit: bytes.
_READ_BYTES = 64 << 20


def frequencies(store: GenotypeStore, columns: Columns) -> NDArray[np.float64]:
    """Frequency of the counted allele of some variants, over all donors of the store that have a call.

    Prepared stores have it as column ``counted_freq`` of `var`; for others, all rows are read once.

    Raises
    ------
    ValueError
        If values are not between 0 and 2, so that they count no allele.
    """
    var = store.var()
    if FREQUENCY in var:
        return var[FREQUENCY].to_numpy(dtype=np.float64)[columns]
    n_columns = count_columns(columns)
    counts = CallCounts(n_columns)
    step = max(1, _READ_BYTES // (n_columns * store.dtype.itemsize))
    for start in range(0, store.shape[0], step):
        counts.add(store.read(np.arange(start, min(start + step, store.shape[0])), columns))
    p = counts.frequencies()
    if p is None:
        raise ValueError(
            f"Allele frequencies are of genotypes from 0 to 2, but {store.name} has others. Leave out the encoding or "
            "the missing_calls that need them."
        )
    return p
