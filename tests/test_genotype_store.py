"""The store of genotypes: what is written is read, by us and by anndata; what is damaged is never read as genotypes."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import donorloader as dl
from donorloader._zarr import local_pipeline
from donorloader.genotypes._checksums import write_table
from donorloader.genotypes._unpacking import unpack
from donorloader.genotypes._write import write_genotypes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

N_DONORS, N_VARIANTS = 60, 4003


def genotypes_of(values: Any) -> ad.AnnData:
    obs = pd.DataFrame({"sex": np.arange(len(values)) % 2}, index=[f"d{i}" for i in range(len(values))])
    return ad.AnnData(values, obs=obs, var=pd.DataFrame(index=[f"v{i}" for i in range(values.shape[1])]))


def random_calls(shape: tuple[int, int] = (N_DONORS, N_VARIANTS)) -> NDArray[np.int8]:
    return np.random.default_rng(8).integers(-1, 3, shape, dtype=np.int8)


def write(values: Any, path: Path, **options: Any) -> Any:
    return write_genotypes(dl.open_genotypes(genotypes_of(values)), path, memory=10**8, **options)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "g.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("donorloader.genotypes._write_rows._SHARD_BYTES", 12_500)
        patch.setattr("donorloader.genotypes._write_rows._CHUNK_BYTES", 3_100)
        write(random_calls(), path)
    return path


@pytest.fixture
def copy(tmp_path: Path, written: Path) -> Path:
    return shutil.copytree(written, tmp_path / "copy.zarr")


def shards(path: Path) -> list[Path]:
    return sorted((path / "obsm/genotypes_2bit/c").glob("*/0"), key=lambda file: int(file.parent.name))


def test_a_last_shard_that_is_not_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("donorloader.genotypes._write_rows._SHARD_BYTES", 4 * 500)
    monkeypatch.setattr("donorloader.genotypes._write_rows._CHUNK_BYTES", 2 * 500)
    calls = random_calls((9, 2000))
    write(calls, tmp_path / "g.zarr")
    array = zarr.open_group(str(tmp_path / "g.zarr"))["obsm/genotypes_2bit"]
    assert (array.shards[0], array.chunks[0]) == (4, 2)
    np.testing.assert_array_equal(dl.open_genotypes(tmp_path / "g.zarr").read(np.arange(9), slice(0, 2000)), calls)


@pytest.mark.parametrize("layout", ["packed", "plain", "both", None])
def test_what_is_written_is_read(tmp_path: Path, layout: Any) -> None:
    calls = random_calls()
    counts = write(calls, tmp_path / "g.zarr", layout=layout)
    assert (counts.n_donors, counts.n_variants, counts.dtype) == (*calls.shape, "int8")
    assert counts.missing_calls == (calls < 0).sum()
    store = dl.open_genotypes(tmp_path / "g.zarr")
    assert (store.packed is None) == (layout == "plain")
    np.testing.assert_array_equal(store.read(np.arange(N_DONORS), slice(0, N_VARIANTS)), calls)
    rows = np.array([59, 3, 3, 0, 17])
    for columns in (slice(7, 4002), np.array([4002, 1, 8, 9])):
        np.testing.assert_array_equal(store.read(rows, columns), calls[rows][:, columns])
    adata = ad.read_zarr(tmp_path / "g.zarr")
    assert list(adata.obs["sex"]) == [i % 2 for i in range(N_DONORS)]
    if layout in ("plain", "both"):
        np.testing.assert_array_equal(adata.X, calls)
    if layout != "plain":
        np.testing.assert_array_equal(unpack(adata.obsm["genotypes_2bit"], slice(0, N_VARIANTS)), calls)
    there = calls >= 0
    np.testing.assert_allclose(adata.var["counted_freq"], (calls * there).sum(0) / there.sum(0) / 2, rtol=1e-6)
    np.testing.assert_allclose(adata.var["missing_rate"], 1 - there.mean(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("layout", "zeros"),
    [
        ("packed", slice(0, 9)),
        ("packed", slice(4, 8)),
        ("packed", slice(8, 9)),
        ("plain", slice(0, 9)),
        ("both", slice(4, 8)),
    ],
)
def test_shards_of_zeros_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Any, zeros: slice) -> None:
    """zarrs leaves them out, and what is not there counts as lost."""
    row_bytes = 500 if layout == "packed" else 2000
    monkeypatch.setattr("donorloader.genotypes._write_rows._SHARD_BYTES", 4 * row_bytes)
    monkeypatch.setattr("donorloader.genotypes._write_rows._CHUNK_BYTES", 2 * row_bytes)
    calls = random_calls((9, 2000))
    calls[zeros] = 0
    write(calls, tmp_path / "g.zarr", layout=layout)
    group = zarr.open_group(str(tmp_path / "g.zarr"))
    key = "obsm/genotypes_2bit" if layout == "packed" else "X"
    assert group[key].shards[0] == 4
    assert sorted(file.name for file in (tmp_path / "g.zarr" / key / "c").iterdir()) == ["0", "1", "2"]
    np.testing.assert_array_equal(dl.open_genotypes(tmp_path / "g.zarr").read(np.arange(9), slice(0, 2000)), calls)
    if layout != "packed":
        np.testing.assert_array_equal(ad.read_zarr(tmp_path / "g.zarr").X, calls)


@pytest.mark.parametrize("layout", ["packed", "both"])
def test_zarrs_chosen_by_the_user(tmp_path: Path, layout: Any) -> None:
    """As annbatch recommends. It leaves out chunks of zeros, in tables and rows alike."""
    calls = np.zeros((9, 50), dtype=np.int8)
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        write(calls, tmp_path / "g.zarr", layout=layout)
        assert zarr.config.get("codec_pipeline.path") == "zarrs.ZarrsCodecPipeline"
        store = dl.open_genotypes(tmp_path / "g.zarr")
        np.testing.assert_array_equal(store.read(np.arange(9), slice(0, 50)), calls)
        assert (store.var()["counted_freq"] == 0).all()


class TestVariantsAreWrittenBesideTheRows:
    def source(self, calls: Any) -> ad.AnnData:
        """Genotypes that were counted before, otherwise, in columns that are not the last."""
        source = genotypes_of(calls)
        source.var["missing_rate"] = 0.75
        source.var["counted_freq"] = np.linspace(0.25, 0.5, calls.shape[1])
        source.var["chrom"] = pd.Categorical(["1"]).repeat(calls.shape[1])
        return source

    def written(self, calls: Any, path: Path) -> pd.DataFrame:
        write_genotypes(dl.open_genotypes(self.source(calls)), path, memory=10**8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            var = ad.read_zarr(path).var
        pd.testing.assert_frame_equal(dl.open_genotypes(path).var(), var)
        assert list(var.index) == [f"v{i}" for i in range(calls.shape[1])]
        assert list(var["chrom"]) == ["1"] * calls.shape[1]
        assert list(var["counted"]) == ["unknown"] * calls.shape[1]
        np.testing.assert_allclose(var["missing_rate"], (calls < 0).mean(0), rtol=1e-5, atol=1e-7)
        return var

    def test_what_was_counted_is_counted_anew(self, tmp_path: Path) -> None:
        calls = random_calls((9, 50))
        var = self.written(calls, tmp_path / "g.zarr")
        there = calls >= 0
        np.testing.assert_allclose(var["counted_freq"], (calls * there).sum(0) / there.sum(0) / 2, rtol=1e-6)
        assert sorted(var.columns[-2:]) == ["counted_freq", "missing_rate"]
        assert sorted(var.columns) == ["chrom", "counted", "counted_freq", "missing_rate"]

    def test_a_frequency_that_cannot_be_counted_stays(self, tmp_path: Path) -> None:
        calls = random_calls((9, 50))
        calls[8, 7] = 4
        var = self.written(calls, tmp_path / "g.zarr")
        np.testing.assert_array_equal(var["counted_freq"], np.linspace(0.25, 0.5, 50))
        assert sorted(var.columns[-2:]) == ["counted_freq", "missing_rate"]

    @pytest.mark.parametrize("largest", [2, 4])
    def test_its_chunks_of_zeros_are_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
        """As if the table were written while the arrays of the rows are opened by zarrs, which would leave them out."""

        @contextmanager
        def slowly(*nodes: Any) -> Iterator[None]:
            with local_pipeline(*nodes):
                time.sleep(0.2)
                yield

        monkeypatch.setattr("donorloader.genotypes._write_rows.local_pipeline", slowly)
        calls = random_calls((9, 50))
        calls[8, 7] = largest
        self.written(calls, tmp_path / "g.zarr")

    def test_an_error_in_the_rows_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = random_calls((9, 50))
        calls[8, 7] = 5
        with pytest.raises(ValueError, match=r"^Calls at two bits are .* some are 5\. .*layout='plain'"):
            write(calls, tmp_path / "packed.zarr", layout="packed")

        store = dl.open_genotypes(genotypes_of(calls))
        monkeypatch.setattr(store, "read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_genotypes(store, tmp_path / "g.zarr", memory=10**8)

    def test_an_error_in_the_table_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(group: Any, key: str, table: Any) -> None:
            if key == "var":
                raise OSError("No space left on device")
            write_table(group, key, table)

        monkeypatch.setattr("donorloader.genotypes._write.write_table", full)
        with pytest.raises(OSError, match="No space left"):
            write(random_calls((9, 50)), tmp_path / "g.zarr")


@settings(max_examples=12)
@given(n_donors=st.integers(1, 9), n_variants=st.integers(1, 30), seed=st.integers(0, 99), all_missing=st.booleans())
def test_any_shape(
    tmp_path_factory: pytest.TempPathFactory, n_donors: int, n_variants: int, seed: int, all_missing: bool
) -> None:
    calls = np.random.default_rng(seed).integers(-1, 3, (n_donors, n_variants), dtype=np.int8)
    if all_missing:
        calls[:] = -1
    path = tmp_path_factory.mktemp("any") / "g.zarr"
    write(calls, path)
    store = dl.open_genotypes(path)
    np.testing.assert_array_equal(store.read(np.arange(n_donors), slice(0, n_variants)), calls)


def test_integers_of_other_types_are_packed(tmp_path: Path) -> None:
    calls = random_calls((9, 50))
    for dtype in (np.int16, np.int64, np.uint8, bool):
        values = np.abs(calls).astype(dtype) if dtype in (np.uint8, bool) else np.where(calls < 0, -9, calls)
        write(values.astype(dtype), tmp_path / f"{np.dtype(dtype)}.zarr")
        store = dl.open_genotypes(tmp_path / f"{np.dtype(dtype)}.zarr")
        assert store.packed is not None
        expected = np.where(values.astype(int) < 0, -1, values.astype(int))
        np.testing.assert_array_equal(store.read(np.arange(9), slice(0, 50)), expected)


def test_calls_above_two_stay_plain(tmp_path: Path) -> None:
    calls = random_calls((30, 50))
    calls[29, 7] = 4
    counts = write(calls, tmp_path / "g.zarr")
    store = dl.open_genotypes(tmp_path / "g.zarr")
    assert store.packed is None
    assert counts.missing_calls == (calls < 0).sum()
    np.testing.assert_array_equal(store.read(np.arange(30), slice(0, 50)), calls)
    assert "obsm" not in zarr.open_group(tmp_path / "g.zarr") or not list(zarr.open_group(tmp_path / "g.zarr")["obsm"])
    with pytest.raises(ValueError, match=r"some are 4.*layout='plain'"):
        write(calls, tmp_path / "packed.zarr", layout="packed")


@pytest.mark.parametrize(
    ("dosages", "dtype", "error"),
    [
        (None, "float32", 0),
        ("float32", "float32", 0),
        ("float16", "float16", 1e-3),
        ("uint8", "float32", 1 / 254 + 1e-6),
    ],
)
def test_dosages(tmp_path: Path, dosages: Any, dtype: str, error: float) -> None:
    values = np.random.default_rng(0).uniform(0, 2, (12, 301)).astype(np.float32)
    values[3, 5], values[0, 0], values[1, 1] = np.nan, 0, 2
    write(values, tmp_path / "g.zarr", dosage_type=dosages)
    store = dl.open_genotypes(tmp_path / "g.zarr")
    assert store.dtype == dtype
    for columns in (slice(0, 301), slice(4, 9), np.array([300, 5, 5])):
        read = store.read(np.array([3, 0, 11]), columns)
        np.testing.assert_allclose(read, values[[3, 0, 11]][:, columns], atol=error, rtol=0)


@pytest.mark.parametrize(
    ("values", "options", "says"),
    [
        (np.ones((2, 3), np.float32), {"layout": "packed"}, r"layout='packed' packs hard calls.*float32"),
        (np.ones((2, 3), np.int8), {"dosage_type": "uint8"}, r"dosage_type=.uint8.*int8: leave it out"),
        (np.full((2, 3), 2.5, np.float32), {"dosage_type": "uint8"}, r"between 0 and 2, but one is 2.5"),
    ],
)
def test_layouts_that_cannot_be(tmp_path: Path, values: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write(values, tmp_path / "g.zarr", **options)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dl.GenotypeStore]:
    """The same calls from wherever they may lie."""
    import scipy.sparse as sp

    folder, calls = tmp_path_factory.mktemp("small"), random_calls((7, 23))
    write(calls, folder / "packed.zarr")
    write(calls, folder / "plain.zarr", layout="plain")
    genotypes_of(calls).write_h5ad(folder / "g.h5ad")
    sparse = genotypes_of(calls)
    sparse.X = sp.csr_matrix(calls)
    sparse.write_zarr(folder / "csr.zarr")
    sources = {name: folder / name for name in ("packed.zarr", "plain.zarr", "g.h5ad", "csr.zarr")}
    return {name: dl.open_genotypes(source) for name, source in (*sources.items(), ("memory", genotypes_of(calls)))}


@pytest.mark.parametrize(
    "columns",
    [
        *(slice(None), slice(3, 17), slice(-5, -1), slice(0, 20, 2), slice(20, 2, -3), slice(5, 3), slice(4, 90)),
        *([1, 5, 5, 0], [-1, 5, -23], np.array([3, 3, 2], np.uint8), np.arange(23) % 3 == 0, [], np.zeros(23, bool)),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [[2, 2, 1], [-1, 0, -7], np.arange(7) > 4, []], ids=str)
def test_what_numpy_takes(small: dict[str, dl.GenotypeStore], rows: Any, columns: Any) -> None:
    calls = random_calls((7, 23))
    expected = calls[np.asarray(rows, dtype=None if len(rows) else int)]
    expected = expected[:, columns if isinstance(columns, slice) or len(columns) else np.empty(0, int)]
    for name, store in small.items():
        found = store.read(rows, columns)
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert found.flags.c_contiguous


@pytest.mark.parametrize(
    ("rows", "columns", "kind", "says"),
    [
        ([0, 7], slice(0, 2), IndexError, "rows must be below 7, got '7'"),
        ([-8], slice(0, 2), IndexError, "rows must be below 7, got '-8'"),
        ([0], [22, 23], IndexError, "columns must be below 23, got '23'"),  # of a byte that is there
        ([0], [True, False], ValueError, "mask of columns .* 23, got 2"),
        ([0], ["v1"], TypeError, "columns must be numbers"),
        (slice(0, 2), slice(0, 2), TypeError, "rows must be numbers"),
        ([0.0], slice(0, 2), TypeError, "rows must be numbers"),
    ],
)
def test_what_is_not_there(
    small: dict[str, dl.GenotypeStore], rows: Any, columns: Any, kind: type[Exception], says: str
) -> None:
    for store in small.values():
        with pytest.raises(kind, match=says):
            store.read(rows, columns)


class TestDamage:
    """Whatever happens to its files, a store reads right or says which part is damaged."""

    def test_every_byte_of_a_shard_counts(self, copy: Path) -> None:
        file = shards(copy)[2]
        whole = file.read_bytes()
        calls = random_calls()
        found = 0
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"damaged: shard obsm/genotypes_2bit/c/2/0"):
                dl.open_genotypes(copy).read(np.arange(N_DONORS), slice(0, N_VARIANTS))
            found += 1
        assert found >= 40
        file.write_bytes(whole)
        np.testing.assert_array_equal(dl.open_genotypes(copy).read(np.arange(N_DONORS), slice(0, N_VARIANTS)), calls)

    @pytest.mark.parametrize("left", [0, 1, 100, -1])
    def test_truncated(self, copy: Path, left: int) -> None:
        file = shards(copy)[1]
        file.write_bytes(file.read_bytes()[:left])
        with pytest.raises(ValueError, match=r"damaged: shard obsm/genotypes_2bit/c/1/0.*prepare"):
            dl.open_genotypes(copy).read(np.arange(N_DONORS), slice(0, 10))

    def test_through_a_loader(self, copy: Path) -> None:
        file = shards(copy)[0]
        file.write_bytes(file.read_bytes()[:-9])
        cells = ad.AnnData(np.ones((N_DONORS, 1), np.float32))
        cells.obs["donor_id"] = [f"d{i}" for i in range(N_DONORS)]
        with dl.DonorLoader(cells, copy) as loader, pytest.raises(ValueError, match=r"shard .*c/0/0") as error:
            list(loader)
        assert any("lane 'genotypes'" in note for note in error.value.__notes__)

    def test_lost(self, copy: Path) -> None:
        shards(copy)[1].unlink()
        with pytest.raises(ValueError, match=r"not whole: \d+ of its \d+ files are missing"):
            dl.open_genotypes(copy)

    @pytest.mark.parametrize("table", ["obs", "var"])
    def test_every_byte_of_a_name_counts(self, tmp_path: Path, table: str) -> None:
        """A damaged id would be another donor's, a damaged name another variant's."""
        write(random_calls((40, 30)), tmp_path / "g.zarr")
        file = next(
            file for file in sorted((tmp_path / "g.zarr" / table / "_index").rglob("c/0")) if file.stat().st_size > 60
        )
        whole = file.read_bytes()
        says = rf"{table} of .*g.zarr' is damaged: shard {table}/_index.*/c/0 cannot be read"
        for at in range(0, len(whole), max(1, len(whole) // 12)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x01]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=says):
                dl.open_genotypes(tmp_path / "g.zarr").names(slice(0, 30))
        for left in (0, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:left])
            with pytest.raises(ValueError, match=says):
                dl.open_genotypes(tmp_path / "g.zarr").names(slice(0, 30))
        file.unlink()
        with pytest.raises(ValueError, match=rf"{table}/_index.* is not whole: 1 of its 1 files"):
            dl.open_genotypes(tmp_path / "g.zarr")

    def test_columns_of_var(self, copy: Path) -> None:
        """Frequencies are what calls are standardized by. Zeros alone are written too, or they could not be missed."""
        file = copy / "var/missing_rate/c/0"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        store = dl.open_genotypes(copy)
        with pytest.raises(ValueError, match=r"var of .* is damaged: shard var/missing_rate/c/0"):
            store.var()
        calls = random_calls((5, 30)).clip(0)
        write(calls, copy.parent / "whole.zarr")
        assert (dl.open_genotypes(copy.parent / "whole.zarr").var()["missing_rate"] == 0).all()
        (copy.parent / "whole.zarr/var/missing_rate/c/0").unlink()
        with pytest.raises(ValueError, match=r"var/missing_rate of var of .* is not whole"):
            dl.open_genotypes(copy.parent / "whole.zarr").var()

    def test_what_describes_arrays(self, copy: Path) -> None:
        (copy / "obs/sex/zarr.json").write_text("{")
        with pytest.raises(ValueError, match=r"obs of .*copy.zarr' is damaged: it cannot be read"):
            dl.open_genotypes(copy).obs()

    def test_plain_values(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("donorloader.genotypes._write_rows._SHARD_BYTES", 4 * 500)
        monkeypatch.setattr("donorloader.genotypes._write_rows._CHUNK_BYTES", 2 * 500)
        write(random_calls((9, 500)), tmp_path / "g.zarr", layout="plain")
        file = tmp_path / "g.zarr/X/c/1/0"
        whole = file.read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 12)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            with pytest.raises(ValueError, match=r"X of .*g.zarr' is damaged: shard X/c/1/0 cannot be read"):
                dl.open_genotypes(tmp_path / "g.zarr").read(np.arange(9), slice(0, 500))
        file.unlink()
        with pytest.raises(ValueError, match=r"X of .*g.zarr' is not whole: 1 of its 3 files"):
            dl.open_genotypes(tmp_path / "g.zarr")

    def test_tables_without_checksums(self, copy: Path) -> None:
        """As anndata writes them, which leaves out chunks of zeros."""
        store = dl.open_genotypes(copy)
        var, obs = store.var(), store.obs().assign(sex=0)
        group = zarr.open_group(str(copy))
        ad.io.write_elem(group, "var", var)
        ad.io.write_elem(group, "obs", obs)
        assert not (copy / "obs/sex/c").exists()
        read = dl.open_genotypes(copy)
        np.testing.assert_array_equal(read.read(np.arange(N_DONORS), slice(0, 9)), random_calls()[:, :9])
        pd.testing.assert_frame_equal(read.obs(), obs)

    def test_swapped_array(self, copy: Path) -> None:
        """Written again without what says how it is packed, as anndata does."""
        ad.read_zarr(copy)[:, :50].copy().write_zarr(copy.parent / "subset.zarr")
        with pytest.raises(ValueError, match=r"not what its name says"):
            dl.open_genotypes(copy.parent / "subset.zarr")

    @pytest.mark.parametrize(
        ("field", "value", "says"),
        [
            ("version", 2, r"has version 2 .*reads version 1"),
            ("version", None, r"has version None"),
            ("n_variants", 4000, r"holds 4000 variants .*var has 4,003"),
            ("format", "other", r"not what its name says"),
        ],
    )
    def test_another_version(self, copy: Path, field: str, value: Any, says: str) -> None:
        file = copy / "obsm/genotypes_2bit/zarr.json"
        meta = json.loads(file.read_text())
        meta["attributes"][field] = value
        file.write_text(json.dumps(meta))
        with pytest.raises(ValueError, match=says):
            dl.open_genotypes(copy)
