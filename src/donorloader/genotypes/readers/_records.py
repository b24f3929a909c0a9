"""Records of a file as variants of two alleles: one for each ALT allele."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import shorten

from ._reader import check_multiallelic, empty_obs, variant_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from ._reader import Multiallelic

__all__ = ["Haploid", "RecordReader", "Records", "sex_chromosome_note", "split_records", "split_texts"]


@dataclass(frozen=True)
class Records:
    """The variants of a file, and the record that each comes from.

    Attributes
    ----------
    var
        The variants, as `variant_table` makes it.
    record, allele
        (n_variants,) number of the record, and of the allele in it that is counted: 1 is the first ALT.
    n_alleles
        (n_records,) alleles of each record, REF among them; at least 2.
    notes
        On records with several ALT alleles.
    undivided
        Records whose dosages are not told by ALT allele, as they are found: no allele can have them.
    """

    var: pd.DataFrame
    record: NDArray[np.int64]
    allele: NDArray[np.int64]
    n_alleles: NDArray[np.int64]
    notes: list[str]
    undivided: set[int] = field(default_factory=set)

    @property
    def undivided_notes(self) -> list[str]:
        """On the records whose dosages could not be used, if there were any."""
        if not self.undivided:
            return []
        names = self.var.index[np.searchsorted(self.record, sorted(self.undivided))]
        return [
            f"{len(names):,} records with several ALT alleles have one dosage for all of these together, which is that "
            f"of none of them: their dosages are missing: {shorten(names)}."
        ]


def split_records(
    file: Path,
    *,
    chrom: Any,
    pos: Any,
    ids: NDArray[np.object_],
    ref: Any,
    alts: Sequence[Sequence[str]],
    multiallelic: Multiallelic,
) -> Records:
    """One variant for each ALT allele of each record; a record without one has the ALT allele `"."`, which nobody has.

    Parameters
    ----------
    file
        The file, for messages.
    chrom, pos, ids, ref
        (n_records,) each.
    alts
        (n_records,) the ALT alleles of each.
    multiallelic
        `"split"`, or `"error"` where a record has several.

    Raises
    ------
    ValueError
        If there is no record, or one has several ALT alleles and that is not wanted.
    """
    if not len(alts):
        raise ValueError(f"Genotypes need variants, but {str(file)!r} has none.")
    n_alts = np.fromiter((max(1, len(alt)) for alt in alts), dtype=np.int64, count=len(alts))
    record = np.repeat(np.arange(len(alts)), n_alts)
    first = np.concatenate([[0], np.cumsum(n_alts)[:-1]])
    allele = np.arange(record.size) - first[record] + 1
    a1 = np.fromiter(chain.from_iterable(alt or (".",) for alt in alts), dtype=object, count=record.size)
    several = np.flatnonzero(n_alts > 1)
    names = [_name(chrom, pos, ids, int(i)) for i in several]
    notes = check_multiallelic(file, names, multiallelic)
    if not several.size:
        var = variant_table(chrom, pos, ids, ref, a1)
    else:
        var = variant_table(_take(chrom, record), np.asarray(pos)[record], ids[record], _take(ref, record), a1)
    return Records(var, record, allele, n_alts + 1, notes)


def split_texts(alt: Any) -> Sequence[Sequence[str]]:
    """ALT alleles from texts such as `"G"`, `"G,T"` and `"."`, whose categories are few."""
    categorical = pd.Categorical(alt)
    lists = [() if text in (".", "") else tuple(text.split(",")) for text in map(str, categorical.categories)]
    return [lists[code] for code in categorical.codes]


class Haploid:
    """Variants with calls of fewer than two copies, counted as they are read."""

    def __init__(self) -> None:
        self._by_chromosome: dict[str, int] = {}

    def add(self, chroms: Iterable[str]) -> None:
        """Count one variant on each of the chromosomes."""
        for chrom in chroms:
            self._by_chromosome[str(chrom)] = self._by_chromosome.get(str(chrom), 0) + 1

    @property
    def notes(self) -> list[str]:
        """What was found, if anything was."""
        if not self._by_chromosome:
            return []
        return [
            f"{sum(self._by_chromosome.values()):,} variants have calls of one copy, which count 0 or 1 "
            f"(chromosome {', '.join(sorted(self._by_chromosome))})."
        ]


class RecordReader:
    """Base of readers of records that tell nothing of donors but their ids."""

    ids: NDArray[np.object_]
    _records: Records
    _haploid: Haploid

    @property
    def notes(self) -> list[str]:
        """On records of several alleles, and on haploid calls and dosages read so far."""
        return [*self._records.notes, *self._records.undivided_notes, *self._haploid.notes]

    def var(self) -> pd.DataFrame:
        """Variants of the records."""
        return self._records.var

    def obs(self) -> pd.DataFrame:
        """Nothing but ids."""
        return empty_obs(self.ids)


def sex_chromosome_note(chrom: Any, kind: str) -> list[str]:
    """A note where a format without ploidy holds chromosomes that not everybody has two of."""
    categorical = pd.Categorical(chrom)
    used = set(categorical.codes)
    found = [
        str(name)
        for code, name in enumerate(categorical.categories)
        if code in used and str(name).upper().removeprefix("CHR") in _NOT_ALWAYS_TWO
    ]
    if not found:
        return []
    return [
        f"A {kind} has two copies of everything: calls of one copy, as of men on X, are 0 or 2 in it, and stay so "
        f"(chromosome {', '.join(found)})."
    ]


# Names, and the numbers that PLINK gives them: X, Y and mitochondria. (XY, 25, is the part that both have.)
_NOT_ALWAYS_TWO = frozenset({"X", "Y", "MT", "M", "23", "24", "26"})


def _name(chrom: Any, pos: Any, ids: NDArray[np.object_], i: int) -> str:
    return str(ids[i]) if ids[i] not in (".", "0", "") else f"{chrom[i]}:{pos[i]}"


def _take(values: Any, rows: NDArray[np.int64]) -> Any:
    return values.take(rows) if isinstance(values, pd.Categorical) else np.asarray(values, dtype=object)[rows]
