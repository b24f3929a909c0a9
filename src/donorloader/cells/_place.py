"""Chunks decoded, and the rows in them moved to the batches that they belong to, without Python's lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np

from donorloader._vectors import address_of, copy_bytes

from ._shards import chunk_error, read_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from ._shards import ShardedArray, ShardReader

__all__ = ["Group", "Placing", "compile_for"]

# What a thread decodes between two moments that it needs Python's lock. Unit: bytes.
_AT_ONCE = 2 << 20


class Group(NamedTuple):
    """Some chunks of one shard, and the rows that lie in each.

    Attributes
    ----------
    placing
        What it is a part of.
    shard
        Number of the shard.
    chunks
        (n_chunks,) int64 numbers of the chunks, in the whole array.
    lows, highs
        (n_chunks,) int64 positions, in `placing`, of the first row in each chunk, and of the one behind the last.
    """

    placing: Placing
    shard: int
    chunks: NDArray[np.int64]
    lows: NDArray[np.int64]
    highs: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Placing:
    """Where rows lie in a stored array, and the addresses that their values belong to.

    Attributes
    ----------
    array
        Values or columns of a CSR matrix.
    starts, stops
        (n_rows,) int64 where each row lies in it. In order, and none empty. A row may be there several times.
    to
        (n_rows,) int64 address of the first value of each row in its batch.
    owners
        What the memory at these addresses belongs to. Held here, so that none of it is used for something else before
        the last thread that writes there is done, however that is interrupted.
    n_columns
        Where `array` has columns: of the matrix. Then they are checked, and made into `index_type`.
    index_type
        Any integer type that has these columns.
    """

    array: ShardedArray
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    to: NDArray[np.int64]
    owners: Sequence[object]
    n_columns: int | None = None
    index_type: DTypeLike = np.int32

    def groups(self) -> Iterator[Group]:
        """What is to be decoded: each chunk in one group, groups of about equal size."""
        if not self.starts.size:
            return
        size = self.array.chunk
        first, last = self.starts // size, (self.stops - 1) // size
        many = last - first + 1  # chunks of each row
        before = np.cumsum(many) - many
        chunks = np.unique(np.repeat(first - before, many) + np.arange(many.sum()))
        lows = np.searchsorted(self.stops, chunks * size, side="right")
        highs = np.searchsorted(self.starts, (chunks + 1) * size, side="left")
        shards = chunks // self.array.per_shard
        most = max(1, _AT_ONCE // self.array.chunk_bytes)
        begin = 0
        for end in [*(np.flatnonzero(np.diff(shards)) + 1).tolist(), chunks.size]:
            for start in range(begin, end, most):
                part = slice(start, min(start + most, end))
                yield Group(self, int(shards[start]), chunks[part], lows[part], highs[part])
            begin = end

    def place(self, group: Group, reader: ShardReader) -> None:
        """Decode the chunks of a group, and move what lies in them to where it belongs.

        Raises
        ------
        ValueError
            If the shard is damaged, or there is a column that the matrix does not have.
        OSError
            If it cannot be read.
        """
        array, done = self.array, 0
        file = reader.open(array, group.shard)
        # -1 is then the offset of a chunk that is not stored
        where = array.index(group.shard, file)[group.chunks - group.shard * array.per_shard].astype(np.int64)
        stored, values = reader.memory(int(where[:, 1].max(initial=0)), array.chunk_bytes)
        fill = np.array([array.fill_value], dtype=array.dtype)
        while done < group.chunks.size:
            rest = (group.chunks[done:] * array.chunk, group.lows[done:], group.highs[done:])
            source = (*array.functions, file.fileno(), where[done:], stored)
            rows = (self.starts, self.stops, self.to)
            if self.n_columns is None:
                number, wrong = _place_bytes(*source, values, array.dtype.itemsize, fill.view(np.uint8), *rest, *rows)
            else:
                like = np.empty(0, dtype=self.index_type)
                columns = values.view(array.dtype)
                number, wrong = _place_columns(*source, columns, self.n_columns, fill, *rest, *rows, like)
            done += number
            if wrong == _NO_COLUMN:
                raise ValueError(
                    f"{file.name!r} is damaged: X has {self.n_columns:,} columns, but a cell has a value in one "
                    "outside these. Copy the store again, or prepare the study again."
                )
            if wrong and (error := chunk_error(file, int(group.chunks[done]), tuple(where[done].tolist()), wrong)):
                raise error


_NO_COLUMN = -1


@numba.njit(nogil=True, cache=True)
def _place_bytes(  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    pread, blosc, file, where, stored, values, width, fill, firsts, lows, highs, starts, stops, to
):
    """Decode chunks, and copy rows of values of `width` bytes out of them; how many chunks went well, and what not."""
    for c in range(firsts.size):
        if where[c, 0] < 0:
            for k in range(values.size):
                values[k] = fill[k % width]
        else:
            wrong = read_chunk(pread, blosc, file, where[c, 0], where[c, 1], stored, values)
            if wrong:
                return c, wrong
        source, first, end = address_of(values), firsts[c], firsts[c] + values.size // width
        for i in range(lows[c], highs[c]):
            begin, stop = max(starts[i], first), min(stops[i], end)
            if begin < stop:
                # not past the caches: for rows of a few kilobytes, here and there, that takes twice as long
                copy_bytes(
                    to[i] + (begin - starts[i]) * width, source + (begin - first) * width, (stop - begin) * width
                )
    return firsts.size, 0


# Columns that are made wider at a time: few enough for the first-level cache.
_BLOCK = 1024


@numba.njit(nogil=True, cache=True)
def _place_columns(  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    pread, blosc, file, where, stored, values, n_columns, fill, firsts, lows, highs, starts, stops, to, like
):
    """As `_place_bytes`, of column numbers, which become of the type of `like`, and must be columns of the matrix."""
    width = like.itemsize
    block = np.empty(_BLOCK, dtype=like.dtype)
    for c in range(firsts.size):
        if where[c, 0] < 0:
            values[:] = fill[0]
        else:
            wrong = read_chunk(pread, blosc, file, where[c, 0], where[c, 1], stored, values.view(np.uint8))
            if wrong:
                return c, wrong
        first, end = firsts[c], firsts[c] + values.size
        lowest = highest = values.dtype.type(0)
        for i in range(lows[c], highs[c]):
            begin, stop = max(starts[i], first), min(stops[i], end)
            while begin < stop:
                some = values[begin - first : min(begin + _BLOCK, stop) - first]
                for k in range(some.size):
                    block[k] = some[k]
                for k in range(some.size):
                    lowest, highest = min(lowest, some[k]), max(highest, some[k])
                copy_bytes(to[i] + (begin - starts[i]) * width, address_of(block), some.size * width)
                begin += _BLOCK
        if lowest < 0 or highest >= n_columns:
            return c, _NO_COLUMN
    return firsts.size, 0


def compile_for(column_type: DTypeLike) -> None:
    """Compile what decodes and moves values, and columns that are stored as such numbers."""
    none, where, memory = np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.uint8)
    columns = np.zeros(0, dtype=column_type)
    _place_bytes(0, 0, 0, where, memory, memory, 1, memory, none, none, none, none, none, none)
    for like in (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), columns):
        _place_columns(0, 0, 0, where, memory, columns, 1, columns, none, none, none, none, none, none, like)
