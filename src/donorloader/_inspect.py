"""What is in a study, a store or a file: looked at as it lies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from donorloader.cells import open_cells
from donorloader.cells._harmonise import donors_as_text
from donorloader.cells._raw import open_raw_cells, open_stored
from donorloader.genotypes import open_genotypes
from donorloader.genotypes._variant_table import counted_allele
from donorloader.genotypes._write import count_missing
from donorloader.genotypes.readers import file_kind, open_variants
from donorloader.report import CellsReport, GenotypesReport, Report, report_cells
from donorloader.study import is_study, open_study

if TYPE_CHECKING:
    from os import PathLike

    from donorloader.genotypes import GenotypeRows

__all__ = ["inspect_store"]

# Genotypes read at once to count missing calls. [Unit: byte]
_READ_BYTES = 64 * 2**20


def inspect_store(path: str | PathLike[str], *, donor_key: str | None = None) -> Report:
    """Report on a study, a collection or AnnData of cells, or a store of genotypes.

    Parameters
    ----------
    path
        Study folder; annbatch collection; AnnData; PLINK `.bed` or `.pgen`, `.bgen`, VCF, VCF Zarr.
    donor_key
        Donor column of the cells. A collection needs it unless that is `"donor_id"`; an AnnData that has the column is
        taken for cells, and for genotypes otherwise.

    Raises
    ------
    FileNotFoundError
        If nothing lies at the path.
    ImportError
        If a file needs a library that is not installed.
    KeyError, ValueError, TypeError
        If it is none of these, or the donor column is absent.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{str(path)!r} does not exist.")
    if is_study(path):
        return Report.from_dict(open_study(path).meta["report"])
    if file_kind(path) is not None:
        return _inspect_file(path)
    match _kind(path, donor_key or "donor_id"):
        case "collection":
            return Report(cells=_inspect_collection(path, donor_key))
        case "cells":
            return Report(cells=_inspect_cells(path, donor_key))
        case "genotypes":
            return Report(genotypes=_inspect_genotypes(open_genotypes(path)))


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


def _inspect_file(path: Path) -> Report:
    reader = open_variants(path)
    try:
        step = max(1, _READ_BYTES // (len(reader.ids) * reader.dtype.itemsize))
        if step > reader.granule:
            step -= step % reader.granule
        everybody = np.arange(len(reader.ids))
        missing = 0
        for start in range(0, reader.n_variants, step):
            variants = np.arange(start, min(start + step, reader.n_variants))
            missing += count_missing(reader.read_block(variants, everybody).values)
        genotypes = GenotypesReport(
            donors=len(reader.ids),
            variants=reader.n_variants,
            dtype=reader.dtype.name,
            missing_call_rate=missing / (len(reader.ids) * reader.n_variants),
            counted=counted_allele(reader.var()),
        )
        return Report(genotypes=genotypes, notes=reader.notes)
    finally:
        reader.close()
