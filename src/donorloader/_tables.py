"""Cells and genotypes opened and matched: what every loader starts from."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from donorloader._choose import choose_cells
from donorloader._match import match_donors
from donorloader.cells import is_donor_data, is_stored_donor_data, open_cells
from donorloader.cis import CisWindow, find_cis
from donorloader.genotypes import (
    DonorTable,
    GenotypeStore,
    make_encoder,
    open_genotypes,
    resolve_variants,
)
from donorloader.study import Study, is_study, open_study

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from donorloader._choose import Donors
    from donorloader._match import DonorMatch
    from donorloader._options import GenotypeOptions
    from donorloader.cells import CellSource
    from donorloader.cis import CisVariants

__all__ = ["Tables", "open_tables"]


@dataclass(frozen=True)
class Tables:
    """The two tables of a loader.

    Attributes
    ----------
    source
        The cells.
    donor_key
        Their donor column.
    match
        Which cells and donors are in use, and where the donors' rows are.
    store
        The genotypes, or `None`.
    table
        Their rows by donor, or `None`.
    cis
        The variants near genes, where these were chosen so; else `None`.
    owns_store
        Whether the store was opened here, and so is to be closed with the loader.
    """

    source: CellSource
    donor_key: str
    match: DonorMatch
    store: GenotypeStore | None
    table: DonorTable | None
    cis: CisVariants | None
    owns_store: bool

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the files if the block fails: nobody else would."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files that were opened here."""
        if self.store is not None and self.owns_store:
            self.store.close()


def open_tables(
    cells: Any,
    genotypes: Any,
    *,
    donor_key: str | None,
    donors: Donors,
    cells_query: str | None,
    genotype_options: GenotypeOptions,
    bags: bool = False,
) -> Tables:
    """Open what a loader's user names, and match donors by id.

    Parameters
    ----------
    cells, genotypes, donor_key, donors, cells_query
        As for :class:`donorloader.DonorLoader`.
    genotype_options
        Which genotypes, and what they become.
    bags
        Whether a study's cells are to be read donor by donor, from its grouped collection where it has one.
    """
    cells, genotypes, donor_key = _resolve_sources(cells, genotypes, donor_key, bags=bags)
    source = open_cells(cells)
    donor_key = donor_key or source.donor_key or "donor_id"
    codes, ids = source.donors(donor_key)
    if genotypes is None and (chosen := genotype_options.about_genotypes()):
        raise ValueError(f"{' and '.join(chosen)} choose among genotypes, but genotypes is None.")
    store = None if genotypes is None else open_genotypes(genotypes, layer=genotype_options.genotype_layer)
    owns_store, cis = not isinstance(genotypes, GenotypeStore), None
    try:
        keep = choose_cells(source, codes, ids, store, cells_query=cells_query, donors=donors)
        match = match_donors(codes, ids, keep, None if store is None else store.ids, genotype_options.missing_donors)
        table = None
        if store is not None and match.rows is not None:
            options = genotype_options
            if isinstance(options.variants, CisWindow):
                cis = find_cis(options.variants, source.var(), store.var())
                options = replace(options, variants=cis.columns)
            table = _donor_table(store, match.rows, options)
    except BaseException:
        if store is not None and owns_store:
            store.close()
        raise
    return Tables(source, donor_key, match, store, table, cis, owns_store)


def _donor_table(store: GenotypeStore, rows: NDArray[np.int64], options: GenotypeOptions) -> DonorTable:
    columns = resolve_variants(store, options.variants)
    nan = options.missing_donors == "nan"
    encoder = make_encoder(store, columns, options.genotype_encoding, options.missing_calls, absent_donors=nan)
    return DonorTable(store, columns, rows, memory=options.genotype_memory, encoder=encoder)


def _resolve_sources(cells: Any, genotypes: Any, donor_key: str | None, *, bags: bool) -> tuple[Any, Any, str | None]:
    """Cells, genotypes and donor column, where a study or a DonorData brings several of them."""
    if isinstance(cells, str | os.PathLike) and is_study(cells):
        cells = open_study(cells)
    if isinstance(cells, Study):
        collection = cells.bags if bags and cells.bags is not None else cells.cells
        return collection, cells.genotypes if genotypes is None else genotypes, donor_key or cells.donor_key
    if isinstance(cells, os.PathLike):
        cells = Path(cells)
    if genotypes is None and is_donor_data(cells):
        return cells, cells.G, donor_key
    if genotypes is None and isinstance(cells, str | Path) and is_stored_donor_data(cells):
        return cells, cells, donor_key
    return cells, genotypes, donor_key
