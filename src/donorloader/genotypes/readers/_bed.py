"""PLINK 1 `.bed`/`.bim`/`.fam`: hard calls, read with bed-reader, or two bits each as they lie in the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader.genotypes._packing import packed_width

from ._plink_tables import check_id_by, read_bim, read_donors
from ._reader import VariantBlock, variant_table

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

    from ._reader import IdBy

__all__ = ["BedReader"]

_MAGIC = b"\x6c\x1b"
_VARIANT_MAJOR = b"\x01"
_HEADER_BYTES = 3


class BedReader:
    """A PLINK 1 file set, https://www.cog-genomics.org/plink/1.9/formats#bed.

    A call is the number of copies of allele 1 (column 5 of the `.bim`, `a1` here): 0, 1, 2, or negative where it is
    missing.

    Parameters
    ----------
    path
        The `.bed` file; `.bim` and `.fam` are its siblings of the same name.
    id_by
        `"iid"`: donor ids are the IIDs (column 2 of the `.fam`); what most panels use, also where every FID is `0`.
        `"fid_iid"`: ids are `FID_IID`, for panels whose IIDs repeat between families.

    Raises
    ------
    FileNotFoundError
        If one of the three files does not exist.
    ValueError
        If a file is malformed, the `.bed` is not as long as `.fam` and `.bim` say, donor ids repeat, or
        `id_by="fid_iid"` meets a `.fam` whose FIDs are all `0`.
    """

    dtype: np.dtype[Any] = np.dtype(np.int8)
    granule = 1
    parallel = min(4, os.cpu_count() or 1)

    def __init__(self, path: Path, *, id_by: IdBy = "iid") -> None:
        check_id_by(id_by)
        self.path = path
        bim, fam = path.with_suffix(".bim"), path.with_suffix(".fam")
        for file in (path, bim, fam):
            if not file.is_file():
                raise FileNotFoundError(
                    f"A PLINK file set is a .bed with its .bim and .fam beside it, but {str(file)!r} does not exist."
                )
        donors = read_donors(fam, id_by)
        self.ids, self._obs = donors.ids, donors.obs
        table = read_bim(bim)
        self._var = variant_table(table.chrom, table.pos, table.ids, table.ref, table.alt)
        self.n_variants = len(self._var)
        _check_bed(path, len(self.ids), self.n_variants)

        from bed_reader import open_bed

        # Counts given and no properties asked for: bed-reader then reads nothing but calls.
        self._bed: Any = open_bed(
            path, iid_count=len(self.ids), sid_count=self.n_variants, properties=dict.fromkeys(_PROPERTIES)
        )

    @property
    def notes(self) -> list[str]:
        """Nothing: a `.bed` has but diploid calls of two alleles."""
        return []

    def var(self) -> pd.DataFrame:
        """Variants; `a1` is PLINK's allele 1, `a0` its allele 2."""
        return self._var

    def obs(self) -> pd.DataFrame:
        """Sex and phenotype, where the `.fam` tells them."""
        return self._obs

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Calls, see :class:`VariantReader`."""
        if self._bed is None:
            raise ValueError(f"{str(self.path)!r} is closed: open it again.")
        columns = _slice_if_contiguous(variants)
        rows = slice(None) if samples.size == self.ids.size else samples
        # by sample as bed-reader has it, and in Fortran order so that it lies by variant
        calls = self._bed.read(index=(rows, columns), dtype="int8", order="F", num_threads=1)
        return VariantBlock(calls.T)

    def read_packed(self, start: int, stop: int) -> VariantBlock:
        """Packed calls, see :class:`PackedReader`.

        A `.bed` holds a variant's donors as the store holds a donor's variants, with codes of its own: 0 for two copies
        of allele 1, 1 for a missing call, 2 for one copy, 3 for none.
        """
        if self._bed is None:
            raise ValueError(f"{str(self.path)!r} is closed: open it again.")
        width = packed_width(len(self.ids))
        shape = (stop - start, width)
        calls = np.fromfile(self.path, dtype=np.uint8, count=shape[0] * width, offset=_HEADER_BYTES + start * width)
        if calls.size != shape[0] * width:
            raise ValueError(f"{str(self.path)!r} has become shorter while it was read. Prepare the study again.")
        low = calls >> 1
        low ^= calls
        low &= 0x55
        np.invert(calls, out=calls)
        calls &= 0xAA
        calls |= low
        return VariantBlock(calls.reshape(shape), packed=True)

    def close(self) -> None:
        """Let go of the file; reading then raises. May be called again."""
        self._bed = None


_PROPERTIES = (
    *("fid", "iid", "father", "mother", "sex", "pheno"),
    *("chromosome", "sid", "cm_position", "bp_position", "allele_1", "allele_2"),
)


def _slice_if_contiguous(positions: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == positions.size else positions


def _check_bed(path: Path, n_donors: int, n_variants: int) -> None:
    with path.open("rb") as file:
        magic, mode = file.read(2), file.read(1)
    if magic != _MAGIC:
        raise ValueError(f"{str(path)!r} is not a PLINK 1 .bed: it starts with {magic.hex()!r}, not {_MAGIC.hex()!r}.")
    if mode != _VARIANT_MAJOR:
        raise ValueError(
            f"{str(path)!r} is not variant-major (its third byte is {mode.hex()!r}, not '01'). "
            "Rewrite it with `plink --bfile … --make-bed`."
        )
    expected = _HEADER_BYTES + n_variants * packed_width(n_donors)
    if (size := path.stat().st_size) != expected:
        raise ValueError(
            f"A .bed must be as long as its .fam and .bim say: {n_donors:,} donors × {n_variants:,} variants make "
            f"{expected:,} bytes, but {str(path)!r} has {size:,}. It was cut off, or the files do not belong together."
        )
