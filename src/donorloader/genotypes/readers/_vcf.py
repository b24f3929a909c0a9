"""`.vcf`, `.vcf.gz` and `.bcf`: hard calls (GT) or dosages (DS), read with cyvcf2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ._forward import ForwardFile
from ._reader import VariantBlock, check_ids, damaged, import_library
from ._records import Haploid, RecordReader, split_records

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ._reader import Multiallelic

__all__ = ["VcfReader"]

# What htslib gives for a call of fewer copies than others of the same record.
_NO_COPY = -2
# The empty block that ends a BGZF file, SAM specification 4.1.2.
_BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")


class VcfReader(RecordReader):
    """A VCF or BCF file.

    A call is the number of copies of the ALT allele in GT, phased or not; -1 where any copy is missing. The file is
    read twice: for the sites first, then for the calls.

    Parameters
    ----------
    path
        The file; no index is needed.
    multiallelic
        What becomes of records with several ALT alleles.
    read_dosages
        Read DS (float32, NaN where missing) in place of GT.

    Raises
    ------
    ImportError
        If cyvcf2 is not installed.
    ValueError
        If the file is damaged, holds no such field, or names a donor twice.
    """

    granule = parallel = 1

    def __init__(self, path: Path, *, multiallelic: Multiallelic = "split", read_dosages: bool = False) -> None:
        self._library = import_library("cyvcf2", "vcf", "a VCF or BCF")
        self.path = path
        self._field = "DS" if read_dosages else "GT"
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if read_dosages else np.int8)
        self._haploid = Haploid()
        _check_end(path)
        with damaged(path, "a VCF or BCF"):
            vcf = self._library.VCF(str(path))
            ids, fields = list(vcf.samples), _format_fields(vcf.raw_header)
            vcf.close()
        self.ids = check_ids(np.asarray(ids, dtype=object), path)
        if self._field not in fields:
            other = "read_dosages=False (hard calls, GT)" if read_dosages else "read_dosages=True (dosages, DS)"
            remedy = f"Use {other}." if ("GT" if read_dosages else "DS") in fields else "It has no genotypes."
            raise ValueError(
                f"{str(path)!r} has no {self._field} among its FORMAT fields ({', '.join(sorted(fields)) or 'none'}). "
                f"{remedy}"
            )
        with damaged(path, "a VCF or BCF"):
            sites = self._library.VCF(str(path), samples=[])
            rows = [(v.CHROM, v.POS, v.ID or ".", v.REF, tuple(v.ALT)) for v in sites]
            sites.close()
        chrom, pos, names, ref, alts = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        self._records = split_records(
            path,
            chrom=pd.Categorical(chrom),
            pos=np.asarray(pos, dtype=np.int64),
            ids=np.asarray(names, dtype=object),
            ref=pd.Categorical(ref),
            alts=alts,
            multiallelic=multiallelic,
        )
        self.n_variants = len(self._records.var)
        self._samples = np.arange(self.ids.size)
        self._file = ForwardFile(path, self._open, self._alleles if self._field == "GT" else self._dosages)

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Calls or dosages, see :class:`VariantReader`."""
        if not np.array_equal(samples, self._samples):
            self._samples = samples
            self._file.rewind()
        values = np.empty((variants.size, samples.size), dtype=self.dtype)
        copies = np.empty(variants.size, dtype=np.int64) if self._field == "GT" else None
        with damaged(self.path, "a VCF or BCF"):
            for i, variant in enumerate(variants):
                found = self._file.get(int(self._records.record[variant]))
                allele = int(self._records.allele[variant])
                if copies is None:
                    values[i] = found[:, allele - 1]
                    continue
                values[i] = (found == allele).sum(axis=1)
                missing = (found == -1).any(axis=1) | (found < 0).all(axis=1)
                values[i, missing] = -1
                ploidy = (found != _NO_COPY).sum(axis=1)[~missing]
                copies[i] = ploidy.sum()
                if (ploidy < 2).any():
                    self._haploid.add([self._records.var["chrom"].iat[int(variant)]])
        return VariantBlock(values, copies)

    def close(self) -> None:
        """Close the file; reading then raises. May be called again."""
        self._file.close()

    def _open(self) -> Any:
        return self._library.VCF(str(self.path), samples=list(self.ids[self._samples]))

    def _alleles(self, found: Any, _record: int) -> NDArray[np.int16]:
        """(n_donors, ploidy) allele numbers."""
        if "GT" not in found.FORMAT:
            return np.full((self._samples.size, 2), -1, dtype=np.int16)
        alleles: NDArray[np.int16] = found.genotype.array()[:, :-1]  # the last column tells the phase
        return alleles

    def _dosages(self, found: Any, record: int) -> NDArray[np.float32]:
        """(n_donors, n_alts) dosages, NaN where one number stands for several ALT alleles."""
        n_alts = int(self._records.n_alleles[record]) - 1
        given = found.format("DS")
        values = np.full((self._samples.size, n_alts), np.nan, dtype=np.float32)
        if given is not None and given.shape[1] >= n_alts:
            values[:] = given[:, :n_alts]
        elif given is not None and not np.isnan(given).all():
            self._records.undivided.add(record)
        return values


def _format_fields(header: str) -> set[str]:
    lines = [line for line in header.splitlines() if line.startswith("##FORMAT=<")]
    return {line.partition("ID=")[2].partition(",")[0] for line in lines}


def _check_end(path: Path) -> None:
    """Refuse a BGZF file without its last block: htslib takes it for complete if it is cut between two blocks."""
    with path.open("rb") as file:
        start = file.read(18)
        if start[:4] != _BGZF_END[:4] or start[12:14] != b"BC":
            return
        file.seek(-len(_BGZF_END), 2)
        if file.read() != _BGZF_END:
            raise ValueError(f"{str(path)!r} lacks the block that ends a BGZF file: it was cut off. Copy it again.")
