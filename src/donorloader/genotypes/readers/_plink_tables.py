"""The tables beside PLINK genotypes: variants (`.bim`, `.pvar`) and donors (`.fam`, `.psam`)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd

from ._reader import IdBy, check_ids

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["Donors", "VariantColumns", "check_id_by", "read_bim", "read_donors", "read_pvar"]


@dataclass(frozen=True)
class VariantColumns:
    """Variants as a table has them; `alt` may hold several alleles, separated by commas."""

    chrom: Any
    pos: NDArray[np.int64]
    ids: NDArray[np.object_]
    ref: Any
    alt: Any


@dataclass(frozen=True)
class Donors:
    """Ids and what else a table of donors tells."""

    ids: NDArray[np.object_]
    obs: pd.DataFrame


def check_id_by(id_by: str) -> None:
    """Refuse a rule for ids that does not exist."""
    if id_by not in get_args(IdBy):
        raise ValueError(f"id_by must be one of {get_args(IdBy)}, got {id_by!r}.")


def read_bim(file: Path) -> VariantColumns:
    """A `.bim`: chromosome, id, cM, position, allele 1 (`alt` here), allele 2 (`ref`)."""
    first, _ = _first_line(file)
    _check_width(file, first, 6)
    table = _read(file, first, ["chrom", "id", None, "pos", "alt", "ref"], skip=0, position_column=4)
    return VariantColumns(table["chrom"], table["pos"], table["id"], table["ref"], table["alt"])


def read_pvar(file: Path) -> VariantColumns:
    """A `.pvar`: with a `#CHROM` header as a VCF has it, or without as a `.bim` is laid out."""
    line, skip = _skip_comments(file)
    if not line.startswith("#CHROM"):
        if skip or not line.strip():
            raise ValueError(
                f"A .pvar names its columns in a line that starts with #CHROM, but {str(file)!r} has none."
            )
        return read_bim(file)
    header = line.rstrip("\r\n").split()
    if absent := [name for name in ("POS", "ID", "REF", "ALT") if name not in header]:
        raise ValueError(f"A .pvar has the columns POS, ID, REF and ALT, but {str(file)!r} lacks {', '.join(absent)}.")
    names = {"#CHROM": "chrom", "POS": "pos", "ID": "id", "REF": "ref", "ALT": "alt"}
    table = _read(file, line, [names.get(n) for n in header], skip=skip + 1, position_column=header.index("POS") + 1)
    return VariantColumns(table["chrom"], table["pos"], table["id"], table["ref"], table["alt"])


def read_donors(file: Path, id_by: IdBy) -> Donors:
    """Donors of a `.fam` or `.psam`.

    Sex is kept as `"male"` and `"female"`, and the first phenotype as numbers, where the table tells either of any
    donor: 0 and NA are "not known" for sex, -9 and NA for phenotypes, and a phenotype that is 0 everywhere.

    Raises
    ------
    ValueError
        If ids repeat, or families are asked for and none is given.
    """
    check_id_by(id_by)
    first, before = _first_line(file)
    columns = first.split()
    if columns[0] in ("#FID", "#IID"):
        names, skip = [name.removeprefix("#") for name in columns], before + 1
    else:
        _check_width(file, first, 6)
        names, skip = ["FID", "IID", "PAT", "MAT", "SEX", "PHENO1"], 0
    if "IID" not in names:
        raise ValueError(f"A {file.suffix} has a column IID, but {str(file)!r} has {', '.join(names)}.")
    table = _read_text(file, len(names), skip).set_axis(names, axis=1)
    iid = table["IID"].to_numpy(dtype=object)
    if id_by == "fid_iid":
        if "FID" not in names or (table["FID"] == "0").all():
            raise ValueError(
                f"id_by='fid_iid' needs family ids, but every FID in {str(file)!r} is '0' (no family given). "
                "Use id_by='iid'."
            )
        iid = table["FID"].to_numpy(dtype=object) + "_" + iid
    remedy = "Use id_by='fid_iid', or rename them." if id_by == "iid" else "Rename them."
    ids = check_ids(iid, file, remedy=remedy)
    obs = pd.DataFrame(index=pd.Index(ids, dtype=object))
    if "SEX" in names:
        sex = pd.Categorical(
            table["SEX"].map({"1": "male", "2": "female", "M": "male", "F": "female", "m": "male", "f": "female"}),
            categories=["female", "male"],
        )
        if (sex.codes >= 0).any():
            obs["sex"] = sex
    phenotypes = [name for name in names if name not in ("FID", "IID", "SID", "PAT", "MAT", "SEX")]
    if phenotypes:
        values = pd.to_numeric(table[phenotypes[0]], errors="coerce").to_numpy(dtype=np.float64, copy=True)
        values[values == -9] = np.nan
        if (values[~np.isnan(values)] != 0).any():
            obs["phenotype"] = values
    return Donors(ids, obs)


def _first_line(file: Path) -> tuple[str, int]:
    """As :func:`_skip_comments`, of a file that must have such a line."""
    line, before = _skip_comments(file)
    if not line:
        raise ValueError(f"{str(file)!r} is empty.")
    return line, before


def _skip_comments(file: Path) -> tuple[str, int]:
    """The first line that is not empty nor of a comment (``##``), ``""`` if none is, and how many are before it."""
    before = 0
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for line in lines:
                if line.strip() and not line.startswith("##"):
                    return line, before
                before += 1
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    return "", before


def _not_utf8(file: Path, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{str(file)!r} is not text in UTF-8 ({error}). Unpack it, or save it in UTF-8.")


def _check_width(file: Path, first: str, width: int) -> None:
    if len(first.split()) != width:
        raise ValueError(f"A {file.suffix} has {width} columns, but {str(file)!r} has {len(first.split())}: {first!r}")


def _read(file: Path, line: str, names: list[str | None], *, skip: int, position_column: int) -> dict[str, Any]:
    """Named columns of a table of variants, as text but for positions; few texts occur often, so most are categorical.

    Read as text first: pandas makes numbers of categories that look like them, and 1 of chromosome 01.
    """
    wanted = [i for i, name in enumerate(names) if name is not None]
    last = len(names) - 1  # to see that every line has all columns
    if last not in wanted:
        wanted.append(last)
    labels = [names[i] or f"column {i}" for i in wanted]
    try:
        table = pd.read_csv(
            file,
            sep=_separator(line),
            header=None,
            skiprows=skip,
            usecols=wanted,
            names=labels,
            dtype={label: np.int64 if label == "pos" else object for label in labels},
            keep_default_na=False,
            na_values={labels[-1]: [""]},
            quoting=csv.QUOTE_NONE,
        )
    except pd.errors.EmptyDataError:
        raise ValueError(f"{str(file)!r} names no variant.") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    except pd.errors.ParserError as error:
        raise ValueError(f"{str(file)!r} is not a table of {len(names)} columns: {error}") from error
    except ValueError:  # a position that is no whole number: find it
        raise _bad_position(file, len(names), skip, position_column) from None
    _refuse_short_lines(file, table[labels[-1]], len(names), skip)
    often = ("chrom", "ref", "alt")
    return {label: pd.Categorical(table[label]) if label in often else table[label].to_numpy() for label in labels}


def _read_text(file: Path, width: int, skip: int) -> pd.DataFrame:
    """A table as text: white space separates, and `NA` is an id like any other."""
    try:
        table = pd.read_csv(
            file,
            sep=r"\s+",
            header=None,
            skiprows=skip,
            names=range(width + 1),  # one more, so that a line that is too long shows
            dtype=object,
            keep_default_na=False,
            quoting=csv.QUOTE_NONE,
        )
    except pd.errors.EmptyDataError:
        raise ValueError(f"{str(file)!r} names no donor.") from None
    except UnicodeDecodeError as error:
        raise _not_utf8(file, error) from error
    except pd.errors.ParserError as error:
        raise ValueError(f"{str(file)!r} is not a table of {width} columns: {error}") from error
    extra = table.pop(width)
    if (long := np.flatnonzero(extra.notna() & (extra != ""))).size:
        raise ValueError(f"{str(file)!r} is not a table of {width} columns: line {long[0] + skip + 1} has more.")
    _refuse_short_lines(file, table.iloc[:, -1], width, skip)
    return table


def _separator(line: str) -> str:
    """Tabs are read faster than white space of any kind."""
    return "\t" if line.count("\t") == len(line.split()) - 1 else r"\s+"


def _refuse_short_lines(file: Path, last: pd.Series[Any], width: int, skip: int) -> None:
    if (short := np.flatnonzero(last.isna() | (last == ""))).size:
        raise ValueError(
            f"A {file.suffix} has {width} columns, but line {short[0] + skip + 1} of {str(file)!r} has fewer."
        )


def _bad_position(file: Path, width: int, skip: int, position_column: int) -> ValueError:
    table = _read_text(file, width, skip)
    positions = table[position_column - 1]
    wrong = np.flatnonzero(~positions.str.fullmatch(r"-?\d+").to_numpy(dtype=bool))
    row = int(wrong[0]) if wrong.size else 0
    return ValueError(
        f"Column {position_column} of a {file.suffix} is a position, but {str(file)!r} has {positions.iloc[row]!r} "
        f"in line {row + skip + 1}."
    )
