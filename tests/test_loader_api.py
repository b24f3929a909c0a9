"""The loader's members and options, one by one."""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.samplers import RandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import donorloader as dl
from _data import N_VARIANTS, as_numpy, open_collection, write_collection
from _join import check_batch, flat, orders
from _samplers import make_sampler

if TYPE_CHECKING:
    from _data import Store


@pytest.fixture
def loader(store: Store) -> Any:
    with dl.DonorLoader(store.cells(3).path, store.genotypes().source, batch_size=16) as opened:
        yield opened


class TestMembers:
    @pytest.mark.parametrize("drop_last", [False, True])
    @pytest.mark.parametrize("batch_size", [1, 16, 60, 181])
    def test_len_is_the_number_of_batches(self, store: Store, batch_size: int, drop_last: bool) -> None:
        with dl.DonorLoader(
            store.cells(3).path, store.genotypes().source, batch_size=batch_size, drop_last=drop_last, prefetch=0
        ) as loader:
            expected = 181 // batch_size if drop_last else -(-181 // batch_size)
            assert len(loader) == expected == sum(1 for _ in loader)

    def test_a_pass_of_no_batch_is_refused(self, store: Store) -> None:
        """Else training would end at once, and say nothing."""
        paths = store.cells(3).path, store.genotypes().source
        with pytest.raises(ValueError, match=r"would leave none: 181 cells are in use, .* 182\. Use drop_"):
            dl.DonorLoader(*paths, batch_size=182, drop_last=True)
        with pytest.raises(ValueError, match=r"none on each of 2 ranks \(.*\): 181 cells .* has 91"):
            dl.DonorLoader(*paths, batch_size=91, drop_last=True, rank=0, world_size=2)
        with dl.DonorLoader(*paths, batch_size=90, drop_last=True, rank=0, world_size=2, prefetch=0) as loader:
            assert len(loader) == sum(1 for _ in loader) == 1
        with dl.DonorLoader(*paths, batch_size=500, prefetch=0) as loader:
            assert len(loader) == sum(1 for _ in loader) == 1

    def test_is_a_torch_dataset(self, loader: dl.DonorLoader) -> None:
        assert isinstance(loader, torch.utils.data.IterableDataset)

    def test_names(self, store: Store, loader: dl.DonorLoader) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        assert loader.n_obs == cells.n_obs
        assert list(loader.var_names) == [f"gene{g}" for g in range(cells.x.shape[1])]
        assert list(loader.variant_names) == list(genotypes.variants)
        assert list(loader.donors) == sorted(set(cells.donor))

    @pytest.mark.parametrize(
        ("variants", "expected"),
        [
            (["rs20", "rs1"], ["rs20", "rs1"]),
            ([3, 0], ["rs3", "rs0"]),
            (slice(4, 9, 2), ["rs4", "rs6", "rs8"]),
            (slice(-2, None), ["rs22", "rs23"]),
            (np.arange(N_VARIANTS) == 5, ["rs5"]),
            ([-1], ["rs23"]),
        ],
    )
    @pytest.mark.parametrize("backing", ["memory", "h5ad", "zarr", "collection"])
    def test_variant_names_follow_the_choice(
        self, store: Store, variants: Any, expected: list[str], backing: str
    ) -> None:
        genotypes = store.genotypes("float32", backing=backing)
        with dl.DonorLoader(store.cells(1).path, genotypes.source, batch_size=64, variants=variants) as loader:
            assert list(loader.variant_names) == expected
            batch = next(iter(loader))
        columns = [int(name[2:]) for name in expected]
        np.testing.assert_array_equal(
            as_numpy(batch["donor_features"]), genotypes.rows(batch["unique_donors"], columns)
        )

    @pytest.mark.parametrize("backing", ["memory", "h5ad", "zarr", "collection"])
    @pytest.mark.parametrize("csr", [False, True])
    @pytest.mark.parametrize("memory", ["1GB", 0])
    def test_more_choices_of_variants(self, store: Store, backing: str, csr: bool, memory: Any) -> None:
        genotypes = store.genotypes("float32", csr=csr, backing=backing)
        for variants, columns in (
            ([5, 5, 2], [5, 5, 2]),
            (slice(10, 2, -2), [10, 8, 6, 4]),
            ([True, False] * 12, list(range(0, 24, 2))),
            (np.array(["rs3", "rs1"]), [3, 1]),
            (range(3, 6), [3, 4, 5]),
        ):
            with dl.DonorLoader(
                store.cells(1).adatas[0],
                genotypes.source,
                batch_size=157,
                variants=variants,
                genotype_memory=memory,
                prefetch=0,
            ) as loader:
                assert list(loader.variant_names) == [f"rs{v}" for v in columns]
                [batch] = loader
            np.testing.assert_array_equal(
                as_numpy(batch["donor_features"]), genotypes.rows(batch["unique_donors"], columns)
            )

    @pytest.mark.parametrize("kind", [list, set, np.array, pd.Index, iter])
    def test_donors_in_any_container(self, store: Store, kind: Any) -> None:
        with dl.DonorLoader(store.cells(3).path, store.genotypes().source, donors=kind(["d7", "d11"])) as loader:
            assert list(loader.donors) == ["d11", "d7"]

    def test_close_and_context(self, store: Store) -> None:
        loader = dl.DonorLoader(store.cells(3).path, store.genotypes().source, batch_size=16)
        with loader as entered:
            assert entered is loader
            iterator = iter(loader)
            next(iterator)
        loader.close()
        loader.close()
        with pytest.raises((RuntimeError, ValueError), match=r"clos"):
            next(iter(loader))

    def test_timings(self, loader: dl.DonorLoader) -> None:
        list(loader)
        timings = loader.timings()
        assert {"cells", "genotypes"} <= set(timings.index)
        assert (timings >= 0).all(axis=None)
        assert timings.loc["cells", "work"] > 0

    def test_a_study_brings_its_genotypes(self, store: Store, tmp_path: Any) -> None:
        cells, genotypes = store.cells(1), store.genotypes("float32")
        cells.adatas[0].write_h5ad(tmp_path / "cells.h5ad")
        study = dl.prepare(cells=[tmp_path / "cells.h5ad"], genotypes=genotypes.source, out=tmp_path / "study")
        for source in (study, tmp_path / "study", str(tmp_path / "study"), dl.open_study(tmp_path / "study")):
            with dl.DonorLoader(source, batch_size=40, obs_columns=["row"]) as loader:
                kept = list(loader)
            assert sorted(flat(kept)) == list(range(cells.n_obs))
            for batch in kept:
                row = batch["obs"]["row"].to_numpy()  # prepare shuffles, so the row is another
                np.testing.assert_array_equal(as_numpy(batch["X"]), cells.x[row])
                donors, position = batch["unique_donors"], as_numpy(batch["donor_idx"])
                np.testing.assert_array_equal(donors[position], cells.donor[row])
                np.testing.assert_array_equal(as_numpy(batch["donor_features"]), genotypes.rows(donors))
        with dl.DonorLoader(study, store.genotypes("int8").source, batch_size=40) as loader:
            batch = next(iter(loader))
            assert as_numpy(batch["donor_features"]).dtype == np.int8, "other genotypes may be given"

    def test_repr_is_short(self, loader: dl.DonorLoader) -> None:
        assert len(repr(loader)) < 2000

    def test_genotype_layer(self, store: Store) -> None:
        genotypes = store.genotypes("float32")
        adata = genotypes.source.copy()
        adata.layers["dosage"] = genotypes.values + 0.5
        with dl.DonorLoader(store.cells(1).path, adata, batch_size=64, genotype_layer="dosage") as loader:
            batch = next(iter(loader))
        np.testing.assert_array_equal(as_numpy(batch["donor_features"]), genotypes.rows(batch["unique_donors"]) + 0.5)


class TestSources:
    """What may stand for cells and genotypes."""

    def test_paths(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes(backing="zarr")
        for make in (str, lambda p: f"{p}/", lambda p: p):
            with dl.DonorLoader(make(cells.path), make(genotypes.source), batch_size=64) as loader:
                for batch in loader:
                    check_batch(batch, cells, genotypes)

    def test_something_like_a_donor_data(self, store: Store) -> None:
        cells, genotypes = store.cells(1), store.genotypes("float32")
        adata = cells.adatas[0].copy()
        adata.obs = adata.obs.rename(columns={"donor_id": "patient"})
        donor_data = SimpleNamespace(G=genotypes.source, C=adata, donor_id="patient")
        with dl.DonorLoader(donor_data, batch_size=64) as loader:
            kept = list(loader)
        for batch in kept:
            check_batch(batch, cells, genotypes)
        assert sorted(flat(kept)) == list(range(cells.n_obs))

    @pytest.mark.parametrize("dtype", ["int32", "int64", "float64", "uint8"])
    @pytest.mark.parametrize("layout", ["csr", "dense"])
    def test_types_of_x(self, store: Store, dtype: str, layout: str) -> None:
        adata = store.cells(1, layout).adatas[0].copy()
        values = (store.cells(1).x % 200).astype(dtype)
        adata.X = sparse.csr_matrix(values) if layout == "csr" else values
        for densify in (False, True):
            for to in ("torch", "numpy"):
                with dl.DonorLoader(adata, None, batch_size=50, densify=densify, to=to) as loader:
                    for batch in loader:
                        got = as_numpy(batch["X"])
                        assert got.dtype == (np.float32 if densify else np.dtype(dtype))
                        np.testing.assert_array_equal(got, values[as_numpy(batch["index"])])

    def test_datasets_of_several_types(self, store: Store) -> None:
        """annbatch's own concatenation of these can overflow: right, or refused before any batch."""
        cells = store.cells(3)
        adatas = [a.copy() for a in cells.adatas]
        adatas[1].X = adatas[1].X.astype(np.float64)
        try:
            loader = dl.DonorLoader(adatas, store.genotypes().source, batch_size=60)
        except (ValueError, TypeError) as error:
            assert "float64" in str(error)  # noqa: PT017 - either is fine
            return
        with loader:
            rows = []
            for batch in loader:
                rows += as_numpy(batch["index"]).tolist()
                np.testing.assert_array_equal(as_numpy(batch["X"]), cells.x[as_numpy(batch["index"])])
        assert sorted(rows) == list(range(cells.n_obs))

    def test_what_else_an_anndata_holds_is_left_alone(self, store: Store, tmp_path: Any) -> None:
        adatas = [a.copy() for a in store.cells(3).adatas]
        for adata in adatas:
            adata.obsm["X_pca"] = np.zeros((adata.n_obs, 3))
            adata.layers["counts"] = adata.X.copy()
            adata.raw = adata
        for source in (adatas, write_collection(tmp_path / "cells.zarr", adatas)):
            with dl.DonorLoader(source, store.genotypes().source, batch_size=64) as loader:
                assert sorted(flat(loader)) == list(range(store.cells(3).n_obs))

    def test_cells_without_counts(self, store: Store, tmp_path: Any) -> None:
        cells = store.cells(3)
        empty = cells.adatas[0].copy()
        empty.X = sparse.csr_matrix(empty.shape, dtype=np.float32)
        x = cells.x.copy()
        x[: empty.n_obs] = 0
        adatas = [empty, *cells.adatas[1:]]
        for source in (adatas, write_collection(tmp_path / "cells.zarr", adatas)):
            for densify in (False, True):
                with dl.DonorLoader(
                    source, store.genotypes().source, batch_size=1, chunk_size=1, preload_nchunks=1, densify=densify
                ) as loader:
                    for batch in loader:
                        np.testing.assert_array_equal(as_numpy(batch["X"]), x[as_numpy(batch["index"])])

    def test_datasets_of_two_layouts(self, store: Store) -> None:
        adatas = [store.cells(3).adatas[0], store.cells(3, "dense").adatas[1]]
        with pytest.raises((ValueError, TypeError), match=r"(?i)dense|csr|same type"):
            dl.DonorLoader(adatas, store.genotypes().source)

    def test_a_backed_anndata_stays_open(self, store: Store) -> None:
        genotypes = store.genotypes("uint8", backing="backed")
        for _ in range(2):
            with dl.DonorLoader(store.cells(1).path, genotypes.source, batch_size=64) as loader:
                list(loader)
        np.testing.assert_array_equal(genotypes.source.X[:], genotypes.values)

    @pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
    def test_the_type_of_features_follows_the_policy_not_the_donors(self, store: Store, dtype: str) -> None:
        """Training and validation donors must not differ in type because only some of them lack genotypes."""
        genotypes = store.genotypes(dtype)
        few = genotypes.source[genotypes.ids != "d11"].copy()
        types = set()
        for donors in (["d1", "d11"], ["d1", "d2"]):
            with dl.DonorLoader(
                store.cells(3).path, few, batch_size=64, missing_donors="nan", donors=donors, prefetch=0
            ) as loader:
                types |= {as_numpy(batch["donor_features"]).dtype for batch in loader}
        assert len(types) == 1
        assert types.pop().kind == "f"


class TestStore:
    """`dl.open_genotypes`."""

    @pytest.mark.parametrize("backing", ["memory", "h5ad", "backed", "zarr", "collection"])
    @pytest.mark.parametrize("csr", [False, True])
    def test_rows_in_any_order(self, store: Store, backing: str, csr: bool) -> None:
        genotypes = store.genotypes("int8", csr=csr, backing=backing)
        opened = dl.open_genotypes(genotypes.source)
        assert list(opened.ids) == list(genotypes.ids)
        assert opened.n_variants == N_VARIANTS
        assert opened.dtype == np.int8
        rows = np.array([9, 0, 13, 4, 3])
        for columns in (slice(0, N_VARIANTS), slice(5, 11), np.array([7, 2, 20])):
            got = opened.read(rows, columns)
            assert got.flags.c_contiguous
            np.testing.assert_array_equal(got, genotypes.values[rows][:, columns])
            assert list(opened.names(columns)) == list(genotypes.variants[columns])
        assert opened.read(np.array([], dtype=np.int64), slice(0, 4)).shape == (0, 4)
        assert list(opened.var().index) == list(genotypes.variants)

    def test_one_store_serves_two_loaders(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes("uint8", backing="h5ad")
        opened = dl.open_genotypes(genotypes.source)
        first = dl.DonorLoader(cells.path, opened, batch_size=16)
        second = dl.DonorLoader(cells.path, opened, batch_size=16)
        for a, b in zip(first, second, strict=True):
            check_batch(a, cells, genotypes)
            check_batch(b, cells, genotypes)
        first.close()
        for batch in second:  # what the user opened, the user closes
            check_batch(batch, cells, genotypes)
        second.close()
        opened.close()


class TestSizes:
    """Chunk and window sizes."""

    @given(batch_size=st.integers(1, 5000))
    @settings(max_examples=400)
    def test_chosen_sizes_meet_the_rules(self, batch_size: int) -> None:
        from donorloader.samplers import choose_geometry

        chunk_size, preload_nchunks = choose_geometry(batch_size)
        RandomSampler(chunk_size, preload_nchunks, batch_size)  # annbatch's own check
        assert 16 <= chunk_size <= 256
        # a batch size without small factors needs a window of many batches, or tiny chunks
        assert chunk_size * preload_nchunks <= max(2 * 16_384, 16 * batch_size)

    @given(batch_size=st.integers(1, 5000), chunk_size=st.integers(1, 512))
    def test_the_other_size_is_chosen(self, batch_size: int, chunk_size: int) -> None:
        from donorloader.samplers import choose_geometry

        for given_one in ({"chunk_size": chunk_size}, {"preload_nchunks": chunk_size}):
            RandomSampler(*choose_geometry(batch_size, **given_one), batch_size)

    @given(
        batch_size=st.integers(1, 300),
        chunk_size=st.integers(1, 100),
        preload_nchunks=st.integers(1, 100),
    )
    def test_an_impossible_choice_gets_one_that_works(
        self, store: Store, batch_size: int, chunk_size: int, preload_nchunks: int
    ) -> None:
        asked = {"chunk_size": chunk_size, "preload_nchunks": preload_nchunks}

        def open_it(**sizes: int) -> dl.DonorLoader:
            return dl.DonorLoader(
                store.cells(1).path, store.genotypes().source, batch_size=batch_size, prefetch=0, **sizes
            )

        if (chunk_size * preload_nchunks) % batch_size == 0:
            open_it(**asked).close()
            return
        with pytest.raises(ValueError, match=r"multiple") as caught:
            open_it(**asked)
        message = str(caught.value)
        assert str(batch_size) in message
        proposed = {k: int(v) for k, v in re.findall(r"(chunk_size|preload_nchunks)=(\d+)", message)}
        assert proposed
        with open_it(**(asked | proposed)) as loader:
            assert next(iter(loader))["index"].shape == (min(batch_size, 157),)

    @pytest.mark.parametrize("batch_size", [1, 17, 333, 1024, 4099])
    def test_chosen_sizes_stream(self, store: Store, batch_size: int) -> None:
        cells = store.cells(3)
        with dl.DonorLoader(cells.path, store.genotypes().source, batch_size=batch_size) as loader:
            assert sorted(flat(loader)) == list(range(cells.n_obs))

    def test_a_sampler_leaves_no_room_for_sizes(self, store: Store) -> None:
        cells = store.cells(3)
        sampler = make_sampler("random", cells, chunk_size=8, preload_nchunks=2, batch_size=16)
        for other in ({"batch_size": 8}, {"shuffle": False}, {"drop_last": True}, {"chunk_size": 4}):
            with pytest.raises((ValueError, TypeError), match=next(iter(other))):
                dl.DonorLoader(cells.path, store.genotypes().source, batch_sampler=sampler, **other)


class TestThreads:
    def test_no_prefetch_no_threads(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes("int8", backing="zarr")
        list(dl.DonorLoader(cells.path, genotypes.source, batch_size=16, prefetch=0))  # zarr's own threads start
        before = set(threading.enumerate())
        with dl.DonorLoader(cells.path, genotypes.source, batch_size=16, prefetch=0) as loader:
            for _ in loader:
                assert {t for t in set(threading.enumerate()) - before if not _of_zarr(t)} == set()

    def test_prefetch_has_a_thread_a_lane(self, store: Store) -> None:
        with dl.DonorLoader(store.cells(3).path, store.genotypes().source, batch_size=4, prefetch=1) as loader:
            before = set(threading.enumerate())
            iterator = iter(loader)
            next(iterator)
            names = {t.name for t in set(threading.enumerate()) - before if not _of_zarr(t)}
            assert any("cells" in n for n in names)
            assert any("genotypes" in n for n in names)
            assert all("donorloader" in n for n in names)

    @pytest.mark.parametrize("prefetch", [-1, 1.5, "4"])
    def test_prefetch_is_a_count(self, store: Store, prefetch: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="prefetch"):
            dl.DonorLoader(store.cells(3).path, store.genotypes().source, prefetch=prefetch)


def _of_zarr(thread: threading.Thread) -> bool:
    return thread.name.startswith(("zarr", "asyncio", "ThreadPoolExecutor"))


class TestDataLoader:
    def test_no_workers(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        with dl.DonorLoader(cells.path, genotypes.source, batch_size=16) as loader:
            expected = [orders(loader) for _ in range(2)]
            loader.set_epoch(0)
            wrapped = torch.utils.data.DataLoader(loader, batch_size=None, num_workers=0)
            for epoch in range(2):
                kept = list(wrapped)
                for batch in kept:
                    check_batch(batch, cells, genotypes)
                assert orders(kept) == expected[epoch]
            assert len(wrapped) == len(loader)

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning", "ignore:Got pickle error:UserWarning")
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_workers_are_refused(self, store: Store, method: str) -> None:
        with dl.DonorLoader(store.cells(3).path, store.genotypes().source, batch_size=16) as loader:
            wrapped = torch.utils.data.DataLoader(
                loader, batch_size=None, num_workers=2, timeout=60, multiprocessing_context=method
            )
            with pytest.raises(Exception, match=r"num_workers=0"):
                list(wrapped)


class TestSharedPass:
    def test_threads_take_turns(self, store: Store) -> None:
        """Several threads that take from one iterator get each batch once, between them."""
        with dl.DonorLoader(store.cells(3).path, batch_size=8, chunk_size=4) as loader:
            iterator, seen = iter(loader), []

            def take() -> None:
                seen.extend(as_numpy(batch["index"]) for batch in iterator)

            threads = [threading.Thread(target=take) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert sorted(np.concatenate(seen)) == list(range(loader.n_obs))


class TestTensors:
    @pytest.mark.parametrize("backing", ["memory", "h5ad"])
    def test_a_batch_can_be_written_to(self, store: Store, backing: str) -> None:
        """Training code normalises in place; that must not reach the genotypes of the next batch."""
        cells, genotypes = store.cells(3), store.genotypes("float32", backing=backing)
        options: dict[str, Any]
        for options in (
            {"batch_size": 16},
            {"batch_size": 16, "densify": True},
            {"batch_size": 181},  # all donors in one batch
            {"batch_size": 181, "donor_rows": "window"},
        ):
            with dl.DonorLoader(cells.path, genotypes.source, prefetch=0, **options) as loader:
                for _ in range(2):
                    for batch in loader:
                        check_batch(batch, cells, genotypes, densify=bool(options.get("densify")))
                        batch["donor_features"].mul_(0)
                        batch["donor_idx"].mul_(0)
                        batch["index"].mul_(0)
                        if options.get("densify"):
                            batch["X"].mul_(0)
                        batch["unique_donors"][:] = "?"
            with dl.DonorLoader(cells.path, genotypes.source, batch_size=16) as loader:
                for batch in loader:
                    check_batch(batch, cells, genotypes)

    def test_cells_in_memory_are_not_written_through(self, store: Store) -> None:
        cells = store.cells(1, "dense")
        with dl.DonorLoader(cells.adatas[0], None, batch_size=16) as loader:
            for batch in loader:
                batch["X"].mul_(0)
        np.testing.assert_array_equal(cells.adatas[0].X, cells.x)

    def test_options_keep_the_rank_at_one_cell_a_batch(self, store: Store) -> None:
        for to in ("torch", "numpy"):
            for densify in (False, True):
                with dl.DonorLoader(
                    store.cells(1).path, store.genotypes().source, batch_size=1, to=to, densify=densify, prefetch=0
                ) as loader:
                    batch = next(iter(loader))
                assert batch["X"].shape == (1, 11)
                assert batch["donor_features"].shape == (1, N_VARIANTS)
                assert batch["donor_idx"].shape == batch["index"].shape == (1,)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("to", "tensorflow"),
            ("donor_rows", "cell"),
            ("missing_donors", "ignore"),
            ("batch_size", 0),
            ("batch_size", 16.5),
            ("batch_size", "16"),
            ("chunk_size", 2.5),
            ("preload_nchunks", -1),
            ("seed", "x"),
            ("seed", -1),
            ("genotype_memory", "much"),
        ],
    )
    def test_options_are_checked(self, store: Store, option: str, value: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=option) as caught:
            dl.DonorLoader(store.cells(1).path, store.genotypes().source, **{option: value})
        assert repr(value) in str(caught.value) or str(value) in str(caught.value)

    def test_an_unknown_option_is_refused(self, store: Store) -> None:
        with pytest.raises(TypeError):
            dl.DonorLoader(store.cells(1).path, store.genotypes().source, batchsize=3)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            dl.DonorLoader(store.cells(1).path, store.genotypes().source, "donor_id")  # type: ignore[misc]

    def test_a_collection_object_is_left_open(self, store: Store) -> None:
        cells = store.cells(3)
        collection = open_collection(cells.path)
        for _ in range(2):
            with dl.DonorLoader(collection, store.genotypes().source, batch_size=16) as loader:
                assert sorted(flat(loader)) == list(range(cells.n_obs))
