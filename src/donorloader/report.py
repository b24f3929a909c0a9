"""What is in a study: computed when it is prepared, or from a bare store, and printed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from donorloader._ids import shorten
from donorloader.cells import open_cells
from donorloader.cells._harmonise import donors_as_text
from donorloader.cells._raw import open_raw_cells, open_stored
from donorloader.genotypes import open_genotypes
from donorloader.genotypes._plink import PlinkBed
from donorloader.genotypes._write import count_missing, counted_allele
from donorloader.study import is_study, open_study

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from numpy.typing import NDArray

    from donorloader.genotypes import GenotypeRows

__all__ = [
    "CellsReport",
    "GenotypesReport",
    "Names",
    "Report",
    "inspect_store",
    "print_report",
    "report_cells",
]

# Names of donors that a report keeps; of more, the number.
_MAX_NAMES = 1000

# Genotypes read at once to count missing calls. [Unit: byte]
_READ_BYTES = 64 * 2**20


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


def inspect_store(path: str | PathLike[str], *, donor_key: str | None = None) -> Report:
    """Report on a study, a collection or AnnData of cells, or a store of genotypes.

    Parameters
    ----------
    path
        Study folder; annbatch collection; AnnData; PLINK `.bed`.
    donor_key
        Donor column of the cells. A collection needs it unless that is `"donor_id"`; an AnnData that has the column is
        taken for cells, and for genotypes otherwise.

    Raises
    ------
    FileNotFoundError
        If nothing lies at the path.
    KeyError, ValueError, TypeError
        If it is none of these, or the donor column is absent.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{str(path)!r} does not exist.")
    if is_study(path):
        return Report.from_dict(open_study(path).meta["report"])
    if path.suffix == ".bed":
        return Report(genotypes=_inspect_genotypes(PlinkBed(path)))
    match _kind(path, donor_key or "donor_id"):
        case "collection":
            return Report(cells=_inspect_collection(path, donor_key))
        case "cells":
            return Report(cells=_inspect_cells(path, donor_key))
        case "genotypes":
            return Report(genotypes=_inspect_genotypes(open_genotypes(path)))


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


def _kind(path: Path, donor_key: str) -> Literal["collection", "cells", "genotypes"]:
    """What a store holds: an AnnData with a donor column is taken for cells, any other for genotypes."""
    with open_stored(path) as root:
        match root.attrs.get("encoding-type"):
            case "annbatch-preshuffled":
                return "collection"
            case "donordata":
                return "cells"
            case "anndata":
                return "cells" if donor_key in root["obs"] else "genotypes"
            case kind:
                raise ValueError(
                    f"{str(path)!r} is neither a study, nor a collection, an AnnData or a DonorData "
                    f"(its encoding-type is {kind!r})."
                )


def _inspect_collection(path: Path, donor_key: str | None) -> CellsReport:
    source = open_cells(str(path))
    codes, _ = source.donors(donor_key or "donor_id")
    return report_cells(
        np.bincount(codes),
        genes=len(source.var_names),
        dtype=np.result_type(*(dataset.X.dtype for dataset in source.datasets)).name,
        layout="csr" if source.sparse else "dense",
        whole_numbers=None,
        datasets=len(source.datasets),
    )


def _inspect_cells(path: Path, donor_key: str | None) -> CellsReport:
    source = open_raw_cells(path, donor_key=donor_key, columns=())
    return report_cells(
        np.bincount(donors_as_text(source).codes),
        genes=source.X.shape[1],
        dtype=source.X.dtype.name,
        layout=source.X.layout,
        whole_numbers=None,
        datasets=1,
    )


def _inspect_genotypes(rows: GenotypeRows) -> GenotypesReport:
    try:
        step = max(1, _READ_BYTES // (rows.n_variants * rows.dtype.itemsize))
        missing = 0
        for start in range(0, len(rows.ids), step):
            block = rows.read(np.arange(start, min(start + step, len(rows.ids))), slice(0, rows.n_variants))
            missing += count_missing(block)
        return GenotypesReport(
            donors=len(rows.ids),
            variants=rows.n_variants,
            dtype=rows.dtype.name,
            missing_call_rate=missing / (len(rows.ids) * rows.n_variants),
            counted=counted_allele(rows.var()),
        )
    finally:
        rows.close()
