"""Zarr arrays whose chunks carry checksums: what of them is damaged or gone is found, and named."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anndata as ad
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from donorloader._zarr import complete_pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["add_columns", "check_whole", "has_checksums", "read_rows", "sound", "write_table"]

_REMEDY = "Copy the store again, or prepare the study again."


def write_table(group: zarr.Group, key: str, table: Any) -> None:
    """Write a table, a column of one, or an AnnData of tables as anndata does, with checksums and all chunks."""
    # all chunks, so that one that is not there is known to be lost
    with complete_pipeline(), zarr.config.set({"array.write_empty_chunks": True}):
        ad.io.write_elem(group, key, table, dataset_kwargs={"compressors": [ZstdCodec(level=0), Crc32cCodec()]})


def add_columns(table: zarr.Group, columns: dict[str, NDArray[Any]]) -> None:
    """Add columns of numbers to a table that was written, as the last ones."""
    for name, values in columns.items():
        write_table(table, name, values)
    # https://anndata.readthedocs.io/en/stable/fileformat-prose.html#dataframe-specification-v0-2-0
    order: Any = table.attrs["column-order"]
    table.attrs["column-order"] = [*order, *columns]


def has_checksums(array: Any) -> bool:
    """Whether chunks of an array carry checksums: such arrays are ours, and written whole."""
    return isinstance(array, zarr.Array) and any(isinstance(codec, Crc32cCodec) for codec in array.compressors)


def check_whole(array: Any, what: str) -> None:
    """Refuse an array of which files are missing: they would be read as if they held the fill value.

    Raises
    ------
    ValueError
        If so.
    """
    shards = array.shards or array.chunks
    needed = math.prod(-(-n // shard) for n, shard in zip(array.shape, shards, strict=True))
    # zarr counts chunks, and those of a last shard that reaches past the array with them
    of_each = math.prod(shard // chunk for shard, chunk in zip(shards, array.chunks, strict=True))
    if (there := array.nchunks_initialized // of_each) != needed:
        raise ValueError(f"{what} is not whole: {needed - there:,} of its {needed:,} files are missing. {_REMEDY}")


def read_rows(array: Any, what: str, begin: int, end: int, columns: slice) -> Any:
    """Some rows of an array that has checksums.

    Raises
    ------
    ValueError
        If they say that it is damaged; the message names the shard.
    """
    try:
        return array[begin:end, columns]
    except Exception as error:  # zarr and zarrs raise types of their own for what is damaged
        raise _damage(array, what, begin, end, error) from error


def _damage(array: Any, what: str, begin: int, end: int, error: Exception) -> ValueError:
    """An error that names the shard of an array, among those of some rows, that cannot be read."""
    rows = (array.shards or array.chunks)[0]
    place = f"one of the shards {begin // rows} to {(end - 1) // rows}"
    for shard in range(begin // rows, (end - 1) // rows + 1):
        try:
            array[max(begin, shard * rows) : min(end, (shard + 1) * rows)]
        except Exception:
            place = "/".join([f"shard {array.path}/c/{shard}", *"0" * (array.ndim - 1)])
            break
    return ValueError(f"{what} is damaged: {place} cannot be read ({error}). {_REMEDY}")


@contextmanager
def sound(node: Any, what: str) -> Iterator[None]:
    """Around reading a table or a column: refuse it where files are missing, and name the shard that is damaged."""
    try:
        arrays = [array for array in _arrays(node) if has_checksums(array)]
    except Exception as error:  # what describes the arrays
        raise ValueError(f"{what} is damaged: it cannot be read ({error}). {_REMEDY}") from error
    for array in arrays:
        check_whole(array, f"{array.path} of {what}")
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # zarr, its codecs and anndata raise types of their own
        for array in arrays:
            try:
                array[...]
            except Exception as own:
                raise _damage(array, what, 0, max(1, array.shape[0]), own) from error
        raise ValueError(f"{what} is damaged: it cannot be read ({error}). {_REMEDY}") from error


def _arrays(node: Any) -> list[Any]:
    """A zarr array, or all arrays of a zarr group; none of anything else."""
    if isinstance(node, zarr.Group):
        return [array for _, array in node.members(max_depth=None) if isinstance(array, zarr.Array)]
    return [node] if isinstance(node, zarr.Array) else []
