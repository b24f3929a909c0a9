"""Which donors and variants of a file to keep: by name, by region, by frequency and by missing calls."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from donorloader._ids import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from .readers import VariantBlock

__all__ = ["Filter", "Region", "Selection", "plain_chromosome"]


@dataclass(frozen=True)
class Region:
    """Part of a chromosome; positions are 1-based, and the last belongs to it."""

    text: str
    chrom: str
    start: int
    stop: int

    @classmethod
    def parse(cls, text: str) -> Region:
        """From `chr`, `chr:position` or `chr:start-end`, as `samtools` and `bcftools` write it.

        Raises
        ------
        ValueError
            If the text is none of these, or ends before it starts.
        """
        found = re.fullmatch(r"(?P<chrom>[^\s:]+)(?::(?P<start>[\d,]+)(?P<to>-(?P<stop>[\d,]+))?)?", str(text).strip())
        if found is None:
            raise ValueError(f"A region is chr, chr:position or chr:start-end, got {text!r}.")
        if found["start"] is None:
            return cls(str(text), found["chrom"], 0, 2**63 - 1)
        start = int(found["start"].replace(",", ""))
        stop = int(found["stop"].replace(",", "")) if found["to"] else start
        if stop < start:
            raise ValueError(f"A region ends where it starts or after, got {text!r}.")
        return cls(str(text), found["chrom"], start, stop)


@dataclass(frozen=True)
class Selection:
    """What to keep; all conditions hold at once.

    Attributes
    ----------
    regions
        Variants in any of these. Empty: everywhere.
    variants, samples
        Names to keep, `None` for all, in the order given.
    maf
        Least frequency of the rarer allele among the donors kept. 0: any.
    max_missing
        Largest part of the donors kept whose call may be missing. 1: any.
    """

    regions: tuple[Region, ...] = ()
    variants: tuple[str, ...] | None = None
    samples: tuple[str, ...] | None = None
    maf: float = 0.0
    max_missing: float = 1.0

    @classmethod
    def checked(
        cls,
        *,
        regions: str | Iterable[str] | None = None,
        variants: str | os.PathLike[str] | Iterable[str] | None = None,
        samples: str | os.PathLike[str] | Iterable[str] | None = None,
        maf: float | None = None,
        max_missing: float | None = None,
    ) -> Selection:
        """From what a user gives: names in a file (one a line) or a list.

        Raises
        ------
        FileNotFoundError
            If a file of names does not exist.
        ValueError
            If a region cannot be read, a list is empty, or a threshold is out of range.
        """
        texts = [regions] if isinstance(regions, str) else list(regions or ())
        return cls(
            regions=tuple(Region.parse(text) for text in texts),
            variants=_names(variants, "variants"),
            samples=_names(samples, "samples"),
            maf=_threshold(maf, "maf", 0.5) if maf is not None else 0.0,
            max_missing=_threshold(max_missing, "max_missing", 1.0) if max_missing is not None else 1.0,
        )

    @property
    def options(self) -> dict[str, bool]:
        """By name of the option: whether it leaves anything out."""
        nothing = Selection()
        return {f.name: getattr(self, f.name) != getattr(nothing, f.name) for f in fields(self)}

    def choose_samples(self, ids: NDArray[np.object_], file: Path) -> NDArray[np.int64]:
        """Positions of the donors to keep, in the order of the file.

        Raises
        ------
        KeyError
            If a name is not in the file.
        """
        if self.samples is None:
            return np.arange(ids.size)
        if unknown := sorted(set(self.samples) - set(ids)):
            raise KeyError(
                f"samples names donors that {str(file)!r} does not have: {shorten(unknown)}. "
                f"Its donors look like {shorten(ids[:3])}."
            )
        return np.flatnonzero(pd.Index(ids, dtype=object).isin(self.samples))

    def choose_variants(self, var: pd.DataFrame, file: Path) -> tuple[NDArray[np.int64], list[str]]:
        """Positions of the variants to read, ascending, and notes on what the regions hold.

        Parameters
        ----------
        var
            All variants of the file.
        file
            Its name, for messages.

        Raises
        ------
        KeyError
            If a chromosome or a name is not in the file.
        ValueError
            If nothing is left.
        """
        keep = np.ones(len(var), dtype=bool)
        notes = []
        if self.regions:
            in_regions, empty = self._in_regions(var, file)
            keep &= in_regions
            if empty:
                notes.append(f"{len(empty):,} of {len(self.regions):,} regions hold no variant: {shorten(empty)}.")
        if self.variants is not None:
            keep &= self._named(var, file)
        if not keep.any():
            raise ValueError(f"regions and variants leave none of the {len(var):,} variants of {str(file)!r}.")
        return np.flatnonzero(keep), notes

    def _in_regions(self, var: pd.DataFrame, file: Path) -> tuple[NDArray[np.bool_], list[str]]:
        chrom, pos = var["chrom"].array, var["pos"].to_numpy()
        codes: dict[str, list[int]] = {}
        for code in np.unique(chrom.codes):
            codes.setdefault(plain_chromosome(chrom.categories[code]), []).append(int(code))
        if unknown := [region.text for region in self.regions if plain_chromosome(region.chrom) not in codes]:
            raise KeyError(
                f"The regions {shorten(unknown)} are on chromosomes that {str(file)!r} does not have. "
                f"It has {shorten(chrom.categories[np.unique(chrom.codes)], 30)}."
            )
        keep = np.zeros(len(var), dtype=bool)
        empty = []
        for region in self.regions:
            mine = np.isin(chrom.codes, codes[plain_chromosome(region.chrom)])
            inside = mine & (pos >= region.start) & (pos <= region.stop)
            keep |= inside
            if not inside.any():
                empty.append(region.text)
        return keep, empty

    def _named(self, var: pd.DataFrame, file: Path) -> NDArray[np.bool_]:
        wanted = pd.Index(self.variants, dtype=object)
        ids, names = pd.Index(var["id"].to_numpy(dtype=object)), var.index
        if (unknown := wanted[~(wanted.isin(ids) | wanted.isin(names))]).size:
            raise KeyError(
                f"variants names variants that {str(file)!r} does not have: {shorten(unknown.unique())}. "
                f"Its variants look like {shorten(names[:3])}."
            )
        return np.asarray(ids.isin(wanted) | names.isin(wanted))


class Filter:
    """The thresholds of a selection, applied block by block, and how many variants each has left out."""

    def __init__(self, selection: Selection) -> None:
        self._maf = selection.maf
        self._max_missing = selection.max_missing
        self.seen = self.rare = self.missing = 0

    @property
    def idle(self) -> bool:
        """Whether every variant passes, whatever its calls."""
        return self._maf <= 0 and self._max_missing >= 1

    def passes(self, block: VariantBlock) -> NDArray[np.bool_]:
        """(n_variants,) mask of those to keep."""
        values = block.values
        n_variants, n_donors = values.shape
        missing = np.isnan(values) if values.dtype.kind == "f" else values < 0
        n_missing = missing.sum(axis=1)
        total = np.where(missing, 0, values).sum(axis=1, dtype=np.float64)
        copies = 2 * (n_donors - n_missing) if block.copies is None else block.copies
        with np.errstate(invalid="ignore", divide="ignore"):
            frequency = total / copies  # NaN where no donor has a call: never frequent enough
        frequent = np.minimum(frequency, 1 - frequency) >= self._maf - _ROUNDING if self._maf > 0 else True
        complete = n_missing <= self._max_missing * n_donors + _ROUNDING
        keep = np.asarray(complete & frequent)
        self.seen += n_variants
        self.missing += int((~complete).sum())
        self.rare += int((complete & ~keep).sum())
        return keep

    @property
    def notes(self) -> list[str]:
        """What was left out, in a sentence."""
        parts = []
        if self.missing:
            parts.append(f"{self.missing:,} with more than {self._max_missing:g} of the calls missing")
        if self.rare:
            parts.append(f"{self.rare:,} with a minor allele frequency below {self._maf:g}")
        if not parts:
            return []
        return [f"Of {self.seen:,} variants read, {' and '.join(parts)} were left out."]


# Sums of dosages and thresholds such as 0.05 are rounded: equal is to mean equal.
_ROUNDING = 1e-7


def plain_chromosome(name: str) -> str:
    """A chromosome's name without what tools write differently: `chr1` and `1` are the same, `chrM` and `MT` too."""
    plain = re.sub(r"^chr", "", str(name), flags=re.IGNORECASE)
    return "MT" if plain in ("M", "MT") else plain


def _names(given: Any, what: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if not path.is_file():
            raise FileNotFoundError(f"The file of {what} {str(path)!r} does not exist.")
        given = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        names = tuple(dict.fromkeys(line for line in given if line))
        if spaced := [name for name in names if len(name.split()) > 1]:
            raise ValueError(f"{str(path)!r} must have one name a line, but has {shorten(spaced)}.")
        where = repr(str(path))
    else:
        names, where = tuple(dict.fromkeys(str(name) for name in given)), what
    if not names:
        raise ValueError(f"{where} names no {what}: name at least one, or leave {what} out.")
    return names


def _threshold(value: float, name: str, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number from 0 to {most:g}, got {value!r}.")
    if not math.isfinite(value) or not 0 <= value <= most:
        raise ValueError(f"{name} must be from 0 to {most:g}, got {value!r}.")
    return float(value)
