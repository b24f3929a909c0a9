"""Sparse cells that are decoded without zarr: batches as scipy and annbatch give them, and none of damaged files."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import google_crc32c
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from annbatch import Loader
from annbatch.abc import Sampler
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec
from zarr.storage import MemoryStore

import donorloader as dl
from _data import as_numpy
from _faults import wait_until
from donorloader._buffers import BufferPool
from donorloader.cells import open_cells
from donorloader.cells._csr_reader import CsrReader, StoredCsr
from donorloader.cells._native import native_functions
from donorloader.cells._place import Placing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest

    from _data import Store

CODECS = {
    "lz4": BloscCodec(cname="lz4", clevel=3, shuffle="shuffle"),
    "zstd": BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle"),
    "stored": BloscCodec(cname="lz4", clevel=0, shuffle="noshuffle"),
}


class Requests(Sampler):
    """Yields the requests it is made with."""

    def __init__(self, *requests: Any):
        self.requests = requests

    batch_size = None
    shuffle = False

    def n_batches(self, n_obs: int) -> int:
        return 0

    def validate(self, n_obs: int) -> None:
        pass

    def sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return iter(self.requests)

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        return iter(self.requests)


def matrix(rng: np.random.Generator, n: int, genes: int, longest: int, dtype: Any) -> sp.csr_matrix:
    """Rows of any length, none among them, columns in no order. No zeros: zarr may leave out what is nothing else."""
    lengths = rng.integers(0, min(longest, genes - 1) + 1, n)
    lengths[rng.random(n) < 0.2] = 0
    columns = [1 + rng.permutation(genes - 1)[:length] for length in lengths]
    indptr = np.append(0, np.cumsum(lengths))
    data = (np.arange(indptr[-1]) % 250 + 1).astype(dtype)
    return sp.csr_matrix((data, np.concatenate([*columns, np.zeros(0, int)]), indptr), shape=(n, genes))


def write(
    group: Any,
    X: sp.csr_matrix,
    *,
    index: Any = "uint16",
    chunks: tuple[int, int] = (16, 16),
    per_shard: int = 3,
    codec: Any = CODECS["lz4"],
    all_chunks: bool = True,
    **options: Any,
) -> ad.abc.CSRDataset:
    """X in shards, written by zarr."""
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
    for name, values, chunk in (("data", X.data, chunks[0]), ("indices", X.indices.astype(index), chunks[1])):
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(chunk,),
            shards=(chunk * per_shard,),
            compressors=codec,
            **options,
        )
        array[:] = values
    group.create_array("indptr", data=X.indptr.astype("int64"))
    return ad.io.sparse_dataset(group)


def reader(parts: list[ad.abc.CSRDataset], *requests: Any, **options: Any) -> CsrReader:
    stored = [StoredCsr.open(part, f"dataset_{i}") for i, part in enumerate(parts)]
    assert all(stored)
    pool = BufferPool(keep=4)
    return CsrReader(stored, parts[0].shape[1], Requests(*requests), pool=pool, **options)  # type: ignore[arg-type]


def assert_same(batch: Any, X: sp.csr_matrix, rows: np.ndarray, index: Any = np.int32) -> None:
    np.testing.assert_array_equal(batch["index"], rows)
    ours, expected = batch["X"], X[rows]
    assert ours.shape == expected.shape
    assert (ours.dtype, ours.indices.dtype, ours.indptr.dtype) == (X.dtype, index, np.int32)
    for name in ("indptr", "indices", "data"):  # the order of columns too
        np.testing.assert_array_equal(getattr(ours, name), getattr(expected, name))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    longest=st.sampled_from([0, 1, 9, 70]),
    dtype=st.sampled_from(["float32", "float64", "int16", "uint8"]),
    index=st.sampled_from(["uint8", "uint16", "uint32", "uint64", "int32", "int64"]),
    chunks=st.tuples(st.integers(4, 40), st.integers(4, 40)),
    per_shard=st.integers(1, 5),
    codec=st.sampled_from(list(CODECS)),
    runs=st.booleans(),
    threads=st.booleans(),
    as_stored=st.booleans(),
)
def test_the_rows_that_were_asked_for(
    seed: int,
    sizes: list[int],
    longest: int,
    dtype: Any,
    index: Any,
    chunks: tuple[int, int],
    per_shard: int,
    codec: str,
    runs: bool,
    threads: bool,
    as_stored: bool,
) -> None:
    rng = np.random.default_rng(seed)
    parts = [matrix(rng, n, 80, longest, dtype) for n in sizes]
    X = sp.vstack(parts).tocsr()
    with tempfile.TemporaryDirectory() as folder:
        root = zarr.open_group(folder, mode="w", zarr_format=3)
        options = {"index": index, "chunks": chunks, "per_shard": per_shard, "codec": CODECS[codec]}
        stored = [write(root.create_group(f"{i}"), part, **options) for i, part in enumerate(parts) if part.nnz]
        if len(stored) < len(parts):
            return  # zarr has no array without values to shard
        requests, expected = [], []
        for _ in range(3):
            if runs:
                cuts = np.unique(rng.integers(0, X.shape[0] + 1, 6))
                slices = [slice(a, b) for a, b in pairwise(cuts)]
                request = [slices[i] for i in rng.permutation(len(slices))] or [slice(0, 1)]
                rows = np.concatenate([np.arange(s.start, s.stop) for s in request])
            else:  # any rows, some of them twice
                request = rows = rng.integers(0, X.shape[0], 50)
            positions = rng.permutation(rows.size)[: max(1, rows.size - 3)]
            splits = np.array_split(positions, min(positions.size, 4))
            requests.append({"requests": request, "splits": splits})
            expected += [rows[split] for split in splits]
        batches = list(reader(stored, *requests, threads=threads, as_stored=as_stored))
        assert len(batches) == len(expected)
        for batch, rows in zip(batches, expected, strict=True):
            assert_same(batch, X, rows, index if as_stored else np.int32)
        theirs = Loader(batch_sampler=Requests(*requests), return_index=True, preload_to_gpu=False, to=None)
        for batch, other in zip(batches, theirs.add_datasets(stored), strict=True):
            np.testing.assert_array_equal(batch["index"], other["index"])
            assert (batch["X"] != other["X"]).nnz == 0


@pytest.fixture
def X() -> sp.csr_matrix:
    return matrix(np.random.default_rng(0), 200, 300, 40, "float32")


@pytest.fixture
def group(tmp_path: Path) -> Any:
    return zarr.open_group(str(tmp_path / "x"), mode="w", zarr_format=3)


ALL = {"requests": [slice(0, 200)], "splits": [np.arange(0, 120), np.arange(120, 200)]}


def shard(group: Any, name: str, number: int = 0) -> Path:
    return Path(group.store.root) / name / "c" / str(number)


class TestLayouts:
    def test_chunks_in_any_order_with_gaps(self, X: sp.csr_matrix, group: Any) -> None:
        """The format allows it; a writer that replaces chunks leaves such files."""
        dataset = write(group, X, per_shard=7)
        for name in ("data", "indices"):
            path = shard(group, name, 1)
            raw = path.read_bytes()
            index = np.frombuffer(raw[-(7 * 16 + 4) : -4], "<u8").reshape(7, 2).copy()
            body = b"gap"
            for k in np.random.default_rng(1).permutation(7):
                offset, length = map(int, index[k])
                index[k, 0] = len(body)
                body += raw[offset : offset + length] + b"xx" * int(k % 2)
            index_bytes = index.tobytes()
            path.write_bytes(body + index_bytes + google_crc32c.value(index_bytes).to_bytes(4, "little"))
        for batch, rows in zip(reader([dataset], ALL), (np.arange(120), np.arange(120, 200)), strict=True):
            assert_same(batch, X, rows)

    def test_index_at_the_start(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write_codec(group, X, ShardingCodec(chunk_shape=(8,), codecs=[*inner()], index_location="start"))
        assert_same(next(iter(reader([dataset], ALL))), X, np.arange(120))

    def test_chunks_that_are_not_stored(self, X: sp.csr_matrix, group: Any) -> None:
        """zarr leaves out chunks of zeros: of stored zeros, or of the first gene."""
        X.data[20:300], X.indices[100:400] = 0, 0
        dataset = write(group, X, per_shard=1000, all_chunks=False)
        index = np.frombuffer(shard(group, "data").read_bytes()[-16_004:-4], "<u8").reshape(1000, 2)
        assert (index[: X.nnz // 16, 0] == 2**64 - 1).any()
        batch = next(iter(reader([dataset], ALL)))
        np.testing.assert_array_equal(batch["X"].data, X[:120].data)
        np.testing.assert_array_equal(batch["X"].indices, X[:120].indices)

    @pytest.mark.parametrize(
        ("codec", "options"),
        [
            (ZstdCodec(), {}),
            (GzipCodec(), {}),
            (None, {}),
            ([CODECS["lz4"], Crc32cCodec()], {}),
            (CODECS["lz4"], {"serializer": zarr.codecs.BytesCodec(endian="big")}),
        ],
    )
    def test_what_is_left_to_annbatch(self, X: sp.csr_matrix, group: Any, codec: Any, options: Any) -> None:
        dataset = write(group, X, codec=codec, **options)
        assert StoredCsr.open(dataset, "x") is None
        assert self.through_a_loader(dataset)

    def test_arrays_without_shards(self, X: sp.csr_matrix, tmp_path: Path) -> None:
        for version in (2, 3):
            group = zarr.open_group(str(tmp_path / f"v{version}"), mode="w", zarr_format=version)
            ad.io.write_elem(group, "X", X)
            dataset = ad.io.sparse_dataset(group["X"])
            assert StoredCsr.open(dataset, "x") is None
            assert self.through_a_loader(dataset)

    def test_shards_of_several_sizes(self, X: sp.csr_matrix, group: Any) -> None:
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
        fill = np.zeros(-X.nnz % 16, dtype=np.float32)  # values of no row
        shards = [[32, 64, X.nnz + fill.size - 112, 16]]
        with zarr.config.set({"array.rectilinear_chunks": True}):
            for name, values in (
                ("data", np.append(X.data, fill)),
                ("indices", np.append(X.indices, fill).astype("uint16")),
            ):
                options = {"dtype": values.dtype, "chunks": (16,), "shards": shards, "compressors": CODECS["lz4"]}
                group.create_array(name, shape=values.shape, **options)[:] = values
            group.create_array("indptr", data=X.indptr.astype("int64"))
            dataset = ad.io.sparse_dataset(group)
            assert StoredCsr.open(dataset, "x") is None
            assert self.through_a_loader(dataset)

    def test_a_store_that_is_written_again(self, X: sp.csr_matrix, group: Any) -> None:
        """Between two epochs: what is known of the files is not that of others."""
        dataset = write(group, X)
        opened = reader([dataset], ALL)
        assert_same(next(iter(opened)), X, np.arange(120))
        X.data = np.random.default_rng(0).random(X.nnz, dtype=np.float32) + 1
        group["data"][:] = X.data
        assert_same(next(iter(opened)), X, np.arange(120))

    def test_splits_of_nothing(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        request = {"requests": [slice(0, 20)], "splits": [np.arange(5), [], np.arange(5, 20)]}
        batches = list(reader([dataset], request, {"requests": [slice(0, 20)], "splits": []}))
        assert [batch["index"].size for batch in batches] == [5, 0, 15]
        assert_same(batches[2], X, np.arange(5, 20))

    def test_systems_without_the_functions(self, X: sp.csr_matrix, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("donorloader.cells._shards.native_functions", lambda: None)
        dataset = write(group, X)
        assert StoredCsr.open(dataset, "x") is None
        assert self.through_a_loader(dataset)

    def test_other_places(self, X: sp.csr_matrix) -> None:
        dataset = write(zarr.open_group(MemoryStore(), mode="w", zarr_format=3), X)
        assert StoredCsr.open(dataset, "x") is None
        assert self.through_a_loader(dataset)

    def test_files_that_are_not_there(self, X: sp.csr_matrix, group: Any) -> None:
        """zarr takes them for zeros, whether or not they were lost."""
        dataset = write(group, X)
        shard(group, "data", 2).unlink()
        assert StoredCsr.open(dataset, "x") is None

    def through_a_loader(self, dataset: ad.abc.CSRDataset) -> bool:
        cells = ad.AnnData(dataset, obs=pd.DataFrame({"donor_id": ["a", "b"] * 100}, index=np.arange(200).astype(str)))
        with dl.DonorLoader(cells, batch_size=64) as loader:
            expected = dataset[:]
            for batch in loader:
                np.testing.assert_array_equal(as_numpy(batch["X"]), expected[as_numpy(batch["index"])].toarray())
        return True

    def test_it_is_what_reads_collections_and_studies(self, store: Store, tmp_path: Path) -> None:
        """A new default of what writes them would be read by annbatch: right, and slow."""
        cells = store.cells(3)
        assert isinstance(open_cells(cells.path).loader(Requests()), CsrReader)
        study = dl.prepare([adata.copy() for adata in cells.adatas], out=tmp_path / "study")
        assert isinstance(open_cells(study.path / "cells.zarr").loader(Requests()), CsrReader)
        assert isinstance(open_cells(study.path / "bags.zarr").loader(Requests()), CsrReader)
        assert not isinstance(open_cells(cells.adatas).loader(Requests()), CsrReader)
        assert not isinstance(open_cells(store.cells(1, layout="dense").path).loader(Requests()), CsrReader)


def inner() -> list[Any]:
    return [zarr.codecs.BytesCodec(), CODECS["lz4"]]


def write_codec(group: Any, X: sp.csr_matrix, codec: ShardingCodec) -> ad.abc.CSRDataset:
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(X.shape)})
    for name, values in (("data", X.data), ("indices", X.indices.astype("uint16"))):
        array = group.create_array(
            name, shape=values.shape, dtype=values.dtype, chunks=(64,), serializer=codec, compressors=None, filters=None
        )
        array[:] = values
    group.create_array("indptr", data=X.indptr.astype("int64"))
    return ad.io.sparse_dataset(group)


class TestDamage:
    """Whatever bytes lie there, no memory is read or written that is not ours, and the file is named."""

    @pytest.mark.parametrize("name", ["data", "indices"])
    def test_flipped_bits(self, X: sp.csr_matrix, group: Any, name: str) -> None:
        """Blosc has no checksum: values can be others, as with zarr. But shapes are right and columns exist."""
        dataset = write(group, X, per_shard=10_000)
        path = shard(group, name)
        raw, refused = path.read_bytes(), 0
        used = raw.index(b"\xff" * 16)  # the index of chunks that do not exist follows
        places = np.random.default_rng(0).permutation(used)[:150]
        for place in places.tolist():
            path.write_bytes(raw[:place] + bytes([raw[place] ^ (1 << place % 8)]) + raw[place + 1 :])
            batches, error = [], None
            try:
                batches = list(reader([dataset], ALL))
            except ValueError as raised:
                error = str(raised)
                refused += 1
            assert error is None or ("damaged" in error and str(path) in error)
            for batch in batches:
                assert batch["X"].indices.min() >= 0
                assert batch["X"].indices.max() < X.shape[1]
        assert refused > 15

    def test_the_index_has_a_checksum(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        path = shard(group, "data", 1)
        raw = path.read_bytes()
        for place in range(len(raw) - 3 * 16 - 4, len(raw)):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 16]) + raw[place + 1 :])
            with pytest.raises(ValueError, match=r"c/1' is damaged: the index of its chunks"):
                list(reader([dataset], ALL))

    def test_cut_short(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        path = shard(group, "indices", 1)
        raw = path.read_bytes()
        for n in (0, 1, 20, len(raw) // 2, len(raw) - 1):
            path.write_bytes(raw[:n])
            with pytest.raises(ValueError, match=r"indices/c/1' is damaged"):
                list(reader([dataset], ALL))
        path.write_bytes(raw[60:])  # the index is whole, and tells of more
        with pytest.raises(ValueError, match=r"reach past its end|not the size|cannot be decoded"):
            list(reader([dataset], ALL))

    def test_cut_short_after_the_index_was_read(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        opened = reader([dataset], ALL)
        list(opened)
        shard(group, "data", 1).write_bytes(b"short")
        with pytest.raises(ValueError, match=r"data/c/1' is damaged: it has no room"):
            list(opened)
        shard(group, "data", 1).unlink()
        with pytest.raises(FileNotFoundError, match=r"data/c/1"):
            list(opened)

    @pytest.mark.parametrize(("index", "value"), [("uint16", 300), ("uint16", 65_535), ("int32", -1), ("int64", 2**40)])
    @pytest.mark.parametrize("threads", [True, False])
    def test_columns_that_do_not_exist(
        self, X: sp.csr_matrix, group: Any, index: str, value: int, threads: bool
    ) -> None:
        dataset = write(group, X, index=index)
        group["indices"][X.nnz - 2] = value
        with pytest.raises(ValueError, match=r"is damaged: X has 300 columns"):
            list(reader([dataset], ALL, threads=threads))

    @pytest.mark.parametrize("at", [0, 5, -1])
    @pytest.mark.parametrize("value", [-1, 10**9])
    def test_indptr(self, X: sp.csr_matrix, group: Any, at: int, value: int) -> None:
        dataset = write(group, X)
        indptr = group["indptr"][:]
        indptr[at] = value
        group["indptr"][:] = indptr
        with pytest.raises(ValueError, match=r"X of x is damaged: its rows must lie one behind the other"):
            StoredCsr.open(dataset, "x")

    @pytest.mark.parametrize("change", [-3, -200, 3])
    def test_an_indptr_of_another_length(self, X: sp.csr_matrix, group: Any, change: int) -> None:
        """All rows of datasets behind it would be others, under a right number."""
        dataset = write(group, X)
        indptr = X.indptr[: X.shape[0] + 1 + change] if change < 0 else np.append(X.indptr, [X.nnz] * change)
        del group["indptr"]
        group.create_array("indptr", data=indptr.astype("int64"))
        with pytest.raises(ValueError, match=r"X of x is damaged: indptr must have a value more than its 200 rows"):
            StoredCsr.open(dataset, "x")

    def test_a_type_that_scipy_does_not_have(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        del group["data"]
        group.create_array("data", data=X.data.astype("float16"))
        cells = ad.AnnData(dataset, obs=pd.DataFrame({"donor_id": ["a"] * 200}, index=np.arange(200).astype(str)))
        with pytest.raises(ValueError, match=r"X of the AnnData is float16"):
            dl.DonorLoader(cells, batch_size=64)

    def test_rows_that_do_not_exist(self, X: sp.csr_matrix, group: Any) -> None:
        dataset = write(group, X)
        for rows in ([3, 200], [-1, 3]):
            request = {"requests": np.array(rows), "splits": [np.arange(2)]}
            with pytest.raises(IndexError, match=r"Rows go from 0 to 199, but the sampler drew"):
                list(reader([dataset], request))

    @pytest.mark.parametrize("prefetch", [None, 0])
    @pytest.mark.parametrize("densify", [False, True])
    def test_through_a_loader(self, store: Store, tmp_path: Path, prefetch: int | None, densify: bool) -> None:
        shutil.copytree(store.cells(1).path, tmp_path / "cells.zarr")
        path = next((tmp_path / "cells.zarr").glob("dataset_0/X/data/c/1"))
        path.write_bytes(path.read_bytes()[:-1])
        before = threading.active_count()
        with (
            dl.DonorLoader(tmp_path / "cells.zarr", batch_size=16, prefetch=prefetch, densify=densify) as loader,
            pytest.raises(ValueError, match="is damaged") as raised,
        ):
            list(loader)
        assert any("cells" in note for note in raised.value.__notes__)
        assert threading.active_count() <= before


class TestThreads:
    @pytest.mark.parametrize("wanted", [True, False])
    def test_they_end_with_the_iteration(
        self, X: sp.csr_matrix, group: Any, monkeypatch: pytest.MonkeyPatch, wanted: bool
    ) -> None:
        monkeypatch.setattr("donorloader.cells._csr_reader.usable_cores", lambda: 4)
        dataset = write(group, X)
        batches = iter(reader([dataset], ALL, ALL, threads=wanted))
        assert_same(next(batches), X, np.arange(120))
        names = [thread.name for thread in threading.enumerate()]
        assert sum(name.startswith("donorloader decoding") for name in names) == (3 if wanted else 0)
        batches.close()  # type: ignore[attr-defined] # a generator
        assert not any(thread.name.startswith("donorloader decoding") for thread in threading.enumerate())

    def test_an_error_on_any_of_them(self, X: sp.csr_matrix, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever thread meets it, it comes once, and nothing is left of the load request."""
        monkeypatch.setattr("donorloader.cells._csr_reader.usable_cores", lambda: 8)
        dataset = write(group, X, per_shard=1)
        bad = shard(group, "data", 40)
        bad.write_bytes(bad.read_bytes()[:-1])
        for _ in range(20):
            with pytest.raises(ValueError, match=r"data/c/40' is damaged"):
                list(reader([dataset], ALL))

    def test_batches_that_are_kept_stay_as_they_are(self, group: Any) -> None:
        """Their memory is used again only when nothing refers to it."""
        big = sp.random(900, 5_000, density=0.2, format="csr", random_state=0, dtype=np.float32)
        dataset = write(group, big, chunks=(20_000, 20_000))
        rng = np.random.default_rng(0)
        requests = [{"requests": [slice(0, 900)], "splits": np.split(rng.permutation(900), 3)} for _ in range(6)]
        kept = [(batch["X"].data, batch["X"].indices, batch["index"]) for batch in reader([dataset], *requests)]
        for data, indices, rows in kept:
            np.testing.assert_array_equal(data, big[rows].data)
            np.testing.assert_array_equal(indices, big[rows].indices)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a library may show fewer of its functions")
def test_chunks_are_decompressed_without_the_lock() -> None:
    """If this fails, numcodecs no longer shows its function: all is right still, and slower."""
    assert native_functions()


def test_memory_is_held_until_the_last_thread_is_done(
    X: sp.csr_matrix, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second interrupt may leave threads behind that still write: not to what somebody else has by then."""
    monkeypatch.setattr("donorloader.cells._csr_reader.usable_cores", lambda: 2)
    dataset = write(group, X)
    wait_for, here, owners = threading.Event(), threading.Event(), []
    place = Placing.place

    def slow(self: Placing, group: Any, reader: Any) -> None:
        if "decoding" in threading.current_thread().name:
            owners.extend(weakref.ref(owner.data) for owner in self.owners)
            here.set()
            assert wait_for.wait(20)
        else:
            assert here.wait(20)
        place(self, group, reader)

    class Interrupted(BaseException):
        pass

    def interrupted(_: Any) -> None:
        raise Interrupted

    monkeypatch.setattr(Placing, "place", slow)
    monkeypatch.setattr("donorloader.cells._csr_reader.wait", interrupted)
    monkeypatch.setattr(ThreadPoolExecutor, "__exit__", lambda *_: None)
    with pytest.raises(Interrupted):
        next(iter(reader([dataset], ALL)))
    gc.collect()
    assert owners
    assert all(owner() is not None for owner in owners)
    wait_for.set()
    assert wait_until(lambda: (gc.collect(), all(owner() is None for owner in owners))[1], 5)


@pytest.mark.parametrize("bytes_kept", [0, 10 << 20])
def test_what_is_kept_is_bounded_and_released(store: Store, bytes_kept: int) -> None:
    pool = BufferPool(keep=8, keep_bytes=bytes_kept)
    arrays = [pool.empty((3 << 20,), np.uint8) for _ in range(8)]
    arrays.clear()
    held = sum(memory.nbytes for memory in pool._free)
    assert held <= bytes_kept
    assert held > 0 or not bytes_kept
    pool.clear()
    assert not pool._free


def test_more_values_than_32_bits_count(X: sp.csr_matrix, group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scipy, such a batch has numbers of 64 bits."""
    dataset = write(group, X)
    monkeypatch.setattr("donorloader.cells._csr_reader._MOST_VALUES", 100)
    batch = next(iter(reader([dataset], ALL)))
    assert batch["X"].indices.dtype == batch["X"].indptr.dtype == np.int64
    np.testing.assert_array_equal(batch["X"].toarray(), X[:120].toarray())
