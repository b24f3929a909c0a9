"""From raw files to a study: one folder that a loader streams from."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from donorloader._ids import explain_no_overlap, shorten
from donorloader._inputs import (
    describe_sources,
    list_sources,
    open_cell_sources,
    open_rows,
    read_donor_map,
    refuse_nested,
)
from donorloader._options import parse_memory
from donorloader._staging import check_out, staged_folder
from donorloader.cells._collect import collect_cells
from donorloader.cells._table import harmonise_cells
from donorloader.genotypes._write import write_genotypes
from donorloader.report import GenotypesReport, Names, Report, report_cells
from donorloader.study import STUDY_FILE, STUDY_FORMAT, STUDY_VERSION, Study, is_study, open_study

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from donorloader.cells._collect import WrittenCells
    from donorloader.cells._table import CellTable
    from donorloader.genotypes import GenotypeRows
    from donorloader.genotypes._plink import IdBy
    from donorloader.genotypes._write import GenotypeCounts

__all__ = ["prepare"]

# What Python and its libraries take, torch with its CUDA parts most of it. [Unit: byte]
_LIBRARIES = 2**30

_CELLS, _BAGS, _GENOTYPES = "cells.zarr", "bags.zarr", "genotypes.zarr"
_PACKAGES = ("donorloader", "annbatch", "anndata", "zarr", "bed-reader", "numpy", "pandas", "scipy")


def prepare(
    cells: Any,
    genotypes: Any = None,
    *,
    out: str | PathLike[str],
    donor_key: str | None = None,
    layer: str | None = None,
    obs_columns: Sequence[str] | None = None,
    genotype_layer: str | None = None,
    id_by: IdBy = "iid",
    donor_map: str | PathLike[str] | Mapping[Any, Any] | None = None,
    only_donors_with_cells: bool = False,
    bags: bool = True,
    memory: int | str = "4GB",
    seed: int = 0,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Study:
    """Write cells and genotypes as a study, the folder that :class:`donorloader.DonorLoader` streams from.

    The cells become a shuffled annbatch collection: all genes of all sources (a gene that a source lacks is 0 there),
    one type of X, one code per category everywhere. The genotypes become an AnnData store that is read by donor.
    Sources are opened read-only. The folder appears when all of it is written: out of disk, killed or failed half-way,
    there is none, and another run works.

    Parameters
    ----------
    cells
        One or more AnnData: paths of `.h5ad` files or `.zarr` folders, or in memory. Or one cellink DonorData: path of
        a `.dd.h5` or `.dd.zarr`, or in memory, which brings its genotypes and donor column along. X is CSR or dense;
        CSC is turned into CSR in memory, if it fits the budget.
    genotypes
        Donors × variants: path of a PLINK `.bed`, or of an AnnData `.h5ad` or `.zarr` whose obs_names are donor ids; an
        AnnData in memory; a :class:`donorloader.GenotypeStore`. `None`: a study of cells alone. Negative integers and
        NaN are missing calls.
    out
        The folder to make.
    donor_key
        Column of obs with the donor of each cell, as text or integers. Default: that of the DonorData, else
        `"donor_id"`.
    layer
        Layer of the cells to take in place of X, e.g. `"counts"`.
    obs_columns
        Columns of obs to keep, beside the donor column. Default: all.
    genotype_layer
        Layer of the genotypes to take in place of X.
    id_by
        Donor ids of a PLINK file set: `"iid"`, or `"fid_iid"` for FID_IID.
    donor_map
        Renames donors of the cells to genotype ids: a mapping, or the path of a table of two tab-separated columns, the
        id in the cells and the new id. Ids that it does not name stay. Several may become one.
    only_donors_with_cells
        Leave out genotypes of donors without cells. Default: keep all, so that cells can be added later.
    bags
        Write the cells a second time, grouped by donor, which is what :class:`donorloader.BagLoader` reads fastest.
    memory
        Memory that the process may take, in bytes or as text: 1 GB for Python and its libraries, and the rest for data;
        what you hold in memory yourself comes on top. Sets how many cells are shuffled at once: more is better mixed.
        Annotation of cells and variants is held whole.
    seed
        Seed of the shuffle. The same sources, seed and budget give the same study.
    overwrite
        Replace a study that is at `out`. It stays whole until the new one is complete.
    progress
        Show progress bars. Default: only on a terminal.

    Returns
    -------
    The study. Its report, which :func:`donorloader.report.print_report` prints, is `meta["report"]`.

    Raises
    ------
    FileNotFoundError
        If a source does not exist.
    FileExistsError
        If `out` exists, and is not a study or `overwrite` is not set.
    KeyError
        If a donor column, layer or column of obs does not exist.
    ValueError, TypeError
        If a source is not what it should be; if donor ids are missing, repeated or of an unusable type; if no donor of
        the cells has genotypes; if the budget is too small.
    """
    out = Path(out)
    budget = parse_memory(memory)
    if budget <= _LIBRARIES:
        raise ValueError(f"memory must be more than the 1 GB that Python and its libraries take, got {memory!r}.")
    free = budget - _LIBRARIES
    if isinstance(obs_columns, str):
        raise TypeError(f"obs_columns must be a list of names, got the text {obs_columns!r}; use [{obs_columns!r}].")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be a whole number from 0, got {seed!r}.")
    check_out(out, overwrite=overwrite, is_ours=is_study)
    cell_sources, genotypes = list_sources(cells, genotypes)
    refuse_nested(out, [*cell_sources, genotypes])
    renames = read_donor_map(donor_map)
    if genotypes is None and only_donors_with_cells:
        raise ValueError("only_donors_with_cells=True chooses among genotypes, but there are none. Leave it out.")

    with ExitStack() as stack:
        rows = open_rows(genotypes, layer=genotype_layer, id_by=id_by)
        if rows is not None and rows is not genotypes:  # a store that the user has opened stays open
            stack.callback(rows.close)
        raw = open_cell_sources(cell_sources, layer=layer, donor_key=donor_key, columns=obs_columns)
        table = harmonise_cells(raw, donor_map=renames, memory=free)
        if rows is not None and not np.isin(table.donors, rows.ids).any():
            raise ValueError(explain_no_overlap(list(table.donors), list(rows.ids)))
        chosen = _choose_rows(rows, table.donors, only_donors_with_cells=only_donors_with_cells)

        folder = stack.enter_context(staged_folder(out, overwrite=overwrite, is_ours=is_study))
        with _progress_bar(progress, "cells", table.n_obs) as on_rows:
            written = collect_cells(table, folder / _CELLS, memory=free, seed=int(seed), on_rows=on_rows)
        if bags:
            with _progress_bar(progress, "bags", table.n_obs) as on_rows:
                collect_cells(table, folder / _BAGS, memory=free, seed=int(seed), grouped=True, on_rows=on_rows)
        counts = None
        if rows is not None and chosen is not None:
            with _progress_bar(progress, "donors", len(chosen)) as on_rows:
                counts = write_genotypes(rows, folder / _GENOTYPES, rows=chosen, memory=free, on_rows=on_rows)
        report = _report(table, written, rows, counts, renames)
        meta = {
            "format": STUDY_FORMAT,
            "version": STUDY_VERSION,
            "donor_key": table.donor_key,
            "cells": _CELLS,
            "bags": _BAGS if bags else None,
            "genotypes": None if rows is None else _GENOTYPES,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "created_with": {"python": sys.version.split()[0]} | {name: _version(name) for name in _PACKAGES},
            "sources": describe_sources(raw, genotypes, rows),
            "settings": {
                "layer": layer,
                "obs_columns": None if obs_columns is None else list(obs_columns),
                "genotype_layer": genotype_layer,
                "id_by": id_by,
                "donor_map": str(donor_map) if isinstance(donor_map, str | Path) else renames or None,
                "only_donors_with_cells": only_donors_with_cells,
                "bags": bags,
                "memory": budget,
                "seed": int(seed),
            },
            "report": report.to_dict(),
        }
        (folder / STUDY_FILE).write_text(json.dumps(meta, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return open_study(out)


def _choose_rows(
    rows: GenotypeRows | None, donors: NDArray[np.object_], *, only_donors_with_cells: bool
) -> NDArray[np.int64] | None:
    if rows is None:
        return None
    return np.flatnonzero(np.isin(rows.ids, donors)) if only_donors_with_cells else np.arange(len(rows.ids))


def _report(
    table: CellTable,
    written: WrittenCells,
    rows: GenotypeRows | None,
    counts: GenotypeCounts | None,
    renames: Mapping[str, str],
) -> Report:
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
    if rows is None or counts is None:
        return Report(cells=cells, notes=notes)
    if counts.n_donors < len(rows.ids):
        notes.append(f"Genotypes of {len(rows.ids) - counts.n_donors:,} donors without cells were left out.")
    absent = ~np.isin(table.donors, rows.ids)
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
        without_cells=Names.of(sorted(rows.ids[~np.isin(rows.ids, table.donors)])),
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


@contextmanager
def _progress_bar(show: bool | None, unit: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error while the block runs; its callback may be called from any thread."""
    if not (sys.stderr.isatty() if show is None else show):
        yield None
        return
    # the stream itself, as annbatch's own bars are kept off standard error meanwhile
    console = Console(file=sys.stderr)
    columns = (TextColumn(f"writing {unit}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda number: bar.advance(task, number)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
