"""What preparing a study found: its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from donorloader._ids import shorten
from donorloader.report import GenotypesReport, Names, Report, report_cells

if TYPE_CHECKING:
    from collections.abc import Mapping

    from donorloader._panel import Panel
    from donorloader.cells._collect import WrittenCells
    from donorloader.cells._table import CellTable
    from donorloader.genotypes._write import GenotypeCounts

__all__ = ["report_study"]


def report_study(
    table: CellTable,
    written: WrittenCells,
    panel: Panel | None,
    counts: GenotypeCounts | None,
    renames: Mapping[str, str],
) -> Report:
    """The report of a study from its tables as they were written.

    Parameters
    ----------
    table, written
        The cells.
    panel, counts
        The genotypes, if there are any.
    renames
        The donor map.
    """
    cells = report_cells(
        table.cells_per_donor,
        genes=len(table.var),
        dtype=table.dtype.name,
        layout="csr" if table.sparse else "dense",
        whole_numbers=written.whole_numbers,
        datasets=written.n_datasets,
    )
    notes = _notes(table, renames)
    if counts is not None and counts.repeated_names:
        notes.append(f"{counts.repeated_names:,} variants have the name of another variant: choose these by position.")
    if panel is None or counts is None:
        return Report(cells=cells, notes=notes)
    notes += panel.notes
    if (left := len(panel.source.ids) - len(panel.ids)) > 0:
        notes.append(f"{left:,} donors of the genotypes were not among the samples asked for.")
    if counts.n_donors < len(panel.ids):
        notes.append(f"Genotypes of {len(panel.ids) - counts.n_donors:,} donors without cells were left out.")
    absent = ~np.isin(table.donors, panel.ids)
    return Report(
        cells=cells,
        genotypes=GenotypesReport(
            donors=counts.n_donors,
            variants=counts.n_variants,
            dtype=counts.dtype,
            missing_call_rate=counts.missing_calls / (counts.n_donors * counts.n_variants),
            counted=counts.counted,
        ),
        without_genotypes=Names.of(table.donors[absent]),
        cells_without_genotypes=int(table.cells_per_donor[absent].sum()),
        without_cells=Names.of(sorted(panel.ids[~np.isin(panel.ids, table.donors)])),
        notes=notes,
    )


def _notes(table: CellTable, renames: Mapping[str, str]) -> list[str]:
    notes = []
    if number := table.genes_not_everywhere:
        notes.append(
            f"{number:,} of {len(table.var):,} genes are not in every source; cells of the others have 0 there."
        )
    dtypes = sorted({source.X.dtype.name for source in table.sources})
    if len(dtypes) > 1:
        notes.append(f"X is {' and '.join(dtypes)} in the sources; stored as {table.dtype.name}, without loss.")
    if number := table.repeated_names:
        notes.append(f"{number:,} cells have the name of another cell; a number was appended to theirs.")
    if table.incomplete_columns:
        notes.append(f"Columns of obs that some source lacks, missing there: {shorten(table.incomplete_columns, 12)}.")
    if renames:
        notes.append(f"Donors that the donor map renamed: {len(renames) - len(table.unused_renames):,}.")
    if table.unused_renames:
        notes.append(f"Entries of the donor map that no cell has: {shorten(table.unused_renames, 12)}.")
    return notes
