"""PLINK 1 `.bed`/`.bim`/`.fam` as donor rows of hard calls."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd

from donorloader._ids import duplicates, shorten

if TYPE_CHECKING:
    from os import PathLike
    from typing import Self

    from numpy.typing import NDArray

    from ._rows import Columns

__all__ = ["IdBy", "PlinkBed"]

IdBy = Literal["iid", "fid_iid"]

_MAGIC = b"\x6c\x1b"
_VARIANT_MAJOR = b"\x01"
# What bed-reader returns for a missing call in int8.
_BED_READER_MISSING = -127


class PlinkBed:
    """Donor rows of a PLINK 1 file set, read on demand with bed-reader.

    A call is the number of copies of allele 1 (column 5 of the `.bim`) that the donor carries: 0, 1, 2, or -1 where
    the call is missing. The format is https://www.cog-genomics.org/plink/1.9/formats#bed.

    Parameters
    ----------
    path
        The `.bed` file; `.bim` and `.fam` are its siblings of the same name.
    id_by
        `"iid"`: donor ids are the IIDs (column 2 of the `.fam`); what most panels use, also where every FID is `0`.
        `"fid_iid"`: ids are `FID_IID`, for panels whose IIDs repeat between families.

    Attributes
    ----------
    ids
        (n_donors,) donor ids, as `str` objects, in the order of the `.fam`.
    n_variants
        Number of variants.
    dtype
        `int8`.

    Raises
    ------
    FileNotFoundError
        If one of the three files does not exist.
    ValueError
        If a file is malformed, the `.bed` is not as long as `.fam` and `.bim` say, donor ids repeat, or
        `id_by="fid_iid"` meets a `.fam` whose FIDs are all `0`.
    """

    dtype: np.dtype[Any] = np.dtype(np.int8)

    def __init__(self, path: str | PathLike[str], *, id_by: IdBy = "iid") -> None:
        if id_by not in get_args(IdBy):
            raise ValueError(f"id_by must be one of {get_args(IdBy)}, got {id_by!r}.")
        self.path = Path(path)
        self._fam = self.path.with_suffix(".fam")
        self._bim = self.path.with_suffix(".bim")
        for file in (self.path, self._bim, self._fam):
            if not file.is_file():
                raise FileNotFoundError(
                    f"A PLINK file set is a .bed with its .bim and .fam beside it, but {str(file)!r} does not exist."
                )
        self.ids = self._read_ids(id_by)
        self._variants = self._read_variants()
        self.n_variants = len(self._variants)
        _check_bed(self.path, len(self.ids), self.n_variants)

        from bed_reader import open_bed

        # Counts given and no properties asked for: bed-reader then reads nothing but calls.
        self._bed: Any = open_bed(
            self.path, iid_count=len(self.ids), sid_count=self.n_variants, properties=dict.fromkeys(_PROPERTIES)
        )

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[np.int8]:
        """Calls of some donors at some variants.

        Parameters
        ----------
        rows
            Positions of the donors in `ids`.
        columns
            Positions of the variants, or a slice of them.

        Returns
        -------
        (len(rows), n_columns) C-contiguous int8 array; -1 is missing.
        """
        if self._bed is None:
            raise ValueError(f"{str(self.path)!r} is closed: reading needs an open PlinkBed.")
        calls: NDArray[np.int8] = self._bed.read(index=(np.asarray(rows), columns), dtype="int8", order="C")
        # Missing is the only negative value, so clipping from below renames it without a mask.
        return np.maximum(calls, -1, out=calls)

    def names(self, columns: Columns) -> NDArray[np.object_]:
        """Names of variants: the index of `var()`, as `str` objects."""
        return np.asarray(self._variants.index.to_numpy(dtype=object)[columns], dtype=object)

    def obs(self) -> pd.DataFrame:
        """One row per donor and no column: sex and phenotype of the `.fam` are not read."""
        return pd.DataFrame(index=pd.Index(self.ids, dtype=object))

    def var(self) -> pd.DataFrame:
        """Variants: `chrom`, `pos` (base pairs, 1-based as in the `.bim`), `a0`, `a1`, `counted`, `id`.

        The index is the variant's id where that is given and unique, else `chrom:pos:a0:a1`; `id` is as in the `.bim`.
        `a1` is PLINK's allele 1, and `counted`, the allele whose copies a call counts, is the same.
        """
        return self._variants.copy()

    def close(self) -> None:
        """Let go of the file; reading then raises. May be called again."""
        self._bed = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ids(self, id_by: IdBy) -> NDArray[np.object_]:
        table = _read_table(self._fam, ["fid", "iid"], [0, 1], n_columns=6)
        fid, iid = table["fid"].to_numpy(dtype=object), table["iid"].to_numpy(dtype=object)
        if id_by == "fid_iid" and (fid == "0").all():
            raise ValueError(
                f"id_by='fid_iid' needs family ids, but every FID in {str(self._fam)!r} is '0' (no family given). "
                "Use id_by='iid'."
            )
        ids = iid if id_by == "iid" else fid + "_" + iid
        if repeated := duplicates(ids):
            remedy = "Use id_by='fid_iid', or rename them." if id_by == "iid" else "Rename them."
            raise ValueError(
                f"Donor ids must be unique, but {str(self._fam)!r} has more than one row for "
                f"{shorten(repeated)}. {remedy}"
            )
        return ids

    def _read_variants(self) -> pd.DataFrame:
        table = _read_table(self._bim, ["chrom", "id", "pos", "a1", "a0"], [0, 1, 3, 4, 5], n_columns=6)
        pos = pd.to_numeric(table["pos"], errors="coerce")
        if (bad := np.flatnonzero(pos.isna())).size:
            raise ValueError(
                f"Column 4 of a .bim is a position, but {str(self._bim)!r} has {table['pos'].iloc[bad[0]]!r} "
                f"in line {bad[0] + 1}."
            )
        variants = pd.DataFrame(
            {
                "chrom": pd.Categorical(table["chrom"]),
                "pos": pos.to_numpy(dtype=np.int64),
                "a0": pd.Categorical(table["a0"]),
                "a1": pd.Categorical(table["a1"]),
                "counted": pd.Categorical(table["a1"]),
                "id": table["id"].to_numpy(dtype=object),
            }
        )
        variants.index = pd.Index(_variant_names(variants), dtype=object)
        return variants


_PROPERTIES = (
    *("fid", "iid", "father", "mother", "sex", "pheno"),
    *("chromosome", "sid", "cm_position", "bp_position", "allele_1", "allele_2"),
)


def _read_table(file: Path, names: list[str], columns: list[int], *, n_columns: int) -> pd.DataFrame:
    """Columns of a headerless table, as text: white space separates, and `NA` is an id like any other."""
    with file.open(encoding="utf-8") as lines:
        first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ValueError(f"{str(file)!r} is empty.")
    if len(first.split()) != n_columns:
        raise ValueError(
            f"A {file.suffix} has {n_columns} columns, but {str(file)!r} has {len(first.split())}: {first!r}"
        )
    try:
        table = pd.read_csv(
            file,
            sep=r"\s+",
            header=None,
            usecols=[*columns, n_columns - 1],  # the last to see that every line has all
            dtype=object,
            keep_default_na=False,
            quoting=csv.QUOTE_NONE,
        )
    except pd.errors.ParserError as error:
        raise ValueError(f"{str(file)!r} is not a table of {n_columns} columns: {error}") from error
    last = table.iloc[:, -1]
    if (short := np.flatnonzero(last.isna() | (last == ""))).size:
        raise ValueError(
            f"A {file.suffix} has {n_columns} columns, but line {short[0] + 1} of {str(file)!r} has fewer."
        )
    return table[columns].set_axis(names, axis=1)


def _variant_names(variants: pd.DataFrame) -> NDArray[np.object_]:
    """Unique names: the id, else chrom:pos:a0:a1, else that with a running number."""
    ids = pd.Series(variants["id"].to_numpy(dtype=object))
    vague = (ids.isin([".", "0"]) | ids.duplicated(keep=False)).to_numpy()
    if not vague.any():
        return ids.to_numpy(dtype=object)
    rows = variants[vague]
    ids[vague] = [
        f"{chrom}:{pos}:{a0}:{a1}"
        for chrom, pos, a0, a1 in zip(rows["chrom"], rows["pos"], rows["a0"], rows["a1"], strict=True)
    ]
    taken = set(ids)
    for i in np.flatnonzero(ids.duplicated().to_numpy()):
        number = 2
        while (name := f"{ids[i]}:{number}") in taken:
            number += 1
        taken.add(name)
        ids[i] = name
    return ids.to_numpy(dtype=object)


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
    expected = 3 + n_variants * -(-n_donors // 4)
    if (size := path.stat().st_size) != expected:
        raise ValueError(
            f"A .bed must be as long as its .fam and .bim say: {n_donors:,} donors × {n_variants:,} variants make "
            f"{expected:,} bytes, but {str(path)!r} has {size:,}. It was cut off, or the files do not belong together."
        )
