"""The packed store: hard calls at two bits, and dosages at eight, in ``obsm`` of an AnnData (docs/format.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ._checksums import check_whole, read_rows
from ._packing import packed_width
from ._unpacking import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ._rows import Columns

__all__ = [
    "CALLS_KEY",
    "DOSAGES_KEY",
    "DOSAGE_MISSING",
    "DOSAGE_STEPS",
    "PACKED_VERSION",
    "DosageMatrix",
    "PackedMatrix",
    "packed_attributes",
]

#: Where the arrays lie: (n_donors, width) uint8 in obsm, which anndata reads like any other.
CALLS_KEY, DOSAGES_KEY = "genotypes_2bit", "dosages_8bit"
PACKED_VERSION = 1

#: An 8-bit dosage is ``code / DOSAGE_STEPS``, so it is off by 1/254 at the most; this code is a missing one.
DOSAGE_STEPS, DOSAGE_MISSING = 127, 255

_FORMAT = {CALLS_KEY: "donorloader-calls-2bit", DOSAGES_KEY: "donorloader-dosages-8bit"}

# Read at once. Unit: bytes.
_READ_BYTES = 16 << 20


def packed_attributes(key: str, n_variants: int) -> dict[str, Any]:
    """Attributes of a packed array, by which it is known again."""
    return {
        "encoding-type": "array",
        "encoding-version": "0.2.0",
        "format": _FORMAT[key],
        "version": PACKED_VERSION,
        "n_variants": n_variants,
    }


class _StoredBytes:
    """Rows of bytes in a zarr array whose chunks carry checksums."""

    def __init__(self, array: Any, key: str, name: str, n_variants: int, width: int):
        attributes, what = dict(array.attrs), f"obsm[{key!r}] of {name}"
        if attributes.get("format") != _FORMAT[key]:
            raise ValueError(
                f"{what} is not what its name says (its format is {attributes.get('format')!r}, not {_FORMAT[key]!r}). "
                "Prepare the study again."
            )
        if attributes.get("version") != PACKED_VERSION:
            raise ValueError(
                f"{what} has version {attributes.get('version')!r} of the format; this release of donorloader reads "
                f"version {PACKED_VERSION}. Use the release that wrote it, or prepare the study again."
            )
        if attributes.get("n_variants") != n_variants or array.dtype != np.uint8 or array.shape[1] != width:
            raise ValueError(
                f"{what} holds {attributes.get('n_variants')} variants in {array.shape[1]:,} bytes of {array.dtype}, "
                f"but var has {n_variants:,}, which take {width:,} bytes. Variants were added or removed without it: "
                "prepare the study again."
            )
        check_whole(array, what)
        self._array, self._what = array, what
        self.shape = (int(array.shape[0]), n_variants)
        self.width = width

    def read_bytes(self, rows: NDArray[np.int64], first: int, stop: int) -> NDArray[np.uint8]:
        """Some bytes of rows: C-contiguous (len(rows), stop - first) uint8, in the order asked for.

        Raises
        ------
        ValueError
            If a checksum says that a shard is damaged; the message names its file.
        """
        out = np.empty((rows.size, stop - first), dtype=np.uint8)
        order = np.argsort(rows, kind="stable")
        for piece in self._pieces(rows[order]):
            wanted = rows[order[piece]]
            begin, end = int(wanted[0]), int(wanted[-1]) + 1
            block = np.asarray(read_rows(self._array, self._what, begin, end, slice(first, stop)))
            out[order[piece]] = block[wanted - begin]
        return out

    def _pieces(self, ascending: NDArray[np.int64]) -> Iterator[slice]:
        """Stretches of rows in the same or in neighbouring chunks, none of them too large."""
        chunk = self._array.chunks[0]
        most = max(chunk, _READ_BYTES // self.width // chunk * chunk)
        start = 0
        for i in range(1, ascending.size + 1):
            if (
                i == ascending.size
                or ascending[i] // chunk - ascending[i - 1] // chunk > 1
                or ascending[i] - ascending[start] >= most
            ):
                yield slice(start, i)
                start = i


class PackedMatrix(_StoredBytes):
    """Hard calls at two bits. Reads as int8, -1 where missing.

    Parameters
    ----------
    array
        The zarr array of packed bytes.
    name
        Of the store, for messages.
    n_variants
        Number of variants of the store.

    Raises
    ------
    ValueError
        If the array is of another format or version, not of this many variants, or not whole.
    """

    dtype: np.dtype[Any] = np.dtype(np.int8)

    def __init__(self, array: Any, name: str, n_variants: int):
        super().__init__(array, CALLS_KEY, name, n_variants, packed_width(n_variants))

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[np.int8]:
        """Calls, unpacked."""
        first, stop, columns = bytes_of(columns)
        return unpack(self.read_bytes(rows, first, stop), columns)


class DosageMatrix(_StoredBytes):
    """Dosages at eight bits. Reads as float32, NaN where missing. Parameters as for :class:`PackedMatrix`."""

    dtype: np.dtype[Any] = np.dtype(np.float32)

    def __init__(self, array: Any, name: str, n_variants: int):
        super().__init__(array, DOSAGES_KEY, name, n_variants, n_variants)

    def read(self, rows: NDArray[np.int64], columns: Columns) -> NDArray[np.float32]:
        """Dosages, to the nearest 1/127."""
        if isinstance(columns, slice):
            return DOSAGES.take(self.read_bytes(rows, *_bounds(columns)))
        first, stop = _bounds(columns)
        return DOSAGES.take(self.read_bytes(rows, first, stop)[:, columns - first])


#: What the codes of dosages stand for.
DOSAGES: NDArray[np.float32] = np.append(np.arange(DOSAGE_MISSING) / DOSAGE_STEPS, np.nan).astype(np.float32)


def bytes_of(columns: Columns) -> tuple[int, int, Columns]:
    """Bytes of a packed row that hold some columns, and these columns counted from the first of those bytes."""
    first, stop = _bounds(columns)
    first_byte = first // 4
    if isinstance(columns, slice):
        return first_byte, packed_width(stop), slice(first - 4 * first_byte, stop - 4 * first_byte)
    return first_byte, packed_width(stop), columns - 4 * first_byte


def _bounds(columns: Columns) -> tuple[int, int]:
    if isinstance(columns, slice):
        return columns.start, columns.stop
    return (int(columns.min()), int(columns.max()) + 1) if columns.size else (0, 0)
