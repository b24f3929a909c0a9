"""What every reader of genotype files gives: variants in blocks, and which allele their values count."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from donorloader._ids import duplicates, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "IdBy",
    "Multiallelic",
    "PackedReader",
    "VariantBlock",
    "VariantReader",
    "check_ids",
    "check_multiallelic",
    "damaged",
    "empty_obs",
    "import_library",
    "variant_table",
]

IdBy = Literal["iid", "fid_iid"]
Multiallelic = Literal["split", "error"]


# What files have in place of an id.
_NO_NAMES = (".", "0", "")


@dataclass(frozen=True)
class VariantBlock:
    """Genotypes of some variants.

    Attributes
    ----------
    values
        (n_variants, n_donors) copies of `a1`: int8, negative where missing, or float32 dosages, NaN where missing.
        Where `packed`: (n_variants, packed_width(n_donors)) uint8, a variant packed as the store packs a donor.
    packed
        Whether values are packed calls.
    copies
        (n_variants,) int64 copies of the chromosome that the called donors have: what an allele's frequency divides by.
        `None`: two for every donor with a call.
    """

    values: NDArray[Any]
    copies: NDArray[np.int64] | None = None
    packed: bool = False


class VariantReader(Protocol):
    """A file of genotypes, read by variants.

    Attributes
    ----------
    path
        The file.
    ids
        (n_donors,) donor ids as text, unique.
    n_variants
        Number of variants, each of two alleles: a record with several ALT alleles counts once for each.
    dtype
        int8 for hard calls, float32 for dosages.
    granule
        Records that the file keeps together: reading is fastest by multiples of these.
    parallel
        Blocks that may be read ahead at the same time, each on a thread of its own. 0: on the caller's alone.
    notes
        What reading has found so far that a user should know, a sentence each.
    """

    path: Path
    ids: NDArray[np.object_]
    n_variants: int
    dtype: np.dtype[Any]
    granule: int
    parallel: int

    @property
    def notes(self) -> list[str]: ...

    def var(self) -> pd.DataFrame:
        """Variants as `variant_table` makes it."""

    def obs(self) -> pd.DataFrame:
        """Donors, in order of `ids`: what the file tells of them beside genotypes."""

    def read_block(self, variants: NDArray[np.int64], samples: NDArray[np.int64]) -> VariantBlock:
        """Genotypes of some variants, for some donors.

        Parameters
        ----------
        variants, samples
            Positions, ascending. Blocks are asked for from the first variant to the last; going back may mean to read
            the file from its start.
        """

    def close(self) -> None:
        """Let go of the file; reading then raises. May be called again."""


@runtime_checkable
class PackedReader(Protocol):
    """A reader of a file whose calls have two bits each, and need not be unpacked to be packed again."""

    def read_packed(self, start: int, stop: int) -> VariantBlock:
        """Packed calls of consecutive variants, for all donors."""


def variant_table(chrom: Any, pos: Any, ids: Any, a0: Any, a1: Any) -> pd.DataFrame:
    """Variants with the columns `chrom`, `pos`, `a0`, `a1`, `counted`, `id`.

    `pos` is 1-based; genotypes count `a1`, and so `counted` is the same; `a0` is the other allele. The index is the
    variant's id where that is given and unique in the file, else `chrom:pos:a0:a1`, else that with a running number.

    Parameters
    ----------
    chrom, pos, ids, a0, a1
        (n_variants,) each.
    """
    chrom, a0, a1 = (pd.Categorical(values) for values in (chrom, a0, a1))
    ids = np.asarray(ids, dtype=object)
    variants = pd.DataFrame(
        {
            "chrom": chrom,
            "pos": np.asarray(pos, dtype=np.int64),
            "a0": a0,
            "a1": a1,
            "counted": a1,
            "id": pd.Series(ids, dtype=object),
        }
    )
    variants.index = _unique_names(variants, ids)
    return variants


def _unique_names(variants: pd.DataFrame, ids: NDArray[np.object_]) -> pd.Index:
    index = pd.Index(ids, dtype=object)
    if index.is_unique and (index.get_indexer(_NO_NAMES) < 0).all():
        return index  # which remembers that it is unique: to find that out again takes long
    vague = index.duplicated(keep=False) | index.isin(_NO_NAMES)
    names = ids.copy()
    rows = variants[vague]
    names[vague] = [
        f"{chrom}:{pos}:{a0}:{a1}"
        for chrom, pos, a0, a1 in zip(rows["chrom"], rows["pos"], rows["a0"], rows["a1"], strict=True)
    ]
    taken = set(names)
    numbers: dict[str, int] = {}
    for i in np.flatnonzero(pd.Index(names, dtype=object).duplicated()):
        number = numbers.get(names[i], 2)
        while (name := f"{names[i]}:{number}") in taken:
            number += 1
        numbers[names[i]] = number + 1
        taken.add(name)
        names[i] = name
    return pd.Index(names, dtype=object)


def empty_obs(ids: NDArray[np.object_]) -> pd.DataFrame:
    """Donors of whom nothing is known but their ids."""
    return pd.DataFrame(index=pd.Index(ids, dtype=object))


def check_ids(ids: NDArray[np.object_], file: Path, *, remedy: str = "Rename them.") -> NDArray[np.object_]:
    """The ids, if there are any and each is given once.

    Raises
    ------
    ValueError
        If there are none, one is empty, or some repeat: rows could not be told apart.
    """
    if not ids.size:
        raise ValueError(f"Genotypes need donors, but {str(file)!r} names none.")
    if (ids == "").any():
        raise ValueError(f"Every donor needs an id, but one in {str(file)!r} is empty. Name it.")
    if repeated := duplicates(ids):
        raise ValueError(
            f"Donor ids must be unique, but {str(file)!r} has more than one row for {shorten(repeated)}. {remedy}"
        )
    return ids


def check_multiallelic(file: Path, names: list[str], multiallelic: Multiallelic) -> list[str]:
    """A note on the records with several ALT alleles, or an error where they are not wanted.

    Parameters
    ----------
    file
        The file.
    names
        Names of these records.
    multiallelic
        What to do with them.
    """
    if not names:
        return []
    if multiallelic == "error":
        raise ValueError(
            f"multiallelic='error' allows one ALT allele per record, but {len(names):,} records of {str(file)!r} have "
            f"several: {shorten(names)}. Use multiallelic='split' for one variant per ALT allele."
        )
    return [
        f"{len(names):,} records with several ALT alleles became one variant per ALT allele, which counts that allele "
        f"against all others: {shorten(names)}."
    ]


def import_library(library: str, extra: str, what: str) -> Any:
    """A library that reads one kind of file, or an error that names what to install."""
    try:
        return import_module(library)
    except ImportError as error:
        raise ImportError(
            f"Reading {what} needs the package {library!r}, which cannot be imported ({error}). "
            f"Install it with `pip install 'donorloader[{extra}]'`."
        ) from error


@contextmanager
def damaged(file: Path, kind: str) -> Iterator[None]:
    """Say which file it is that a library cannot read."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # libraries raise anything, plain Exception too
        raise ValueError(
            f"{str(file)!r} cannot be read as {kind}: {_plain(error)}. It is damaged, cut off or of another kind: "
            "copy or write it again."
        ) from error


def _plain(error: Exception) -> str:
    first = error.args[0] if error.args else error
    text = first.decode(errors="replace") if isinstance(first, bytes) else str(first)
    return text.strip().rstrip(".")
