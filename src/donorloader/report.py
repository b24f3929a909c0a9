"""What is in a study or a store: as numbers, as JSON, and printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from donorloader._ids import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = [
    "CellsReport",
    "GenotypesReport",
    "Names",
    "Report",
    "print_report",
    "report_cells",
]

# Names of donors that a report keeps; of more, the number.
_MAX_NAMES = 1000


@dataclass(frozen=True)
class Names:
    """Some donors: how many, and the names of the first."""

    count: int
    first: list[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> Self:
        """Names in the order given."""
        names = list(names)
        return cls(len(names), names[:_MAX_NAMES])

    def __str__(self) -> str:
        if self.count <= len(self.first):
            return shorten(self.first)
        return f"{shorten(self.first[:5])}, … ({self.count:,} in all)"


@dataclass(frozen=True)
class CellsReport:
    """The cells.

    Attributes
    ----------
    cells, genes, donors
        Numbers; donors are those with cells.
    fewest, median, most
        Cells per donor.
    dtype, layout
        Type and layout (`"csr"` or `"dense"`) of X.
    whole_numbers
        Whether X holds nothing but whole numbers, as counts do; `None` where not looked at.
    datasets
        Datasets of the collection.
    """

    cells: int
    genes: int
    donors: int
    fewest: int
    median: float
    most: int
    dtype: str
    layout: str
    whole_numbers: bool | None
    datasets: int


@dataclass(frozen=True)
class GenotypesReport:
    """The genotypes.

    Attributes
    ----------
    donors, variants
        Rows and columns.
    dtype
        Type of the values.
    missing_call_rate
        Part of all values that is missing.
    counted
        Whose copies a genotype counts: `"a1"`, `"a0"`, `"differs by variant"`, or `"unknown"`.
    """

    donors: int
    variants: int
    dtype: str
    missing_call_rate: float
    counted: str


@dataclass(frozen=True)
class Report:
    """What is in a study or a store.

    Attributes
    ----------
    cells, genotypes
        `None` where there are none.
    without_genotypes
        Donors that have cells but no genotypes, sorted.
    cells_without_genotypes
        Their cells.
    without_cells
        Donors that have genotypes but no cells, sorted.
    notes
        What preparing changed or found, a sentence each.
    """

    cells: CellsReport | None = None
    genotypes: GenotypesReport | None = None
    without_genotypes: Names | None = None
    cells_without_genotypes: int | None = None
    without_cells: Names | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The report that `to_dict` made a dict of."""
        parts = {"cells": CellsReport, "genotypes": GenotypesReport, "without_genotypes": Names, "without_cells": Names}
        made = {key: make(**values[key]) for key, make in parts.items() if values.get(key) is not None}
        return cls(**(values | made))


def report_cells(cells_per_donor: NDArray[np.int64], **known: Any) -> CellsReport:
    """Report of cells from the number of cells of each donor, and what else is known."""
    return CellsReport(
        cells=int(cells_per_donor.sum()),
        donors=len(cells_per_donor),
        fewest=int(cells_per_donor.min()),
        median=float(np.median(cells_per_donor)),
        most=int(cells_per_donor.max()),
        **known,
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report, one line per item."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _lines(report):
        table.add_row(Text(name), Text(value))
    (console or Console()).print(table)


def _lines(report: Report) -> Iterable[tuple[str, str]]:
    if (cells := report.cells) is not None:
        yield "cells", f"{cells.cells:,} × {cells.genes:,} genes ({cells.dtype}, {cells.layout})"
        yield "donors", f"{cells.donors:,}"
        yield "cells per donor", f"min {cells.fewest:,}, median {cells.median:,g}, max {cells.most:,}"
        if cells.whole_numbers is not None:
            yield "X", "whole numbers (counts)" if cells.whole_numbers else "not whole numbers (normalised, not counts)"
    if (genotypes := report.genotypes) is not None:
        yield "genotypes", f"{genotypes.donors:,} donors × {genotypes.variants:,} variants ({genotypes.dtype})"
        yield "missing calls", f"{genotypes.missing_call_rate:.3%}"
        yield "counted allele", genotypes.counted
    if (missing := report.without_genotypes) is not None:
        cells_missing = f"; {report.cells_without_genotypes:,} cells" if missing.count else ""
        yield (
            "donors without genotypes",
            f"{missing.count:,}{cells_missing}" + (f": {missing}" if missing.count else ""),
        )
    if (missing := report.without_cells) is not None:
        yield "donors without cells", f"{missing.count:,}" + (f": {missing}" if missing.count else "")
    for i, note in enumerate(report.notes):
        yield "notes" if i == 0 else "", note
