"""BGEN 1.2 and 1.3: dosages from probabilities, read with bgen."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import numpy as np

from ._forward import ForwardFile
from ._reader import VariantBlock, check_ids, damaged, import_library
from ._records import Haploid, RecordReader, split_records

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ._reader import Multiallelic

__all__ = ["BgenReader"]


class BgenReader(RecordReader):
    """A BGEN file of layout 2, https://www.chg.ox.ac.uk/~gav/bgen_format/.

    A value is the dosage of an allele that is not the first of its record: the expected number of copies, NaN where
    the call is missing. The file does not say which allele is the reference; writers differ in it.

    Parameters
    ----------
    path
        The `.bgen`. Donor ids are in it, or in a `.sample` of the same name.
    multiallelic
        What becomes of records with several alleles beside the first.

    Raises
    ------
    FileNotFoundError
        If the file holds no ids and there is no `.sample`.
    ImportError
        If bgen is not installed.
    ValueError
        If the file is damaged or of layout 1, or ids repeat.
    """

    dtype: np.dtype[Any] = np.dtype(np.float32)
    granule = 1
    parallel = 0  # bgen opens an index file beside the .bgen, and SQLite wants it closed by the thread that opened it

    def __init__(self, path: Path, *, multiallelic: Multiallelic = "split") -> None:
        self._library = import_library("bgen", "bgen", "a .bgen")
        self.path = path
        self._haploid = Haploid()
        with damaged(path, "a .bgen"):
            bgen = self._open()
            header, samples = bgen.header, bgen.samples
        try:
            if header.layout != 2:
                raise ValueError(
                    f"BGEN 1.2 and 1.3 are read, but {str(path)!r} is of version 1.1 (layout {header.layout}). Rewrite "
                    "it, e.g. with `qctool -g old.bgen -og new.bgen` or `plink2 --export bgen-1.3`."
                )
            self.ids = _ids(path, samples if header.has_sample_ids else None, header.nsamples)
            with damaged(path, "a .bgen"):
                rows = [(v.chrom, v.pos, v.rsid or v.varid or ".", *_alleles(v.alleles)) for v in bgen]
        finally:
            bgen.close()
        chrom, pos, names, ref, alts = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        self._records = split_records(
            path,
            chrom=chrom,
            pos=pos,
            ids=np.asarray(names, dtype=object),
            ref=ref,
            alts=alts,
            multiallelic=multiallelic,
        )
        self.n_variants = len(self._records.var)
        # From the start and in order, never by an index file beside it: that may be of another file, or order.
        self._file = ForwardFile(path, self._open, self._decode)

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Dosages, see :class:`VariantReader`."""
        values = np.empty((variants.size, samples.size), dtype=self.dtype)
        copies = np.empty(variants.size, dtype=np.int64)
        with damaged(self.path, "a .bgen"):
            for i, variant in enumerate(variants):
                dosages, ploidy = self._file.get(int(self._records.record[variant]))
                values[i] = dosages[self._records.allele[variant] - 1, samples]
                called = ploidy[samples][~np.isnan(values[i])]
                copies[i] = called.sum(dtype=np.int64)
                if (called < 2).any():
                    self._haploid.add([self._records.var["chrom"].iat[int(variant)]])
        return VariantBlock(values, copies)

    def close(self) -> None:
        """Close the file; reading then raises. May be called again."""
        self._file.close()

    def _open(self) -> Any:
        return self._library.BgenReader(str(self.path), delay_parsing=True)

    def _decode(self, found: Any, record: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Dosages of all alleles of a record but the first, and ploidies."""
        ploidy, n_alleles = found.ploidy, int(self._records.n_alleles[record])
        if n_alleles == 2 and len(found.alleles) == 2:
            return found.alt_dosage[None], ploidy
        return _expected(found.probabilities, ploidy, n_alleles, phased=found.is_phased), ploidy


def _expected(
    probabilities: NDArray[np.float32], ploidy: NDArray[np.uint8], n_alleles: int, *, phased: bool
) -> NDArray[np.float32]:
    """(n_alleles - 1, n_donors) expected copies of the alleles from the second on."""
    out = np.empty((n_alleles - 1, ploidy.size), dtype=np.float32)
    for copies in np.unique(ploidy):
        mine = ploidy == copies
        if phased:  # one probability for each copy and allele
            by_copy = probabilities[mine, : copies * n_alleles].reshape(-1, copies, n_alleles)
            out[:, mine] = by_copy.sum(axis=1).T[1:]
            continue
        # the genotypes in the order of the format: by the largest allele, then by the next, …
        genotypes = sorted(combinations_with_replacement(range(n_alleles), int(copies)), key=lambda g: g[::-1])
        counts = np.array([[g.count(allele) for g in genotypes] for allele in range(1, n_alleles)], dtype=np.float32)
        out[:, mine] = counts @ probabilities[mine, : len(genotypes)].T
    return out


def _alleles(alleles: list[str]) -> tuple[str, tuple[str, ...]]:
    return (alleles[0] if alleles else "."), tuple(alleles[1:])


def _ids(path: Path, inside: list[str] | None, n_donors: int) -> NDArray[np.object_]:
    if inside is not None:
        return check_ids(np.asarray(inside, dtype=object), path)
    file = path.with_suffix(".sample")
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} does not hold the ids of its donors, and {str(file)!r} does not exist. Put the .sample "
            "file that came with it beside it, under this name."
        )
    lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    # two header lines: the names of the columns, and their types, of which the first is 0
    if len(lines) < 2 or len(lines[0]) < 2 or lines[1][0] != "0":
        raise ValueError(f"A .sample starts with two lines of names and types of columns, but {str(file)!r} does not.")
    column = 1 if lines[0][1].upper() in ("ID_2", "IID", "ID2") else 0
    if len(lines) - 2 != n_donors:
        raise ValueError(
            f"{str(path)!r} is of {n_donors:,} donors, but {str(file)!r} names {len(lines) - 2:,}. "
            "They do not belong together."
        )
    if short := [number for number, line in enumerate(lines, start=1) if len(line) <= column]:
        raise ValueError(f"Line {short[0]} of {str(file)!r} has no id.")
    return check_ids(np.asarray([line[column] for line in lines[2:]], dtype=object), file)
