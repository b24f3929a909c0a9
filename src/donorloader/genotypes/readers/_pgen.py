"""PLINK 2 `.pgen`/`.pvar`/`.psam`: hard calls or dosages, read with pgenlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ._plink_tables import VariantColumns, check_id_by, read_bim, read_donors, read_pvar
from ._reader import VariantBlock, damaged, import_library
from ._records import sex_chromosome_note, split_records, split_texts

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from ._reader import IdBy, Multiallelic

__all__ = ["PgenReader"]


class PgenReader:
    """A PLINK 2 file set, https://www.cog-genomics.org/plink/2.0/formats#pgen.

    A call is the number of copies of the ALT allele: 0, 1, 2, or negative where it is missing.

    Parameters
    ----------
    path
        The `.pgen`. Beside it, of the same name: `.pvar`, `.pvar.zst` or `.bim`, and `.psam` or `.fam`.
    id_by
        Donor ids, as for a `.bed`.
    multiallelic
        What becomes of records with several ALT alleles.
    read_dosages
        Read dosages (float32) in place of hard calls. Where the file has none for a call, its dosage is the call.

    Raises
    ------
    FileNotFoundError
        If a file of the set does not exist.
    ImportError
        If pgenlib is not installed.
    ValueError
        If a file is malformed, the three do not belong together, or donor ids repeat.
    """

    granule = parallel = 1

    def __init__(
        self, path: Path, *, id_by: IdBy = "iid", multiallelic: Multiallelic = "split", read_dosages: bool = False
    ) -> None:
        check_id_by(id_by)
        self._library = import_library("pgenlib", "pgen", "a PLINK 2 .pgen")
        self.path = path
        variants = _companion(path, ".pvar", ".pvar.zst", ".bim")
        donors = read_donors(_companion(path, ".psam", ".fam"), id_by)
        self.ids, self._obs = donors.ids, donors.obs
        table = self._read_variants(variants)
        self._records = split_records(
            path,
            chrom=table.chrom,
            pos=table.pos,
            ids=table.ids,
            ref=table.ref,
            alts=split_texts(table.alt),
            multiallelic=multiallelic,
        )
        self.n_variants = len(self._records.var)
        self.dtype: np.dtype[Any] = np.dtype(np.float32 if read_dosages else np.int8)
        offsets = np.concatenate([[0], np.cumsum(self._records.n_alleles)]).astype(np.uintp)
        with damaged(path, f"a .pgen of {len(self.ids):,} donors and {len(table.ids):,} variants, as its tables say"):
            self._pgen: Any = self._library.PgenReader(
                bytes(path),
                raw_sample_ct=len(self.ids),
                variant_ct=len(table.ids),
                allele_idx_offsets=offsets if (self._records.n_alleles > 2).any() else None,
            )
        self._samples: NDArray[np.int64] = np.arange(len(self.ids))

    @property
    def notes(self) -> list[str]:
        """On records of several ALT alleles, and on chromosomes that not everybody has two of."""
        return [*self._records.notes, *sex_chromosome_note(self._records.var["chrom"], ".pgen")]

    def var(self) -> pd.DataFrame:
        """Variants; `a1` is ALT, `a0` REF."""
        return self._records.var

    def obs(self) -> pd.DataFrame:
        """Sex and phenotype, where the `.psam` tells them."""
        return self._obs

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Calls or dosages, see :class:`VariantReader`."""
        if self._pgen is None:
            raise ValueError(f"{str(self.path)!r} is closed: open it again.")
        values = np.empty((variants.size, samples.size), dtype=self.dtype)
        records, alleles = self._records.record[variants].astype(np.uint32), self._records.allele[variants]
        with damaged(self.path, "a .pgen"):
            if not np.array_equal(samples, self._samples):
                self._pgen.change_sample_subset(samples.astype(np.uint32))
                self._samples = samples
            read = self._pgen.read_dosages_list if self.dtype.kind == "f" else self._pgen.read_list
            for allele in np.unique(alleles):
                mine = alleles == allele
                if mine.all():
                    read(records, values, allele_idx=int(allele))
                    continue
                part = np.empty((int(mine.sum()), samples.size), dtype=self.dtype)
                read(records[mine], part, allele_idx=int(allele))
                values[mine] = part
        if values.dtype.kind == "f":
            values[values < 0] = np.nan  # -9
        return VariantBlock(values)

    def close(self) -> None:
        """Close the file; reading then raises. May be called again."""
        if self._pgen is not None:
            self._pgen.close()
        self._pgen = None

    def _read_variants(self, file: Path) -> VariantColumns:
        if file.suffix == ".pvar":
            return read_pvar(file)
        if file.suffix == ".bim":
            return read_bim(file)
        with damaged(file, "a compressed .pvar"):  # which pgenlib unpacks
            table = self._library.PvarReader(bytes(file))
            records = range(table.get_variant_ct())
            names, codes = table.get_variant_id, table.get_allele_code
            columns = VariantColumns(
                chrom=pd.Categorical([table.get_variant_chrom(i).decode() for i in records]),
                pos=np.fromiter(map(table.get_variant_pos, records), dtype=np.int64, count=len(records)),
                ids=np.asarray([names(i).decode() for i in records], dtype=object),
                ref=pd.Categorical([codes(i, 0).decode() for i in records]),
                alt=pd.Categorical(
                    [",".join(codes(i, k).decode() for k in range(1, table.get_allele_ct(i))) for i in records]
                ),
            )
            table.close()
            return columns


def _companion(path: Path, *suffixes: str) -> Path:
    files = [path.with_suffix(suffix) for suffix in suffixes]
    for file in files:
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"A .pgen needs its tables beside it: {suffixes[0]} (or {', '.join(suffixes[1:])}), but "
        f"{str(files[0])!r} does not exist."
    )
