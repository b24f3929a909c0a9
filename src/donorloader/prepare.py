"""From raw files to a study: one folder that a loader streams from."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader._ids import explain_no_overlap
from donorloader._inputs import (
    describe_sources,
    list_sources,
    open_cell_sources,
    read_donor_map,
    refuse_nested,
)
from donorloader._options import parse_memory
from donorloader._panel import open_panel
from donorloader._progress import progress_bar
from donorloader._staging import check_out, staged_folder
from donorloader._study_report import report_study
from donorloader.cells._collect import collect_cells
from donorloader.cells._table import harmonise_cells
from donorloader.genotypes._selection import Selection
from donorloader.study import STUDY_FILE, STUDY_FORMAT, STUDY_VERSION, Study, is_study, open_study

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from donorloader.genotypes._write import DosageType, Layout
    from donorloader.genotypes.readers import IdBy, Multiallelic

__all__ = ["prepare"]

# What Python and its libraries take, torch with its CUDA parts most of it. [Unit: byte]
_LIBRARIES = 2**30

_CELLS, _BAGS, _GENOTYPES = "cells.zarr", "bags.zarr", "genotypes.zarr"
_PACKAGES = (
    *("donorloader", "annbatch", "anndata", "zarr", "numpy", "pandas", "scipy"),
    *("bed-reader", "pgenlib", "bgen", "cyvcf2"),
)


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
    samples: str | PathLike[str] | Iterable[str] | None = None,
    regions: str | Iterable[str] | None = None,
    variants: str | PathLike[str] | Iterable[str] | None = None,
    maf: float | None = None,
    max_missing: float | None = None,
    multiallelic: Multiallelic = "split",
    read_dosages: bool | None = None,
    layout: Layout | None = None,
    dosage_type: DosageType | None = None,
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
        Path of a PLINK `.bed` or `.pgen`, a `.bgen`, a `.vcf`, `.vcf.gz` or `.bcf`, a VCF Zarr `.vcz`; or donors ×
        variants: path of an AnnData `.h5ad` or `.zarr` whose obs_names are donor ids, an AnnData in memory, a
        :class:`donorloader.GenotypeStore`. `None`: a study of cells alone. Negative integers and NaN are missing calls.
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
    samples
        Donors to take of a file of genotypes: a list, or a file of one id a line. Default: all.
    regions
        Regions to take variants from: `"chr"`, `"chr:position"` or `"chr:start-end"`, 1-based, both ends included;
        `chr1` and `1` are the same. Default: everywhere.
    variants
        Variants to take, by id or name: a list, or a file of one a line. Default: all.
    maf
        Least frequency of a variant's rarer allele among the donors written, from 0 to 0.5. Default: any.
    max_missing
        Largest part of these donors whose call may be missing, from 0 to 1. Default: any.
    multiallelic
        Records with several ALT alleles: `"split"` them into one variant per ALT allele, or `"error"`.
    read_dosages
        Read dosages (float32) of a file that may hold hard calls too. Default: hard calls (int8) but of a `.bgen`.
    layout
        How hard calls are stored: `"packed"`, two bits each; `"plain"`, as a matrix `X` that anndata reads as such; or
        `"both"`. Default: packed, but plain where a call is above 2.
    dosage_type
        How dosages are stored: `"float32"`, `"float16"`, or `"uint8"`, steps of 1/127 that are off by 1/254 at the
        most. Default: as they come.
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
    ImportError
        If a file needs a library that is not installed; the error names the extra.
    KeyError
        If a donor column, layer, column of obs, sample, chromosome or variant does not exist.
    ValueError, TypeError
        If a source is not what it should be; if donor ids are missing, repeated or of an unusable type; if no donor of
        the cells has genotypes; if the budget is too small.
    """
    out = Path(out)
    budget = parse_memory(memory)
    if budget <= _LIBRARIES:
        raise ValueError(f"memory must be more than the 1 GB that Python and its libraries take, got {memory!r}.")
    free = budget - _LIBRARIES
    selection = Selection.checked(samples=samples, regions=regions, variants=variants, maf=maf, max_missing=max_missing)
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
        panel = open_panel(
            genotypes,
            genotype_layer=genotype_layer,
            id_by=id_by,
            selection=selection,
            multiallelic=multiallelic,
            read_dosages=read_dosages,
            layout=layout,
            dosage_type=dosage_type,
        )
        if panel is not None:
            stack.callback(panel.close)
        raw = open_cell_sources(cell_sources, layer=layer, donor_key=donor_key, columns=obs_columns)
        table = harmonise_cells(raw, donor_map=renames, memory=free)
        if panel is not None and not np.isin(table.donors, panel.ids).any():
            raise ValueError(explain_no_overlap(list(table.donors), list(panel.ids)))

        folder = stack.enter_context(staged_folder(out, overwrite=overwrite, is_ours=is_study))
        with progress_bar(progress, "writing cells", table.n_obs) as on_rows:
            written = collect_cells(table, folder / _CELLS, memory=free, seed=int(seed), on_rows=on_rows)
        if bags:
            with progress_bar(progress, "writing bags", table.n_obs) as on_rows:
                collect_cells(table, folder / _BAGS, memory=free, seed=int(seed), grouped=True, on_rows=on_rows)
        counts = None
        if panel is not None:
            only = table.donors if only_donors_with_cells else None
            counts = panel.write(folder / _GENOTYPES, only=only, memory=free, progress=progress)
        report = report_study(table, written, panel, counts, renames)
        meta = {
            "format": STUDY_FORMAT,
            "version": STUDY_VERSION,
            "donor_key": table.donor_key,
            "cells": _CELLS,
            "bags": _BAGS if bags else None,
            "genotypes": None if panel is None else _GENOTYPES,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "created_with": {"python": sys.version.split()[0]} | {name: _version(name) for name in _PACKAGES},
            "sources": describe_sources(raw, genotypes, panel),
            "settings": {
                "layer": layer,
                "obs_columns": None if obs_columns is None else list(obs_columns),
                "genotype_layer": genotype_layer,
                "id_by": id_by,
                "samples": _as_given(samples, selection.samples),
                "regions": [region.text for region in selection.regions] or None,
                "variants": _as_given(variants, selection.variants),
                "maf": maf,
                "max_missing": max_missing,
                "multiallelic": multiallelic,
                "read_dosages": read_dosages,
                "layout": layout,
                "dosage_type": dosage_type,
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


def _as_given(given: Any, names: tuple[str, ...] | None) -> str | list[str] | None:
    """Names as a list, or the file they are in."""
    return str(given) if isinstance(given, str | Path) else None if names is None else list(names)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
