"""Sharded zarr arrays of one dimension on local disk: which chunk holds which values, and their decoding."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numba
import numpy as np
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import LocalStore

from donorloader._vectors import address_of

from ._native import decompress, native_functions, read_file

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray

    from ._native import Functions

__all__ = ["ShardReader", "ShardedArray", "chunk_error", "read_chunk"]

_LEFT_OUT = 2**64 - 1  # offset of a chunk that holds nothing but the fill value
# Header of a blosc buffer: from byte 4 on what it decodes to, from byte 12 on what it takes; the rest is not ours.
_HEADER_BYTES = 16

# What `read_chunk` finds wrong.
_NOT_THERE, _OTHER_SIZE, _NOT_DECODED = 1, 2, 3


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
    functions
        What :func:`read_chunk` calls.

    References
    ----------
    .. [1] https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
    .. [2] https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
    """

    def __init__(self, folder: Path, metadata: ArrayV3Metadata, codec: ShardingCodec, shard: int, functions: Functions):
        self.size = int(metadata.shape[0])
        self.dtype: np.dtype[Any] = metadata.dtype.to_native_dtype()
        self.chunk = int(codec.chunk_shape[0])
        self.per_shard = shard // self.chunk
        self.fill_value = metadata.fill_value
        self.functions = functions
        self._folder, self._metadata = folder, metadata
        self._index_first = str(getattr(codec.index_location, "value", codec.index_location)) == "start"
        self._indexes: dict[int, tuple[tuple[int, ...], NDArray[np.uint64]]] = {}

    @classmethod
    def open(cls, array: zarr.Array[Any]) -> ShardedArray | None:
        """Such an array, or `None` where zarr has to read it: it is elsewhere, or stored otherwise."""
        metadata, store, functions = array.metadata, array.store, native_functions()
        if functions is None:
            return None
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
        made = cls(Path(store.root).absolute() / array.path, metadata, codec, array.shards[0], functions)  # type: ignore[index] # it has the codec
        numbers = made.dtype.kind in "iuf" and made.dtype.isnative
        # a file that is not there stands for fill values, or is lost: zarr tells, if anyone
        return made if numbers and all(made._path(shard).is_file() for shard in range(made.n_shards)) else None

    @property
    def chunk_bytes(self) -> int:
        """What a chunk takes, decoded."""
        return self.chunk * self.dtype.itemsize

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


class ShardReader:
    """What one thread reads shards with: the file that it read last, left open, and memory to decode in."""

    def __init__(self) -> None:
        self._array: ShardedArray | None = None
        self._shard = -1
        self._file: FileIO | None = None
        self._stored, self._values = (np.empty(0, dtype=np.uint8) for _ in range(2))

    def open(self, array: ShardedArray, shard: int) -> FileIO:
        """The file of a shard."""
        if self._file is None or array is not self._array or shard != self._shard:
            self.close()
            self._file = FileIO(array.file(shard * array.per_shard))
            self._array, self._shard = array, shard
        return self._file

    def memory(self, stored: int, decoded: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Memory for a chunk as it is stored, of at least so many bytes, and for what it decodes to."""
        if self._stored.size < stored:
            self._stored = np.empty(stored, dtype=np.uint8)
        if self._values.size < decoded:
            self._values = np.empty(decoded, dtype=np.uint8)
        return self._stored, self._values[:decoded]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._array, self._file = None, None


@numba.njit(nogil=True)
def read_chunk(pread, blosc, file, offset, length, stored, values):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """Read `length` bytes of a file, and decompress them into `values`; 0, or what is wrong with them."""
    done = 0
    while done < length:
        number = read_file(pread, file, address_of(stored) + done, length - done, offset + done)
        if number <= 0:
            return _NOT_THERE
        done += number
    # the header decides how much is read and written, so that is looked at before
    if length < _HEADER_BYTES or _number(stored, 4) != values.size or _number(stored, 12) != length:
        return _OTHER_SIZE
    if decompress(blosc, address_of(stored), address_of(values), values.size, 1) != values.size:
        return _NOT_DECODED
    return 0


@numba.njit(nogil=True)
def _number(stored, at):  # type: ignore[no-untyped-def] # pragma: no cover, compiled
    """A number of 32 bits."""
    number = np.int64(0)
    for i in range(4):
        number |= np.int64(stored[at + i]) << (8 * i)
    return number


def chunk_error(file: FileIO, chunk: int, where: tuple[int, int], wrong: int) -> ValueError | None:
    """What to raise where :func:`read_chunk` found something wrong; `None` if it is worth another try.

    Parameters
    ----------
    file
        That was read.
    chunk
        Number of the chunk, for the message.
    where
        Its offset and length in the file. Unit: bytes.
    wrong
        What was found.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it ends before the chunk does.
    """
    if wrong == _NOT_THERE:  # reading it once more tells why
        offset, length = where
        _read(file, offset, memoryview(bytearray(length)))
        return None
    what = "has not the size that it tells" if wrong == _OTHER_SIZE else "cannot be decoded"
    return _damaged(file, f"its chunk {chunk:,} {what}")


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
