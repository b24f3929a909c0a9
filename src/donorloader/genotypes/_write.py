"""Writing donor rows as an AnnData zarr store that is read by whole rows."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import anndata as ad
import numpy as np
import pandas as pd
import zarr

from ._checksums import add_columns, write_table
from ._frequencies import FREQUENCY
from ._packed import CALLS_KEY
from ._packing import packed_width
from ._variant_table import bytes_of_table, counted_allele, describe_variants
from ._write_rows import CallCounts, DosageArray, PackedArray, PlainArray, shard_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from ._rows import GenotypeRows
    from ._write_rows import StoredArray

__all__ = [
    "DosageType",
    "GenotypeCounts",
    "Layout",
    "check_layout",
    "count_missing",
    "write_genotypes",
]

Layout = Literal["packed", "plain", "both"]
DosageType = Literal["float32", "float16", "uint8"]

# Of the memory that is granted, a block of rows may take this part: the source's own copy while it reads, and the shard
# being compressed, come on top. The variants' annotation is held whole, and copied as it is written.
_BLOCK_PART = 0.3
_PEAK_PER_VAR = 2
# Larger blocks are not written faster. [Unit: byte]
_BLOCK_BYTES = 256 * 2**20

# Column of var, as FREQUENCY is: counted while the rows are written.
_MISSING_RATE = "missing_rate"


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
    layout: Layout | None = None,
    dosage_type: DosageType | None = None,
    on_rows: Callable[[int], None] | None = None,
) -> GenotypeCounts:
    """Write donors × variants as an AnnData zarr store (v3) in chunks of whole rows.

    Parameters
    ----------
    source
        Where the rows come from. Negative integers count as missing and become -1; NaN stays NaN. One with an attribute
        `packed`, the (n_donors, width) packed calls, has these copied.
    path
        The store to make; must not exist.
    rows
        Positions of the donors to write, in this order. `None`: all.
    memory
        Bytes that blocks of rows may take. [Unit: byte]
    layout
        `"packed"`: calls at two bits; `"plain"`: values as `X`; `"both"`. Default: packed where the source holds
        integers and none of them is above 2, plain otherwise.
    dosage_type
        How floats are stored: `"float32"`, `"float16"`, or `"uint8"` for steps of 1/127. Default: as they are.
    on_rows
        Called with the number of donors just written.

    Raises
    ------
    ValueError
        If there is no donor or no variant, one row alone does not fit `memory`, or the layout cannot hold the values.
    """
    rows = np.arange(len(source.ids)) if rows is None else np.asarray(rows)
    n_donors, n_variants = len(rows), source.n_variants
    if not n_donors or not n_variants:
        raise ValueError(f"Genotypes need donors and variants, but these are {n_donors:,} × {n_variants:,}.")
    check_layout(source.dtype, layout, dosage_type)
    var = describe_variants(source.var())
    row_bytes = n_variants * np.dtype(source.dtype).itemsize
    var_bytes = int(_PEAK_PER_VAR * bytes_of_table(var))
    fitting = int(_BLOCK_PART * (memory - var_bytes)) // row_bytes
    block_rows = min(n_donors, fitting, max(1, _BLOCK_BYTES // row_bytes))
    if block_rows < 1:
        needed = var_bytes + int(row_bytes / _BLOCK_PART)
        raise ValueError(
            f"The memory budget is too small for these genotypes: a donor's row and the names of {n_variants:,} "
            f"variants take {needed:,} bytes, and {max(memory, 0):,} are left. Give more memory."
        )
    group = zarr.open_group(str(path), mode="w-", zarr_format=3)
    obs = source.obs().iloc[rows].set_axis(pd.Index(source.ids[rows], dtype=object), axis=0)
    write_table(group, "/", ad.AnnData(obs=obs, var=pd.DataFrame(index=var.index[:0])))
    pack = layout in ("packed", "both") or (layout is None and source.dtype.kind in "iub")
    counted = {name: var.pop(name).to_numpy() for name in (FREQUENCY, _MISSING_RATE) if name in var}
    with warnings.catch_warnings(), ThreadPoolExecutor(1, thread_name_prefix="donorloader-variants") as pool:
        warnings.filterwarnings("ignore", message="Variable names are not unique")  # the report says so
        arrays, dtype = _make_arrays(source, group, rows, block_rows, pack, layout, dosage_type)
        # texts keep one core busy, and rows another
        table = pool.submit(write_table, group, "var", var)
        try:
            counts = _write_rows(source, arrays, rows, block_rows, on_rows)
        except _TooLarge as error:
            if layout is not None:
                raise ValueError(f"{error} They cannot be packed: use layout='plain'.") from None
            del group[f"obsm/{CALLS_KEY}"]
            arrays, dtype = _make_arrays(source, group, rows, block_rows, False, layout, dosage_type)
            counts = _write_rows(source, arrays, rows, block_rows, None)  # on_rows knows of these rows
        table.result()
    if (frequencies := counts.frequencies()) is not None:
        counted[FREQUENCY] = frequencies.astype(np.float32)
    counted[_MISSING_RATE] = (1 - counts.called / n_donors).astype(np.float32)
    add_columns(group.require_group("var"), counted)
    return GenotypeCounts(
        n_donors,
        n_variants,
        dtype.name,
        n_donors * n_variants - int(counts.called.sum(dtype=np.int64)),
        counted_allele(var),
        int(var.index.duplicated().sum()),
    )


class _TooLarge(ValueError):
    """A call above 2, which two bits do not hold."""


def check_layout(dtype: np.dtype[Any], layout: Layout | None, dosage_type: DosageType | None) -> None:
    """Refuse a layout that cannot hold genotypes of a type; parameters as for :func:`write_genotypes`."""
    for name, value, choices in (
        ("layout", layout, get_args(Layout)),
        ("dosage_type", dosage_type, get_args(DosageType)),
    ):
        if value is not None and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, or None, got {value!r}.")
    kind = np.dtype(dtype).kind
    if kind not in "iufb":
        raise ValueError(f"Genotypes must be integers or floats, but these are {dtype}.")
    if dosage_type is not None and kind != "f":
        raise ValueError(
            f"dosage_type={dosage_type!r} says how to store dosages, but these are {dtype}: leave it out, or use "
            "read_dosages=True where the file has them."
        )
    if kind == "f" and layout in ("packed", "both"):
        raise ValueError(
            f"layout={layout!r} packs hard calls, but these are {dtype}. Leave it out, convert them to int8, or use "
            "dosage_type='uint8' for dosages at eight bits."
        )


def _make_arrays(
    source: GenotypeRows,
    group: zarr.Group,
    rows: NDArray[np.int64],
    block_rows: int,
    pack: bool,
    layout: Layout | None,
    dosage_type: DosageType | None,
) -> tuple[list[StoredArray], np.dtype[Any]]:
    """The arrays that the layout asks for, the packed one first, and the type that they read as."""
    shape = (len(rows), source.n_variants)
    arrays: list[StoredArray] = []
    dtype: np.dtype[Any] = np.dtype(np.int8)
    if pack:
        arrays.append(PackedArray(group, shape, shard_rows(shape[0], packed_width(shape[1]), 4 * block_rows)))
    if dosage_type == "uint8":
        dtype = np.dtype(np.float32)
        arrays.append(DosageArray(group, shape, shard_rows(shape[0], shape[1], block_rows)))
    elif not pack or layout == "both":
        dtype = np.dtype(dosage_type) if dosage_type else _stored_dtype(source, rows, block_rows)
        shard = shard_rows(shape[0], shape[1] * dtype.itemsize, block_rows)
        arrays.append(PlainArray(group, shape, dtype, shard))
    return arrays, dtype


def _write_rows(
    source: GenotypeRows,
    arrays: list[StoredArray],
    rows: NDArray[np.int64],
    block_rows: int,
    on_rows: Callable[[int], None] | None,
) -> CallCounts:
    """All rows into the arrays; what was counted."""
    pack = isinstance(arrays[0], PackedArray)
    packed = getattr(source, "packed", None) if pack and len(arrays) == 1 else None
    counts = CallCounts(source.n_variants)
    if packed is not None:
        block_rows = arrays[0].shard  # a quarter of the bytes, and none are held for the next shard
    for start in range(0, len(rows), block_rows):
        chosen = rows[start : start + block_rows]
        if packed is not None:
            block = packed[chosen]
            counts.add_packed(block)
            arrays[0].write(block)
        else:
            block = _clean(source.read(chosen, slice(0, source.n_variants)))
            if pack and block.max() > 2:
                raise _TooLarge(f"Calls at two bits are 0, 1, 2 or missing, but some are {block.max()}.")
            counts.add(block)
            for array in arrays:
                array.write(array.encode(block))
        if on_rows is not None:
            on_rows(len(block))
        del block
    for array in arrays:
        array.finish()
    return counts


def _stored_dtype(source: GenotypeRows, rows: NDArray[np.int64], block_rows: int) -> np.dtype[Any]:
    """int8 for integers that fit it, which takes one pass over integers of another type; floats stay as they are."""
    dtype = np.dtype(source.dtype)
    if dtype.kind == "b" or dtype == np.int8:
        return np.dtype(np.int8)
    if dtype.kind == "f":
        return dtype
    for start in range(0, len(rows), block_rows):
        block = source.read(rows[start : start + block_rows], slice(0, source.n_variants))
        if block.max() > np.iinfo(np.int8).max:
            return dtype
    return np.dtype(np.int8)


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
