"""Writing donor rows as an AnnData zarr store that is read by whole rows."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from zarr.codecs import BloscCodec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from ._rows import GenotypeRows

__all__ = ["GenotypeCounts", "count_missing", "counted_allele", "describe_variants", "write_genotypes"]

# Target sizes of one chunk and of one shard of X, in bytes before compression. A chunk is what one row costs to read,
# so it is small; a shard is one file, so it is large.
_CHUNK_BYTES = 512 * 2**10
_SHARD_BYTES = 64 * 2**20

# Of the memory that is granted, a block of rows may take this part: the source's own copy while it reads, and the shard
# being compressed, come on top. The variants' annotation is held whole, and copied as it is written.
_BLOCK_PART = 0.3
_PEAK_PER_VAR = 2

# Column names that tools give to what a variant is, in lower case. The first is ours.
_KNOWN_AS = {
    "chrom": ("chrom", "#chrom", "chr", "chromosome", "contig"),
    "pos": ("pos", "position", "bp", "base_pair_location"),
    "a0": ("a0", "ref", "reference", "allele_0", "allele0"),
    "a1": ("a1", "alt", "alternate", "allele_1", "allele1"),
    "counted": ("counted", "counted_allele"),
}


@dataclass(frozen=True)
class GenotypeCounts:
    """What `write_genotypes` wrote.

    Attributes
    ----------
    n_donors, n_variants
        Shape of the store.
    dtype
        Type of its values.
    missing_calls
        Number of values that are missing: -1 in integers, NaN in floats.
    counted
        The allele that genotypes count, see :func:`counted_allele`.
    repeated_names
        Number of variants whose name another variant has had before.
    """

    n_donors: int
    n_variants: int
    dtype: str
    missing_calls: int
    counted: str
    repeated_names: int


def write_genotypes(
    source: GenotypeRows,
    path: Path,
    *,
    rows: NDArray[np.int64] | None = None,
    memory: int,
    on_rows: Callable[[int], None] | None = None,
) -> GenotypeCounts:
    """Write donors × variants as an AnnData zarr store (v3) in chunks of whole rows.

    Parameters
    ----------
    source
        Where the rows come from. Negative integers count as missing and become -1; NaN stays NaN.
    path
        The store to make; must not exist.
    rows
        Positions of the donors to write, in this order. `None`: all.
    memory
        Bytes that blocks of rows may take. [Unit: byte]
    on_rows
        Called with the number of donors just written.

    Raises
    ------
    ValueError
        If there is no donor or no variant, or one row alone does not fit `memory`.
    """
    rows = np.arange(len(source.ids)) if rows is None else np.asarray(rows)
    n_donors, n_variants = len(rows), source.n_variants
    if not n_donors or not n_variants:
        raise ValueError(f"Genotypes need donors and variants, but these are {n_donors:,} × {n_variants:,}.")
    var = describe_variants(source.var())
    row_bytes = n_variants * np.dtype(source.dtype).itemsize
    var_bytes = int(_PEAK_PER_VAR * var.memory_usage(deep=True).sum())
    block_rows = min(n_donors, int(_BLOCK_PART * (memory - var_bytes)) // row_bytes)
    if block_rows < 1:
        needed = var_bytes + int(row_bytes / _BLOCK_PART)
        raise ValueError(
            f"The memory budget is too small for these genotypes: a donor's row and the names of {n_variants:,} "
            f"variants take {needed:,} bytes, and {max(memory, 0):,} are left. Give more memory."
        )
    dtype = _stored_dtype(source, rows, block_rows)
    chunk_rows, shard_rows = _chunk_and_shard(n_donors, n_variants * dtype.itemsize, block_rows)
    block_rows = block_rows // shard_rows * shard_rows

    group = zarr.open_group(str(path), mode="w-", zarr_format=3)
    obs = source.obs().iloc[rows].set_axis(pd.Index(source.ids[rows], dtype=object), axis=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Variable names are not unique")  # the report says so
        ad.io.write_elem(group, "/", ad.AnnData(obs=obs, var=var))
    counted, repeated = counted_allele(var), int(var.index.duplicated().sum())
    del var
    values = group.create_array(
        "X",
        shape=(n_donors, n_variants),
        chunks=(chunk_rows, n_variants),
        shards=(shard_rows, n_variants),
        dtype=dtype,
        compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")],
        fill_value=0,
        attributes={"encoding-type": "array", "encoding-version": "0.2.0"},
        overwrite=True,
    )
    missing = 0
    for start in range(0, n_donors, block_rows):
        block = _clean(source.read(rows[start : start + block_rows], slice(0, n_variants)))
        for first in range(0, len(block), shard_rows):
            shard = block[first : first + shard_rows].astype(dtype, copy=False)
            missing += count_missing(shard)
            values[start + first : start + first + len(shard)] = shard
            if on_rows is not None:
                on_rows(len(shard))
        del block
    return GenotypeCounts(n_donors, n_variants, dtype.name, missing, counted, repeated)


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


def _stored_dtype(source: GenotypeRows, rows: NDArray[np.int64], block_rows: int) -> np.dtype[Any]:
    """int8 for integers that fit it, which takes one pass over integers of another type; floats stay as they are."""
    dtype = np.dtype(source.dtype)
    if dtype.kind == "b" or dtype == np.int8:
        return np.dtype(np.int8)
    if dtype.kind not in "iuf":
        raise ValueError(f"Genotypes must be integers or floats, but these are {dtype}.")
    if dtype.kind == "f":
        return dtype
    for start in range(0, len(rows), block_rows):
        block = source.read(rows[start : start + block_rows], slice(0, source.n_variants))
        if block.max() > np.iinfo(np.int8).max:
            return dtype
    return np.dtype(np.int8)


def _chunk_and_shard(n_donors: int, row_bytes: int, block_rows: int) -> tuple[int, int]:
    """Rows of one chunk and of one shard: the shard a multiple of the chunk, within one block of rows."""
    chunk = max(1, min(_CHUNK_BYTES // row_bytes, n_donors, block_rows))
    shard = max(1, min(_SHARD_BYTES // row_bytes, n_donors, block_rows) // chunk) * chunk
    return chunk, shard


def _clean(block: NDArray[Any]) -> NDArray[Any]:
    """One code for missing calls: integers below 0 become -1. Floats have NaN, which stays."""
    if block.dtype.kind == "i":
        return np.maximum(block, -1, out=block if block.flags.owndata else None)
    return block


def count_missing(block: NDArray[Any]) -> int:
    """Number of missing values: negative ones of integers, NaN of floats."""
    if block.dtype.kind == "f":
        # Row by row: the mask of a whole block would take its share of the memory.
        return sum(int(np.isnan(row).sum()) for row in block)
    return sum(int((row < 0).sum()) for row in block) if block.dtype.kind == "i" else 0
