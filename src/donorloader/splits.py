"""Training, validation and test: donors to splits, families together, strata in proportion; or cells in donors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from donorloader._allot import allot, check_fractions, cut_by_hash
from donorloader._donor_frame import donor_frame
from donorloader._ids import as_text, duplicates, shorten
from donorloader._options import GenotypeOptions
from donorloader._stream_loader import check_seed
from donorloader._tables import open_tables
from donorloader.selections import CellSelection, DonorSelection, Splits, fingerprint_cells

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from donorloader._choose import Donors
    from donorloader._tables import Tables

__all__ = ["split_cells", "split_donors"]

_FRACTIONS = {"train": 0.8, "val": 0.1, "test": 0.1}


def split_donors(
    study: Any,
    genotypes: Any = None,
    *,
    fractions: Mapping[str, float] = _FRACTIONS,
    seed: int = 0,
    stratify: str | Sequence[str] | None = None,
    group: str | None = None,
    donor_key: str | None = None,
    donors: Donors = None,
    cells_query: str | None = None,
    missing_donors: Literal["error", "drop", "nan"] = "error",
) -> Splits:
    """Split donors: no donor is in two splits, and a model can be tested on donors it has not seen.

    Parameters
    ----------
    study
        What :class:`DonorLoader` takes as `cells`, of which only ``obs`` is read; or a table of donors, a DataFrame
        with ids as index.
    genotypes
        As for :class:`DonorLoader`: their ``obs`` may have the columns that are named below.
    fractions
        Share of each split, by name. What they lack to 1 is in no split.
    seed
        The splits are a function of it, of the donors' ids and of the columns named below, in whatever order donors
        come.
    stratify
        Column, or columns, whose values each split has in proportion: within one donor of exact, for every value (or
        combination of values) and every split. Numbers are values like any other: bin them first. Columns come from
        ``obs`` of the genotypes, else from ``obs`` of the cells where they are constant within donors.
    group
        Column, from the same places, of what must stay together, such as the family. Where this conflicts with
        fractions and `stratify`, groups win; counts that are off by more than a donor are told by a warning and in
        ``report``.
    donor_key, donors, cells_query, missing_donors
        As for :class:`DonorLoader`: only donors that it would use are split. Give the loader the same.

    Returns
    -------
    Splits
        One :class:`DonorSelection` by the name of each split, for the argument `donors` of a loader. A loader refuses
        one that was drawn from other donors.

    Raises
    ------
    ValueError
        If the fractions are none, a donor has no value in a column, or a split would be empty.
    KeyError
        If a column is not found.

    Examples
    --------
    >>> split = split_donors("study/", seed=0, stratify="disease", group="family")  # doctest: +SKIP
    >>> train = DonorLoader("study/", donors=split["train"])  # doctest: +SKIP
    """
    shares = check_fractions(fractions)
    seed = check_seed(seed)
    strata_of = [stratify] if isinstance(stratify, str) else list(stratify or ())
    if not (group is None or isinstance(group, str)) or not all(isinstance(name, str) for name in strata_of):
        raise TypeError(
            f"stratify names a column or several, and group one, as text, but got {stratify=} and {group=}. Of several "
            "columns that tell of families, make one."
        )
    names = [*strata_of, *([] if group is None else [group])]
    if isinstance(study, pd.DataFrame):
        given = {"genotypes": genotypes, "donor_key": donor_key, "donors": donors, "cells_query": cells_query}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"A table of donors is split as it is: leave {', '.join(unused)} out.")
        frame, everyone = _table(study, names)
    else:
        frame, everyone = _look_up(study, genotypes, names, donor_key, donors, cells_query, missing_donors)
    for name in names:
        if (missing := frame[name].isna()).any():
            hint = " A donor without relatives is a group of its own." if name == group else ""
            raise ValueError(
                f"Every donor needs a value of {name!r}, but {int(missing.sum()):,} have none: "
                f"{shorten(frame.index[missing])}. Fill these in, or leave the donors out.{hint}"
            )
    frame = frame.sort_index()
    strata, labels = _codes(frame[strata_of])
    families = np.arange(len(frame)) if group is None else _codes(frame[[group]])[0]
    place = allot(strata, families, shares, seed)
    counts = _report(place, strata, labels, shares)
    _check(counts, shares, families, group)
    selections = {}
    for number, name in enumerate(shares):
        mine = set(frame.index[place == number])
        others = tuple(sorted(everyone - mine))
        selections[name] = DonorSelection(name, tuple(sorted(mine)), others, not isinstance(study, pd.DataFrame))
    return Splits(selections, counts)


def split_cells(
    study: Any,
    *,
    fractions: Mapping[str, float] = _FRACTIONS,
    seed: int = 0,
    donor_key: str | None = None,
) -> Splits:
    """Split the cells of each donor. **Donors leak**: every donor is in every split.

    Loss on such a split tells whether a model of these donors overfits their cells, as LIVI, with its embedding of each
    donor, is validated. It tells nothing of donors not seen: whatever a model has learned of a donor by heart looks
    like a success. For that use :func:`split_donors`.

    Parameters
    ----------
    study
        What :class:`DonorLoader` takes as `cells`.
    fractions
        Share of each split, by name: within one cell of exact for every donor.
    seed
        A cell's split is a function of it, of the row of the cell and of the donor of every row.
    donor_key
        As for :class:`DonorLoader`.

    Returns
    -------
    Splits
        One :class:`CellSelection` by the name of each split, for the argument `donors` of a loader. It is about rows of
        one collection: a loader refuses it for another, also for the grouped collection that bags of a study are read
        from.

    Raises
    ------
    ValueError
        If the fractions are none, or a split would be empty.
    """
    shares = check_fractions(fractions)
    seed = check_seed(seed)
    tables = _open(study, None, donor_key, None, None, "nan")  # whatever donors lack genotypes
    with tables.closed_on_error():
        codes, ids = tables.source.donors(tables.donor_key)
    tables.close()
    fingerprint = fingerprint_cells(codes, ids)
    place = cut_by_hash(codes, shares, seed)
    report = _report(place, codes.astype(np.int64), list(ids), shares).rename(columns={"donors": "cells"})
    totals = report.groupby("split")["cells"].sum()
    if empty := [name for name in shares if totals[name] == 0]:
        raise ValueError(
            f"Every split needs a cell, but {shorten(empty)} would have none of {codes.size:,} cells of {len(ids):,} "
            "donors. Give it a larger share, or use fewer splits."
        )
    texts = {name: str(share) for name, share in shares.items()}
    made = {name: CellSelection(name, texts, seed, int(codes.size), fingerprint) for name in shares}
    return Splits(made, report)


def _open(
    study: Any,
    genotypes: Any,
    donor_key: str | None,
    donors: Donors,
    cells_query: str | None,
    missing_donors: Literal["error", "drop", "nan"],
) -> Tables:
    return open_tables(
        study,
        genotypes,
        donor_key=donor_key,
        donors=donors,
        cells_query=cells_query,
        genotype_options=GenotypeOptions.checked(missing_donors=missing_donors, genotype_memory=0),
    )


def _look_up(
    study: Any,
    genotypes: Any,
    names: list[str],
    donor_key: str | None,
    donors: Donors,
    cells_query: str | None,
    missing_donors: Literal["error", "drop", "nan"],
) -> tuple[pd.DataFrame, set[str]]:
    """The columns of the donors that a loader would use, and the ids of all donors of the cells."""
    tables = _open(study, genotypes, donor_key, donors, cells_query, missing_donors)
    with tables.closed_on_error():
        codes, ids = tables.source.donors(tables.donor_key)
        frame = donor_frame(tables.source, codes, ids, tables.store, columns=names, keep=tables.match.keep)
    tables.close()
    return frame, set(ids)


def _table(table: pd.DataFrame, names: list[str]) -> tuple[pd.DataFrame, set[str]]:
    if isinstance(table.index, pd.RangeIndex) and table.index.name is None:
        raise ValueError(
            "A table of donors must have their ids as its index, but has pandas' default, numbers from 0. "
            "Use set_index."
        )
    if isinstance(table.index, pd.MultiIndex):
        raise ValueError(
            f"A table of donors has one id for each in its index, not {table.index.nlevels} levels. Use reset_index, "
            "then set_index."
        )
    ids = as_text(table.index, "the index of the table of donors")
    if repeated := duplicates(ids):
        raise ValueError(f"A table of donors has one row for each, but {shorten(repeated)} occur more than once.")
    if absent := [name for name in names if name not in table]:
        raise KeyError(f"The table of donors has no column {shorten(absent)}. It has {shorten(table.columns, 12)}.")
    if repeated := [name for name in names if list(table.columns).count(name) > 1]:
        raise ValueError(f"A table of donors names each column once, but {shorten(repeated)} occur more than once.")
    if not ids.size:
        raise ValueError("A table of donors needs at least one.")
    return table.set_axis(pd.Index(ids, dtype=object))[list(dict.fromkeys(names))], set(ids)


def _codes(columns: pd.DataFrame) -> tuple[NDArray[np.int64], list[Any]]:
    """A number for each combination of values, in an order that does not depend on that of the rows, and its name."""
    if columns.shape[1] == 0:
        return np.zeros(len(columns), dtype=np.int64), ["all"]
    # as text: categories, text and numbers of one column in several tables sort alike
    texts = (
        columns.astype(object).astype(str).agg(tuple, axis=1)
        if columns.shape[1] > 1
        else columns.iloc[:, 0].astype(str)
    )
    codes, labels = pd.factorize(texts.to_numpy(dtype=object), sort=True)
    return codes.astype(np.int64), list(labels)


def _report(
    place: NDArray[Any], strata: NDArray[np.int64], labels: list[Any], shares: Mapping[str, Fraction]
) -> pd.DataFrame:
    sizes = np.bincount(strata, minlength=len(labels))
    rows = []
    for number, (name, share) in enumerate(shares.items()):
        counts = np.bincount(strata[place == number], minlength=len(labels))
        rows += [
            (name, label, int(count), float(size * share))
            for label, count, size in zip(labels, counts, sizes.tolist(), strict=True)
        ]
    report = pd.DataFrame(rows, columns=["split", "stratum", "donors", "share"])
    report["off_by"] = report["donors"] - report["share"]
    return report


def _check(
    counts: pd.DataFrame, shares: Mapping[str, Fraction], families: NDArray[np.int64], group: str | None
) -> None:
    """Refuse empty splits, and tell of counts that are further off than rounding explains."""
    totals = counts.groupby("split")["donors"].sum()
    sizes = np.bincount(families)
    largest = (
        "" if group is None else f" The largest of the {sizes.size:,} groups of {group!r} has {sizes.max():,} donors."
    )
    if empty := [name for name in shares if totals[name] == 0]:
        raise ValueError(
            f"Every split needs a donor, but {shorten(empty)} would have none of {sizes.sum():,}.{largest} Give it a "
            "larger share, or use fewer splits."
        )
    off = counts[counts["off_by"].abs() >= 1 + 1e-9]
    if len(off):
        worst = off.loc[off["off_by"].abs().idxmax()]
        warnings.warn(
            f"Groups stay together, so {len(off):,} of {len(counts):,} counts are off by more than one donor, at worst "
            f"{worst['stratum']!r} in {worst['split']!r}: {worst['donors']:,} in place of {worst['share']:.1f}."
            f"{largest} See report for all.",
            UserWarning,
            stacklevel=3,
        )
