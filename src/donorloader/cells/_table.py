"""Raw cells of all sources as one table: one gene space, one type of X, one form of obs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ._harmonise import common_dtype, donors_as_text, harmonise_obs, rename_donors, union_of_genes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ._raw import RawCells

__all__ = ["CellTable", "harmonise_cells"]


@dataclass
class CellTable:
    """Cells of all sources, ready to be written: everything but X is in memory and has one form.

    Attributes
    ----------
    sources
        Where the cells come from; those without cells are left out.
    obs
        Annotation of each source's cells, with the same columns, types and categories in all.
    var
        The genes.
    positions
        Per source, where its genes are in `var`, or `None` where it has just these.
    dtype, sparse
        Type and layout of X.
    donor_key
        Donor column of obs: a categorical of text.
    donors
        (n_donors,) donors that have cells, sorted as text.
    cells_per_donor
        (n_donors,) number of cells of each.
    incomplete_columns
        Columns of obs that some source lacks.
    unused_renames
        Ids in the donor map that no cell has.
    held_bytes
        Memory that matrices turned from CSC into CSR take. [Unit: byte]
    """

    sources: list[RawCells]
    obs: list[pd.DataFrame]
    var: pd.DataFrame
    positions: list[NDArray[np.int32] | None]
    dtype: np.dtype[Any]
    sparse: bool
    donor_key: str
    donors: NDArray[np.object_]
    cells_per_donor: NDArray[np.int64]
    incomplete_columns: list[str]
    unused_renames: list[str]
    held_bytes: int

    @property
    def n_obs(self) -> int:
        """Number of cells."""
        return sum(len(obs) for obs in self.obs)

    @property
    def genes_not_everywhere(self) -> int:
        """Number of genes that some source lacks; its cells have 0 there."""
        everywhere = np.zeros(len(self.var), dtype=np.int64)
        for positions in self.positions:
            everywhere[slice(None) if positions is None else positions] += 1
        return int((everywhere < len(self.sources)).sum())

    @property
    def repeated_names(self) -> int:
        """Number of cells whose name another cell has had before; annbatch appends a number to it."""
        return int(pd.Index(np.concatenate([obs.index for obs in self.obs])).duplicated().sum())


def harmonise_cells(
    sources: Sequence[RawCells], *, donor_map: Mapping[str, str] | None = None, memory: int
) -> CellTable:
    """Bring cells of several sources into one form.

    Parameters
    ----------
    sources
        The cells, as :func:`open_raw_cells` opens them.
    donor_map
        New id of each donor to rename, by its id as text.
    memory
        Budget for a CSC matrix, which cannot be read by rows and is turned into CSR in memory. [Unit: byte]

    Raises
    ------
    KeyError, ValueError, TypeError
        If there is no cell, the donor column is absent or has missing or unusable ids, gene names repeat, a column of
        obs cannot be stored, or a CSC matrix is too large for the budget.
    """
    sources = [source for source in sources if len(source.obs)]
    if not sources:
        raise ValueError("The cells are empty: none of the sources has a cell.")
    donor_key = sources[0].donor_key
    donor_map = donor_map or {}
    donors = [donors_as_text(source) for source in sources]
    unused = set(donor_map).difference(*(values.categories for values in donors))
    donors = [rename_donors(values, donor_map) for values in donors]
    present = sorted({donor for values in donors for donor in values.categories})
    names = [source.name for source in sources]
    others = [source.obs.drop(columns=[donor_key, "src_path"], errors="ignore") for source in sources]
    obs, incomplete = harmonise_obs(others, names)
    counts = np.zeros(len(present), dtype=np.int64)
    for frame, values in zip(obs, donors, strict=True):
        frame[donor_key] = pd.Categorical(values, categories=present)
        counts += np.bincount(frame[donor_key].array.codes, minlength=len(present))
    var, positions = union_of_genes(sources)
    held = 0
    for source in sources:
        held += _read_by_rows(source, memory - held)
    return CellTable(
        sources=sources,
        obs=obs,
        var=var,
        positions=positions,
        dtype=common_dtype([source.X for source in sources]),
        sparse=any(source.X.layout == "csr" for source in sources),
        donor_key=donor_key,
        donors=np.array(present, dtype=object),
        cells_per_donor=counts,
        incomplete_columns=incomplete,
        unused_renames=sorted(unused),
        held_bytes=held,
    )


def _read_by_rows(source: RawCells, memory: int) -> int:
    """Turn a CSC matrix into CSR, if it and its copy fit the budget; returns the bytes that stay in memory."""
    X = source.X
    if X.layout != "csc":
        return 0
    needed = 2 * X.nnz * (X.dtype.itemsize + 8)
    if needed > memory // 2:
        raise ValueError(
            f"Cells are read by rows, but X of {source.name} is stored by columns (CSC), and turning it round takes "
            f"{needed:,} bytes, more than half the memory budget. Give more memory, or write it with adata.X.tocsr()."
        )
    source.X = X.to_csr()
    return needed // 2
