"""Sharded zarr arrays of one dimension on local disk: which chunk holds which values, and their decoding."""

from __future__ import annotations

import os
import struct
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import LocalStore

from ._blosc import decompress

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray

__all__ = ["ChunkReader", "ShardedArray"]

_LEFT_OUT = 2**64 - 1  # offset of a chunk that holds nothing but the fill value
_HEADER = struct.Struct("<4xI4xI")  # of a blosc buffer: what it decodes to, and what it takes; the rest is not ours


class ShardedArray:
    """A one-dimensional zarr array whose chunks lie in shards, compressed by blosc: what annbatch writes.

    zarr decodes such an array too, but builds some objects in Python for every chunk, under Python's lock; for cells in
    random order that takes as long as the decoding does. The layout is that of the sharding codec [1]_, of which
    nothing is kept but the index of each shard, and that of a blosc buffer [2]_.

    Attributes
    ----------
    size
        Number of values.
    dtype
        Their type.
    chunk
        Values of a chunk; the last one is filled up.
    per_shard
        Chunks of a shard.
    fill_value
        Value of chunks that are not stored.

    References
    ----------
    .. [1] https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
    .. [2] https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
    """

    def __init__(self, folder: Path, metadata: ArrayV3Metadata, codec: ShardingCodec, shard: int):
        self.size = int(metadata.shape[0])
        self.dtype: np.dtype[Any] = metadata.dtype.to_native_dtype()
        self.chunk = int(codec.chunk_shape[0])
        self.per_shard = shard // self.chunk
        self.fill_value = metadata.fill_value
        self._folder, self._metadata = folder, metadata
        self._index_first = str(getattr(codec.index_location, "value", codec.index_location)) == "start"
        self._indexes: dict[int, tuple[tuple[int, ...], NDArray[np.uint64]]] = {}

    @classmethod
    def open(cls, array: zarr.Array[Any]) -> ShardedArray | None:
        """Such an array, or `None` where zarr has to read it: it lies elsewhere, or is stored otherwise."""
        metadata, store = array.metadata, array.store
        if not isinstance(store, LocalStore) or not isinstance(metadata, ArrayV3Metadata) or array.ndim != 1:
            return None
        grid: Any = metadata.to_dict()["chunk_grid"]
        if grid["name"] != "regular":
            return None
        match metadata.codecs:
            case (ShardingCodec() as codec,):
                inner, index = codec.codecs, codec.index_codecs
            case _:
                return None
        match inner, index:
            case (BytesCodec() as data, BloscCodec()), (BytesCodec() as offsets, Crc32cCodec()):
                if any(str(getattr(c.endian, "value", c.endian)) == "big" for c in (data, offsets)):
                    return None
            case _:
                return None
        made = cls(Path(store.root).absolute() / array.path, metadata, codec, array.shards[0])  # type: ignore[index] # it has the codec
        numbers = made.dtype.kind in "iuf" and made.dtype.isnative
        # a file that is not there stands for fill values, or is lost: zarr tells, if anyone
        return made if numbers and all(made._path(shard).is_file() for shard in range(made.n_shards)) else None

    @property
    def n_shards(self) -> int:
        """Number of files."""
        return -(-self.size // (self.chunk * self.per_shard))

    def file(self, chunk: int) -> str:
        """Path of the file that a chunk lies in."""
        return str(self._path(chunk // self.per_shard))

    def _path(self, shard: int) -> Path:
        return self._folder / self._metadata.encode_chunk_key((shard,))

    def index(self, shard: int, file: FileIO) -> NDArray[np.uint64]:
        """(per_shard, 2) offset and length of each chunk of a shard in its file. Unit: bytes."""
        status = os.fstat(file.fileno())
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if shard not in self._indexes or self._indexes[shard][0] != version:
            self._indexes[shard] = version, self._read_index(file)
        return self._indexes[shard][1]

    def _read_index(self, file: FileIO) -> NDArray[np.uint64]:
        size, total = 16 * self.per_shard, os.fstat(file.fileno()).st_size
        if total < size + 4:
            raise _damaged(file, "it has no room for the index of its chunks")
        stored = bytearray(size + 4)
        _read(file, 0 if self._index_first else total - size - 4, memoryview(stored))
        if google_crc32c.value(bytes(stored[:size])) != int.from_bytes(stored[size:], "little"):
            raise _damaged(file, "the index of its chunks does not match its checksum")
        index = np.frombuffer(stored[:size], dtype="<u8").reshape(self.per_shard, 2)
        there = index[index[:, 0] != _LEFT_OUT]
        if there.size and (there.max() > total or there.sum(axis=1).max() > total):
            raise _damaged(file, "it has chunks that reach past its end")
        return index


class ChunkReader:
    """Decodes chunks for one thread, which keeps the file open that it read last."""

    def __init__(self) -> None:
        self._array: ShardedArray | None = None
        self._shard = -1
        self._file: FileIO | None = None
        self._stored = np.empty(0, dtype=np.uint8)

    def read(self, array: ShardedArray, first: int, stop: int, out: NDArray[Any]) -> None:
        """Decode chunks that lie in one shard.

        Parameters
        ----------
        array
            What the chunks are of.
        first, stop
            Numbers of the first chunk, and of the one behind the last.
        out
            ((stop - first) x chunk) values, of the array's type.

        Raises
        ------
        ValueError
            If the shard is damaged.
        FileNotFoundError
            If it is gone.
        """
        file = self._open(array, first // array.per_shard)
        start = self._shard * array.per_shard
        chunks = array.index(self._shard, file)[first - start : stop - start].tolist()
        size = array.chunk * array.dtype.itemsize
        bounds = self._fetch(file, chunks)
        for i, (begin, end) in enumerate(bounds):
            if begin < 0:
                out[i * array.chunk : (i + 1) * array.chunk] = array.fill_value
            # the header decides how much is read and written, so that is looked at before
            elif end - begin < 16 or _HEADER.unpack_from(self._stored, begin) != (size, end - begin):
                raise _damaged(file, f"its chunk {first - start + i:,} has not the size that it tells")
        failed = decompress(self._stored, bounds, out.view(np.uint8))
        if failed is not None:
            raise _damaged(file, f"its chunk {first - start + failed:,} cannot be decoded")

    def _fetch(self, file: FileIO, chunks: list[list[int]]) -> list[tuple[int, int]]:
        """Read chunks, given by offset and length; where each begins and ends in `_stored`, -1 if it is left out."""
        size = sum(length for offset, length in chunks if offset != _LEFT_OUT)
        if self._stored.size < size:
            self._stored = np.empty(size, dtype=np.uint8)
        bounds: list[tuple[int, int]] = []
        reads: list[tuple[int, int, int]] = []  # from where in the file, and which part of `_stored`
        end = 0
        for offset, length in chunks:
            if offset == _LEFT_OUT:
                bounds.append((-1, -1))
                continue
            bounds.append((end, end + length))
            # as a rule, neighbours lie side by side: one read
            if reads and reads[-1][0] + (end - reads[-1][1]) == offset:
                reads[-1] = (*reads[-1][:2], end + length)
            else:
                reads.append((offset, end, end + length))
            end += length
        for offset, begin, stop in reads:
            _read(file, offset, memoryview(self._stored)[begin:stop])
        return bounds

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._array, self._file = None, None

    def _open(self, array: ShardedArray, shard: int) -> FileIO:
        if self._file is None or array is not self._array or shard != self._shard:
            self.close()
            self._file = FileIO(array.file(shard * array.per_shard))
            self._array, self._shard = array, shard
        return self._file


def _read(file: FileIO, begin: int, out: memoryview) -> None:
    """Fill a buffer from a file."""
    file.seek(begin)
    done = 0
    while done < len(out):  # one call may bring less
        if not (number := file.readinto(out[done:])):
            raise _damaged(file, f"{len(out):,} bytes at {begin:,} are not there")
        done += number


def _damaged(file: FileIO, what: str) -> ValueError:
    return ValueError(f"{str(file.name)!r} is damaged: {what}. Copy the store again, or prepare the study again.")
