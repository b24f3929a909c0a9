"""The arrays of a genotype store as they are written: plain values, packed calls or 8-bit dosages, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from zarr.codecs import BloscCodec, Crc32cCodec

from donorloader._zarr import complete_pipeline, local_pipeline

from ._packed import CALLS_KEY, DOSAGE_MISSING, DOSAGE_STEPS, DOSAGES_KEY, packed_attributes
from ._packing import pack_rows, packed_width
from ._unpacking import count_packed

if TYPE_CHECKING:
    import zarr
    from numpy.typing import DTypeLike, NDArray

__all__ = ["CallCounts", "DosageArray", "PackedArray", "PlainArray", "StoredArray", "shard_rows"]

# Target sizes of one chunk and of one shard, in bytes before compression. A chunk is what one row costs to read, so it
# is small; a shard is one file, so it is large.
_CHUNK_BYTES = 128 * 2**10
_SHARD_BYTES = 12 * 2**20


class StoredArray:
    """An array with a row per donor, one chunk holding whole rows.

    Parameters
    ----------
    group
        The AnnData store that it is made in.
    key
        Its path there.
    shape, dtype
        Of the array.
    shard
        Rows of a shard.
    attributes
        Of the array.

    Attributes
    ----------
    shard
        Rows that are written at a time.
    """

    def __init__(
        self,
        group: zarr.Group,
        key: str,
        shape: tuple[int, int],
        dtype: DTypeLike,
        shard: int,
        *,
        attributes: dict[str, Any],
    ):
        dtype = np.dtype(dtype)
        chunk = max(1, min(shard, _CHUNK_BYTES // (shape[1] * dtype.itemsize)))
        self.shard = shard = shard // chunk * chunk
        with complete_pipeline():
            self._array = group.create_array(
                key,
                shape=shape,
                chunks=(chunk, shape[1]),
                shards=(shard, shape[1]),
                dtype=dtype,
                compressors=[
                    BloscCodec(cname="lz4", clevel=5, shuffle="noshuffle" if dtype == np.uint8 else "bitshuffle"),
                    Crc32cCodec(),
                ],
                fill_value=0,
                attributes=attributes,
                overwrite=True,
                config={"write_empty_chunks": True},  # so that a chunk that is not there is known to be lost
            )
        with local_pipeline(group):  # opened again, as an array stays bound to its pipeline
            self._quick: Any = group[key]
        self._held: list[NDArray[Any]] = []
        self._next = 0

    def write(self, block: NDArray[Any]) -> None:
        """Add rows, encoded; they are written as soon as they fill a shard."""
        self._held.append(block)
        if sum(map(len, self._held)) >= self.shard:
            rows = np.concatenate(self._held) if len(self._held) > 1 else self._held[0]
            whole = len(rows) // self.shard * self.shard
            for first in range(0, whole, self.shard):
                self._put(rows[first : first + self.shard])
            self._held = [rows[whole:].copy()] if whole < len(rows) else []

    def finish(self) -> None:
        """Write the rows that are left."""
        if self._held:
            self._put(np.concatenate(self._held))
            self._held = []

    def encode(self, block: NDArray[Any]) -> NDArray[Any]:
        """Values as they are stored."""
        raise NotImplementedError

    def _put(self, rows: NDArray[Any]) -> None:
        # zarrs is faster, but leaves out a shard of zeros
        array = self._quick if any(row.any() for row in rows) else self._array
        array[self._next : self._next + len(rows)] = rows
        self._next += len(rows)


class PlainArray(StoredArray):
    """`X`: the values as they are."""

    def __init__(self, group: zarr.Group, shape: tuple[int, int], dtype: DTypeLike, shard: int):
        attributes = {"encoding-type": "array", "encoding-version": "0.2.0"}
        super().__init__(group, "X", shape, dtype, shard, attributes=attributes)

    def encode(self, block: NDArray[Any]) -> NDArray[Any]:
        """Values in the type of the array."""
        return block.astype(self._array.dtype, copy=False)


class PackedArray(StoredArray):
    """Calls at two bits."""

    def __init__(self, group: zarr.Group, shape: tuple[int, int], shard: int):
        packed = (shape[0], packed_width(shape[1]))
        attributes = packed_attributes(CALLS_KEY, shape[1])
        super().__init__(group, f"obsm/{CALLS_KEY}", packed, np.uint8, shard, attributes=attributes)

    def encode(self, block: NDArray[Any]) -> NDArray[Any]:
        """Calls, packed."""
        return pack_rows(block)


class DosageArray(StoredArray):
    """Dosages at eight bits."""

    def __init__(self, group: zarr.Group, shape: tuple[int, int], shard: int):
        attributes = packed_attributes(DOSAGES_KEY, shape[1])
        super().__init__(group, f"obsm/{DOSAGES_KEY}", shape, np.uint8, shard, attributes=attributes)

    def encode(self, block: NDArray[Any]) -> NDArray[Any]:
        """Dosages to the nearest step."""
        codes = np.full(block.shape, DOSAGE_MISSING, dtype=np.uint8)
        for row, values in zip(codes, block, strict=True):
            there = ~np.isnan(values)
            if (wrong := values[there & ((values < 0) | (values > 2))]).size:
                raise ValueError(
                    f"Dosages at eight bits lie between 0 and 2, but one is {wrong[0]}. Store them as float32."
                )
            row[there] = np.rint(values[there] * DOSAGE_STEPS)
        return codes


class CallCounts:
    """Per variant: how many donors have a value, and its sum; frequencies follow.

    Attributes
    ----------
    called
        (n_variants,) int32, donors whose value is there.
    """

    def __init__(self, n_variants: int):
        self.called = np.zeros(n_variants, dtype=np.int32)
        self._calls = np.zeros(n_variants, dtype=np.int32)
        self._sums: NDArray[np.float64] | None = None
        self._genotypes = True

    def add_packed(self, block: NDArray[np.uint8]) -> None:
        """Add rows of packed calls."""
        count_packed(block, self.called, self._calls)

    def add(self, block: NDArray[Any]) -> None:
        """Add rows of values; missing are negative integers, and NaN."""
        if self._sums is None:
            self._sums = np.zeros(self.called.size)
        for row in block:  # row by row: masks of a whole block would take its share of the memory
            there = ~np.isnan(row) if row.dtype.kind == "f" else row >= 0
            self.called += there
            values = np.where(there, row, 0)
            self._genotypes &= bool(values.min() >= 0 and values.max() <= 2)
            self._sums += values

    def frequencies(self) -> NDArray[np.float64] | None:
        """Frequency of the counted allele, NaN where nobody has a call; `None` where values are not 0 to 2."""
        if not self._genotypes:
            return None
        sums = self._calls if self._sums is None else self._calls + self._sums
        return np.divide(sums, 2 * self.called, out=np.full(self.called.size, np.nan), where=self.called > 0)


def shard_rows(n_donors: int, row_bytes: int, most: int) -> int:
    """Rows of a shard: near 12 MB, within what fits the memory at once."""
    return max(1, min(_SHARD_BYTES // row_bytes, n_donors, most))
