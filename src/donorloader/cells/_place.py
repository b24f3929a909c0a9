"""Stored values of rows moved from decoded chunks to the batches that the rows belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from donorloader._vectors import address_of, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from ._shards import ShardedArray

__all__ = ["Piece", "Placing", "compile_for"]

# What a thread decodes at once, unless a chunk is larger: its core's own cache holds that. Unit: bytes.
_AT_ONCE = 1 << 19


class Piece(NamedTuple):
    """Some neighbouring chunks of one shard, and the rows that lie in them.

    Attributes
    ----------
    placing
        What it is a piece of.
    first, stop
        Numbers of the first chunk, and of the one behind the last.
    rows
        The rows, by their position in `placing`.
    """

    placing: Placing
    first: int
    stop: int
    rows: slice

    @property
    def n_bytes(self) -> int:
        """What it takes, decoded."""
        array = self.placing.array
        return (self.stop - self.first) * array.chunk * array.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Placing:
    """Where rows lie in a stored array, and the addresses that their values belong to.

    Attributes
    ----------
    array
        Values or columns of a CSR matrix.
    starts, stops
        (n_rows,) where each row lies in it. In order, and none empty. A row may be there several times.
    to
        (n_rows,) address of the first value of each row in its batch.
    owners
        What the memory at these addresses belongs to. Held here, so that none of it is used for something else before
        the last thread that writes there is done, however that is interrupted.
    n_columns
        Where `array` has columns: of the matrix. Then they are checked, and made into `index_type`.
    index_type
        int32 or int64.
    """

    array: ShardedArray
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    to: NDArray[np.int64]
    owners: Sequence[object]
    n_columns: int | None = None
    index_type: DTypeLike = np.int32

    def pieces(self) -> Iterator[Piece]:
        """What is to be decoded, in pieces of about equal size. No chunk is in two of them."""
        if not self.starts.size:
            return
        chunk, per_shard = self.array.chunk, self.array.per_shard
        first, last = self.starts // chunk, (self.stops - 1) // chunk
        # rows that follow closely have their chunks in common, or side by side
        breaks = np.flatnonzero(first[1:] > last[:-1] + 1) + 1
        most = max(1, _AT_ONCE // (chunk * self.array.dtype.itemsize))
        cuts: list[tuple[int, int]] = []
        begins, ends = first[np.append(0, breaks)], last[np.append(breaks - 1, -1)] + 1
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            while begin < end:
                stop = min(begin + most, end, (begin // per_shard + 1) * per_shard)
                cuts.append((begin, stop))
                begin = stop
        bounds = np.asarray(cuts) * chunk
        lows = np.searchsorted(self.stops, bounds[:, 0], side="right").tolist()
        highs = np.searchsorted(self.starts, bounds[:, 1], side="left").tolist()
        for (begin, stop), low, high in zip(cuts, lows, highs, strict=True):
            yield Piece(self, begin, stop, slice(low, high))

    def place(self, piece: Piece, values: NDArray[np.generic]) -> None:
        """Move what lies in a piece, decoded, to where it belongs.

        Raises
        ------
        ValueError
            If there is a column that the matrix does not have.
        """
        starts, stops, to = self.starts[piece.rows], self.stops[piece.rows], self.to[piece.rows]
        begin = piece.first * self.array.chunk
        if self.n_columns is None:
            _place_bytes(values.view(np.uint8), values.itemsize, begin, starts, stops, to)
            return
        like = np.empty(0, dtype=self.index_type)
        if not _place_columns(values, self.n_columns, begin, starts, stops, to, like):
            raise ValueError(
                f"{self.array.file(piece.first)!r} is damaged: X has {self.n_columns:,} columns, but a cell has a "
                "value in one outside these. Copy the store again, or prepare the study again."
            )


@numba.njit(nogil=True, cache=True)
def _place_bytes(values, width, first, starts, stops, to):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Copy rows, of values of `width` bytes, out of a part of a stored array that begins at its value `first`."""
    source, end = address_of(values), first + values.size // width
    for i in range(starts.size):
        begin, stop = max(starts[i], first), min(stops[i], end)
        if begin < stop:
            # not past the caches: for rows of a few kilobytes, here and there, that takes twice as long
            copy_bytes(to[i] + (begin - starts[i]) * width, source + (begin - first) * width, (stop - begin) * width)


# Columns that are made wider at a time: few enough for the first-level cache.
_BLOCK = 1024


@numba.njit(nogil=True, cache=True)
def _place_columns(values, n_columns, first, starts, stops, to, like):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """As `_place_bytes`, of column numbers, which become of the type of `like`; false if one is out of range."""
    end, width = first + values.size, like.itemsize
    block = np.empty(_BLOCK, dtype=like.dtype)
    lowest = highest = values.dtype.type(0)
    for i in range(starts.size):
        begin, stop = max(starts[i], first), min(stops[i], end)
        while begin < stop:
            some = values[begin - first : min(begin + _BLOCK, stop) - first]
            for k in range(some.size):
                block[k] = some[k]
            for k in range(some.size):
                lowest, highest = min(lowest, some[k]), max(highest, some[k])
            copy_bytes(to[i] + (begin - starts[i]) * width, address_of(block), some.size * width)
            begin += _BLOCK
    return lowest >= 0 and highest < n_columns


def compile_for(column_type: DTypeLike) -> None:
    """Compile what moves values, and columns that are stored as such numbers."""
    nothing = np.zeros(0, dtype=np.int64)
    _place_bytes(np.zeros(0, dtype=np.uint8), 1, 0, nothing, nothing, nothing)
    _place_columns(np.zeros(0, dtype=column_type), 1, 0, nothing, nothing, nothing, np.zeros(0, dtype=np.int32))
