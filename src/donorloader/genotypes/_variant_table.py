"""The table of variants: columns under the names we know, the allele that is counted, the memory that it takes."""

from __future__ import annotations

import sys

import pandas as pd

__all__ = ["bytes_of_table", "counted_allele", "describe_variants"]

# Column names that tools give to what a variant is, in lower case. The first is ours.
_KNOWN_AS = {
    "chrom": ("chrom", "#chrom", "chr", "chromosome", "contig"),
    "pos": ("pos", "position", "bp", "base_pair_location"),
    "a0": ("a0", "ref", "reference", "allele_0", "allele0"),
    "a1": ("a1", "alt", "alternate", "allele_1", "allele1"),
    "counted": ("counted", "counted_allele"),
}


def describe_variants(var: pd.DataFrame) -> pd.DataFrame:
    """Variant table with `chrom`, `pos`, `a0`, `a1` added under these names where a column of another name has them.

    All columns stay. `counted` is the allele whose copies a genotype counts, or `"unknown"` where the source does not
    say: readers differ in it, so it is never guessed.
    """
    var = var.copy()
    var.index.name = None
    by_name = {str(column).lower(): column for column in reversed(var.columns)}
    for ours, names in _KNOWN_AS.items():
        known = next((by_name[name] for name in names if name in by_name), None)
        if known is not None and ours not in var.columns:
            var[ours] = var[known]
    if "counted" not in var.columns:
        var["counted"] = pd.Categorical(["unknown"]).repeat(len(var))
    return var


def counted_allele(var: pd.DataFrame) -> str:
    """Whose copies genotypes count: `"a1"`, `"a0"`, `"differs by variant"` or `"unknown"`.

    Parameters
    ----------
    var
        Variants, with the columns that `describe_variants` knows.
    """
    if "counted" not in var.columns:
        return "unknown"
    counted = var["counted"].astype(str).to_numpy()
    for name in ("a1", "a0"):
        if name in var.columns and (counted == var[name].astype(str).to_numpy()).all():
            return name
    return "unknown" if (counted == "unknown").all() else "differs by variant"


def bytes_of_table(table: pd.DataFrame) -> int:
    """Memory of a table. Of many texts every hundredth is looked at: to look at each takes longer than to pack them."""
    total = 0
    for values in (table.index, *(table[column].array for column in table.columns)):
        if isinstance(values.dtype, pd.CategoricalDtype):
            total += values.codes.nbytes
            values = values.categories
        if values.dtype.kind == "O" and len(values) > 100_000:
            total += 8 * len(values) + 100 * sum(map(sys.getsizeof, values[::100]))
        else:
            total += pd.Index(values).memory_usage(deep=True)
    return total
