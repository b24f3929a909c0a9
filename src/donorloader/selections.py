"""Parts of a study that loaders can be limited to: donors, or cells within donors, drawn once and saved."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from donorloader._allot import cut_by_hash
from donorloader._ids import shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from os import PathLike

    import pandas as pd
    from numpy.typing import NDArray

__all__ = ["CellSelection", "DonorSelection", "Splits", "fingerprint_cells", "fingerprint_donors", "read_selection"]

_FORMAT, _VERSION = "donorloader-selection", 1


def fingerprint_donors(ids: Iterable[str]) -> str:
    """What tells one set of donors from another, in whatever order they come."""
    return "sha256:" + hashlib.sha256(json.dumps(sorted(ids)).encode()).hexdigest()


def fingerprint_cells(codes: NDArray[Any], ids: NDArray[np.object_]) -> str:
    """What tells one collection of cells from another: the donor of every row, in order."""
    digest = hashlib.sha256(json.dumps(list(ids)).encode())
    digest.update(np.ascontiguousarray(codes, dtype="<i4").tobytes())
    return "sha256:" + digest.hexdigest()


@dataclass(frozen=True)
class DonorSelection:
    """Donors of one split, for the argument `donors` of a loader. Made by :func:`donorloader.split_donors`.

    Attributes
    ----------
    split
        Name of the split.
    donors
        Their ids, sorted as text.
    others
        Ids of the donors that the split was drawn from and that are not in it.
    exact
        Whether a loader's cells must have just the donors that the split was drawn from: so for one drawn from a
        study. With one drawn from a table of donors, some may have no cells.
    """

    split: str
    donors: tuple[str, ...]
    others: tuple[str, ...] = field(repr=False)
    exact: bool = True

    @property
    def fingerprint(self) -> str:
        """Of all donors that the split was drawn from: the same for all splits of one draw."""
        return fingerprint_donors(self.donors + self.others)

    def __len__(self) -> int:
        """Number of donors."""
        return len(self.donors)

    def __iter__(self) -> Iterator[str]:
        """The ids."""
        return iter(self.donors)

    def check(self, ids: NDArray[np.object_]) -> list[str]:
        """The donors of this split that have cells, given those of all cells.

        Raises
        ------
        ValueError
            If the split was drawn from another study: a donor of these cells would be in no split, or the donors are
            not the same.
        """
        here, drawn = set(ids), set(self.donors) | set(self.others)
        if here - drawn or (self.exact and drawn - here):
            raise ValueError(
                f"A split can be used on what it was drawn from, but of the {len(here):,} donors of these cells "
                f"{_some(here - drawn)} not among the {len(drawn):,} that {self.split!r} was drawn from, and of those "
                f"{_some(drawn - here)} not here. Split this study, or name the donors: "
                "donors=list(selection)."
            )
        present = [donor for donor in self.donors if donor in here]
        if not present:
            raise ValueError(f"No donor of the split {self.split!r} has a cell here: {shorten(self.donors)}.")
        return present

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The selection as JSON text, written to a file if `path` is given."""
        content = {"kind": "donors", "split": self.split, "exact": self.exact, "fingerprint": self.fingerprint}
        return _write({**content, "donors": list(self.donors), "others": list(self.others)}, path)

    @classmethod
    def from_json(cls, source: str | PathLike[str]) -> Self:
        """A selection from the text, or the path of a file, that :meth:`to_json` made."""
        return _read(source, cls)

    @classmethod
    def _from_dict(cls, content: dict[str, Any]) -> Self:
        made = cls(content["split"], tuple(content["donors"]), tuple(content["others"]), bool(content["exact"]))
        if made.fingerprint != content["fingerprint"]:
            raise ValueError("A selection must have the donors that its fingerprint tells of; this one was changed.")
        return made


@dataclass(frozen=True)
class CellSelection:
    """Cells of one split within donors, for the argument `donors` of a loader. Made by :func:`donorloader.split_cells`.

    It holds how the cells were drawn, not their rows: a cell's split is a hash of (seed, row).

    Attributes
    ----------
    split
        Name of the split.
    fractions
        Share of every split, as text of a fraction, by name.
    seed
        The seed.
    n_cells
        Number of cells of the collection.
    fingerprint
        Of the donor of every row.
    """

    split: str
    fractions: dict[str, str]
    seed: int
    n_cells: int
    fingerprint: str

    def mask(self, codes: NDArray[Any], ids: NDArray[np.object_]) -> NDArray[np.bool_]:
        """(n_cells,) whether each cell is in this split, given the donor of each.

        Raises
        ------
        ValueError
            If the cells are not those that the split was drawn from, in the same order.
        """
        if codes.size != self.n_cells or fingerprint_cells(codes, ids) != self.fingerprint:
            raise ValueError(
                f"A split of cells can be used on the collection it was drawn from, but {self.split!r} was drawn from "
                f"another: it had {self.n_cells:,} cells, these are {codes.size:,}, or their order differs, as it does "
                "between the cells and the bags of a study. Split this collection."
            )
        shares = {name: Fraction(share) for name, share in self.fractions.items()}
        return cut_by_hash(codes, shares, self.seed) == list(shares).index(self.split)

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """The selection as JSON text, written to a file if `path` is given."""
        content = {"kind": "cells", "split": self.split, "fractions": self.fractions, "seed": self.seed}
        return _write({**content, "n_cells": self.n_cells, "fingerprint": self.fingerprint}, path)

    @classmethod
    def from_json(cls, source: str | PathLike[str]) -> Self:
        """A selection from the text, or the path of a file, that :meth:`to_json` made."""
        return _read(source, cls)

    @classmethod
    def _from_dict(cls, content: dict[str, Any]) -> Self:
        names = ("split", "fractions", "seed", "n_cells", "fingerprint")
        made = cls(**{name: content[name] for name in names})
        if made.split not in made.fractions:
            raise ValueError(f"A selection must be one of its splits, but {made.split!r} has no fraction.")
        return made


class Splits(Mapping[str, "DonorSelection | CellSelection"]):
    """Selections by the name of their split, e.g. ``split["train"]``.

    Attributes
    ----------
    report
        One row per split and stratum: what it has, what its share would be, and the difference. Unit: donors, or
        cells. `None` after :meth:`from_json`.
    """

    def __init__(self, selections: Mapping[str, DonorSelection | CellSelection], report: pd.DataFrame | None = None):
        self._selections = dict(selections)
        self.report = report

    def __getitem__(self, split: str) -> DonorSelection | CellSelection:
        if split not in self._selections:
            raise KeyError(f"There is no split {split!r}, only {shorten(self._selections)}.")
        return self._selections[split]

    def __iter__(self) -> Iterator[str]:
        return iter(self._selections)

    def __len__(self) -> int:
        return len(self._selections)

    def __repr__(self) -> str:
        return f"Splits({', '.join(map(repr, self._selections.values()))})"

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """All selections as JSON text, written to a file if `path` is given."""
        parts = [json.loads(selection.to_json()) for selection in self._selections.values()]
        return _write({"kind": "splits", "selections": parts}, path)

    @classmethod
    def from_json(cls, source: str | PathLike[str]) -> Self:
        """Splits from the text, or the path of a file, that :meth:`to_json` made."""
        return _read(source, cls)

    @classmethod
    def _from_dict(cls, content: dict[str, Any]) -> Self:
        made = [_make(part) for part in content["selections"]]
        names = Counter(part.split for part in made)
        donors = Counter(donor for part in made if isinstance(part, DonorSelection) for donor in part)
        for what, counts in (("splits", names), ("donors", donors)):
            if repeated := [each for each, count in counts.items() if count > 1]:
                raise ValueError(f"Splits must have their {what} once, but these were changed: {shorten(repeated)}.")
        return cls({part.split: part for part in made})


def read_selection(source: str | PathLike[str]) -> DonorSelection | CellSelection | Splits:
    """Whatever selection a JSON text or file holds."""
    return _make(_parse(source))


_KINDS: dict[str, Any] = {"donors": DonorSelection, "cells": CellSelection, "splits": Splits}


def _make(content: Any) -> Any:
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise ValueError(f"This is not a {_FORMAT} of version {_VERSION}. Use what to_json() of a selection wrote.")
    try:
        return _KINDS[content["kind"]]._from_dict(content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"The selection is not whole: {error}. Draw it again.") from error


def _read(source: str | PathLike[str], kind: type[Any]) -> Any:
    made = _make(_parse(source))
    if not isinstance(made, kind):
        raise ValueError(
            f"This is a {type(made).__name__}, not a {kind.__name__}: use {type(made).__name__}.from_json."
        )
    return made


def _parse(source: str | PathLike[str]) -> Any:
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    text = str(source) if is_text else Path(source).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"A selection is saved as JSON, but this is not valid: {error}.") from error


def _write(content: dict[str, Any], path: str | PathLike[str] | None) -> str:
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **content}, indent=1)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _some(ids: set[str]) -> str:
    return f"{len(ids):,} ({shorten(sorted(ids), 3)}) are" if ids else "0 are"
