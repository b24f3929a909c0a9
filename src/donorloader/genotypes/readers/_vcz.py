"""VCF Zarr (`.vcz`), as bio2zarr and sgkit write it: hard calls or dosages, read with zarr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import zarr

from ._reader import VariantBlock, check_ids, damaged
from ._records import Haploid, RecordReader, split_records

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ._reader import Multiallelic

__all__ = ["VczReader"]

# Fill of a call of fewer copies than others.
_NO_COPY = -2

_NEEDED = ("variant_position", "variant_contig", "contig_id", "variant_allele", "sample_id")


class VczReader(RecordReader):
    """A VCF Zarr store, https://github.com/sgkit-dev/vcf-zarr-spec, in zarr format 2 or 3.

    A call is the number of copies of the ALT allele in `call_genotype`, phased or not; -1 where any copy is missing.

    Parameters
    ----------
    path
        The store's folder.
    multiallelic
        What becomes of records with several ALT alleles.
    read_dosages
        Read `call_DS` (float32, NaN where missing) in place of `call_genotype`.

    Raises
    ------
    ValueError
        If the folder is no such store, lacks an array, or names a donor twice.
    """

    parallel = 1  # zarr itself decodes chunks at the same time

    def __init__(self, path: Path, *, multiallelic: Multiallelic = "split", read_dosages: bool = False) -> None:
        self.path = path
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if read_dosages else np.int8)
        self._haploid = Haploid()
        with damaged(path, "VCF Zarr"):
            group: Any = zarr.open_group(str(path), mode="r")
        field = "call_DS" if read_dosages else "call_genotype"
        if absent := [name for name in (field, *_NEEDED) if name not in group]:
            raise ValueError(
                f"VCF Zarr has the arrays {', '.join((field, *_NEEDED))}, but {str(path)!r} lacks {', '.join(absent)}."
                + (" Leave read_dosages out for hard calls." if field == "call_DS" and field in absent else "")
            )
        with damaged(path, "VCF Zarr"):
            self._calls: Any = group[field]
            ids = _texts(group["sample_id"])
            contigs = _texts(group["contig_id"])
            alleles = _texts(group["variant_allele"])
            names = _texts(group["variant_id"]) if "variant_id" in group else np.full(len(alleles), ".", dtype=object)
            contig = np.asarray(group["variant_contig"][:], dtype=np.int64)
            pos = np.asarray(group["variant_position"][:], dtype=np.int64)
        wrong = np.flatnonzero((contig < 0) | (contig >= contigs.size))
        if wrong.size:
            raise ValueError(
                f"variant_contig numbers the {contigs.size:,} names in contig_id from 0, but {wrong.size:,} variants "
                f"of {str(path)!r} have other numbers, the first, at position {wrong[0]}, {contig[wrong[0]]}. "
                "Write the store again."
            )
        chrom = pd.Categorical.from_codes(contig, contigs)
        self.ids = check_ids(ids, path)
        n_records = self._calls.shape[0]
        if self._calls.shape[1] != ids.size or {len(alleles), len(names), len(pos), len(chrom)} != {n_records}:
            raise ValueError(
                f"The arrays of {str(path)!r} do not fit together: {field} is of {n_records:,} variants × "
                f"{self._calls.shape[1]:,} donors, but there are {len(pos):,} positions and {ids.size:,} ids. "
                "Write the store again."
            )
        names[names == ""] = "."
        self._records = split_records(
            path,
            chrom=chrom,
            pos=pos,
            ids=names,
            ref=pd.Categorical(alleles[:, 0]),
            alts=[tuple(alt for alt in row if alt not in ("", ".")) for row in alleles[:, 1:]],
            multiallelic=multiallelic,
        )
        self.n_variants = len(self._records.var)
        self.granule = int(self._calls.chunks[0])

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Calls or dosages, see :class:`VariantReader`."""
        if self._calls is None:
            raise ValueError(f"{str(self.path)!r} is closed: open it again.")
        records, alleles = self._records.record[variants], self._records.allele[variants]
        values = np.empty((variants.size, samples.size), dtype=self.dtype)
        copies = np.empty(variants.size, dtype=np.int64) if self.dtype.kind == "i" else None
        # chunk by chunk, so that no more than one is held beside the values
        for chunk in np.unique(records // self.granule):
            mine = np.flatnonzero(records // self.granule == chunk)
            first, last = int(records[mine[0]]), int(records[mine[-1]])
            with damaged(self.path, "VCF Zarr"):
                read = np.asarray(self._calls[first : last + 1])
            if samples.size < read.shape[1]:
                read = read[:, samples]
            if read.shape[0] != mine.size or (records[mine] - first != np.arange(mine.size)).any():
                read = read[records[mine] - first]
            if copies is None:
                values[mine] = self._dosages(read, alleles[mine], records[mine])
            else:
                values[mine], copies[mine] = self._count(read, alleles[mine], variants[mine])
        return VariantBlock(values, copies)

    def close(self) -> None:
        """Let go of the store; reading then raises. May be called again."""
        self._calls = None

    def _count(
        self, calls: NDArray[Any], alleles: NDArray[np.int64], variants: NDArray[np.int64]
    ) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
        counts = np.zeros(calls.shape[:2], dtype=np.int8)
        missing = np.zeros(calls.shape[:2], dtype=bool)
        here = np.zeros(calls.shape[:2], dtype=np.int8)
        for copy in range(calls.shape[2]):
            one = calls[:, :, copy]
            counts += one == alleles[:, None]
            missing |= one == -1
            here += one != _NO_COPY
        missing |= here == 0
        counts[missing] = -1
        here[missing] = 0
        fewer = ((here < 2) & ~missing).any(axis=1)
        self._haploid.add(self._records.var["chrom"].iloc[variants[fewer]])
        return counts, here.sum(axis=1, dtype=np.int64)

    def _dosages(
        self, given: NDArray[Any], alleles: NDArray[np.int64], records: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Dosages of the alleles, NaN where one number stands for several ALT alleles."""
        by_allele = given if given.ndim == 3 else given[:, :, None]
        told = self._records.n_alleles[records] - 1 <= by_allele.shape[2]
        values = np.full(given.shape[:2], np.nan, dtype=np.float32)
        values[told] = np.take_along_axis(by_allele[told], (alleles[told] - 1)[:, None, None], axis=2)[:, :, 0]
        there = ~np.isnan(by_allele[~told]).all(axis=(1, 2))
        self._records.undivided.update(records[~told][there].tolist())
        return values


def _texts(array: Any) -> NDArray[np.object_]:
    """An array of texts, of whichever of zarr's types, as `str` objects."""
    values = np.asarray(array[:])
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    return np.asarray(values.astype(object), dtype=object)
