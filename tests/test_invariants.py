"""Joined right, in an order that is a pure function of seed and epoch, each cell once: over all settings."""

from __future__ import annotations

import math
import random
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from annbatch.samplers import RandomSampler
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import sparse

import donorloader as dl
from _data import (
    CELL_TYPES,
    N_GENES,
    N_VARIANTS,
    as_numpy,
    donor_ids,
    genotype_adata,
    make_cells,
    open_collection,
    x_values,
)
from _join import check_batch, flat, orders
from _samplers import KINDS, ONCE, expected_length, make_sampler

if TYPE_CHECKING:
    from _data import Cells, Genotypes, Store

pytestmark = pytest.mark.timeout(600)  # hypothesis runs many loaders in one test

QUERIES = {None: None, "row < 80": "row < 80", "types": "cell_type in ['T', 'NK']", "sparse": "row % 7 == 2"}
VARIANTS: dict[str, Any] = {
    "all": None,
    "slice": slice(3, 15),
    "steps": slice(1, 20, 4),
    "positions": [17, 2, 5],
    "names": ["rs4", "rs23", "rs0"],
    "mask": np.arange(N_VARIANTS) % 3 == 1,
    "one": [7],
}
#: What each choice of `VARIANTS` is in numpy.
COLUMNS: dict[str, Any] = {
    **VARIANTS,
    "all": slice(None),
    "names": [4, 23, 0],
}
BACKINGS = ("memory", "h5ad", "backed", "zarr", "collection")
DTYPES = ("int8", "uint8", "float16", "float32", "float64")


@dataclass(frozen=True)
class Setting:
    """One way to run a loader."""

    n_datasets: int = 3
    layout: str = "csr"
    cells_as: str = "path"
    kind: str | None = None  # a batch sampler; None: the loader's own
    shuffle: bool = True
    chunk_size: int = 16
    preload_nchunks: int = 2
    batch_size: int = 8
    chosen: bool = False  # leave the sizes to the loader
    drop_last: bool = False
    seed: int = 0
    query: str | None = None
    donors: tuple[str, ...] | None = None
    prefetch: int | None = 0
    donor_rows: str = "batch"
    to: str = "torch"
    densify: bool = False
    dtype: str = "int8"
    csr: bool = False
    backing: str = "memory"
    variants: str = "all"
    obs_columns: tuple[str, ...] = ()
    genotype_memory: Any = "1GB"

    def selected(self, cells: Cells) -> np.ndarray:
        return cells.rows(QUERIES[self.query], self.donors)

    def sizes(self) -> dict[str, Any]:
        out: dict[str, Any] = {"batch_size": self.batch_size}
        if not self.chosen:
            out |= {"chunk_size": self.chunk_size, "preload_nchunks": self.preload_nchunks}
        return out

    def open(self, store: Store, **changes: Any) -> dl.DonorLoader:
        cells, genotypes = store.cells(self.n_datasets, self.layout), self.genotypes(store)
        if self.kind is None and self.drop_last:  # or no batch is left, which is refused
            assume(len(self.selected(cells)) >= self.batch_size)
        options: dict[str, Any] = {
            "seed": self.seed,
            "obs_columns": self.obs_columns,
            "variants": VARIANTS[self.variants],
            "donors": self.donors,
            "cells_query": QUERIES[self.query],
            "donor_rows": self.donor_rows,
            "to": self.to,
            "densify": self.densify,
            "prefetch": self.prefetch,
            "genotype_memory": self.genotype_memory,
        }
        if self.kind is None:
            options |= self.sizes() | {"shuffle": self.shuffle, "drop_last": self.drop_last}
        else:
            options["batch_sampler"] = make_sampler(
                self.kind,
                cells,
                chunk_size=self.chunk_size,
                preload_nchunks=self.preload_nchunks,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                seed=5,
                rows=self.selected(cells),
            )
        return dl.DonorLoader(self.cells(cells), genotypes.source, **(options | changes))

    def cells(self, cells: Cells) -> Any:
        match self.cells_as:
            case "path":
                return cells.path
            case "collection":
                return open_collection(cells.path)
            case "adatas":
                return list(cells.adatas)
        raise ValueError(self.cells_as)

    def genotypes(self, store: Store) -> Genotypes:
        return store.genotypes(self.dtype, csr=self.csr, backing=self.backing)

    def check(self, batches: list[dict[str, Any]], store: Store) -> None:
        for batch in batches:
            check_batch(
                batch,
                store.cells(self.n_datasets, self.layout),
                self.genotypes(store),
                columns=COLUMNS[self.variants],
                to=self.to,
                densify=self.densify,
                layout=self.layout,
                donor_rows=self.donor_rows,
                obs_columns=self.obs_columns,
            )

    def check_coverage(self, rows: np.ndarray, n_batches: int, store: Store) -> None:
        """Each selected cell once, or as many as the sampler says; and as many batches."""
        selected = self.selected(store.cells(self.n_datasets, self.layout))
        kind = self.kind or "own"
        assert n_batches == expected_length(kind, len(selected), self.batch_size, drop_last=self.drop_last)
        assert np.isin(rows, selected).all()
        if kind == "own" or kind in ONCE:
            assert len(np.unique(rows)) == len(rows)
            dropped = len(selected) - len(rows)
            assert 0 <= dropped < self.batch_size if self.drop_last else dropped == 0


@st.composite
def the_settings(draw: st.DrawFn, kinds: tuple[str | None, ...] = (None, *KINDS)) -> Setting:
    """Any valid setting; sizes meet annbatch's rule that a window holds whole batches.

    Hypothesis draws a number, and all choices follow from it: its own choices resemble one another, and the few
    settings that a run has time for should not.
    """
    dice = random.Random(draw(st.integers(0, 2**64)))
    kind = dice.choice(kinds)
    class_kind = kind in ("class", "weighted")
    query = dice.choice([None, None, *QUERIES])
    donors = None if dice.random() < 0.6 else tuple(dice.sample([f"d{i}" for i in (1, 4, 11, 3, 9, 2)], 4))
    if class_kind:  # a class needs runs as long as a chunk
        query, donors = dice.choice([None, "row < 80"]), None
    chunk_size = dice.randint(1, 20 if class_kind or dice.random() < 0.6 else 64)
    if kind == "random_replacement" and (query or donors):  # annbatch: a chunk must not be larger than what is left
        chunk_size = 1
    if dice.random() < 0.3:
        batch_size = dice.randint(1, 64)  # the window is then often all cells
    else:
        batch_size = dice.choice([b for b in (1, chunk_size // 2, chunk_size, 2 * chunk_size, 3 * chunk_size) if b])
    dtype = dice.choice(DTYPES)
    return Setting(
        n_datasets=dice.choice([1, 3, 4]),
        layout=dice.choice(["csr", "csr", "dense"]),
        cells_as=dice.choice(["adatas", "adatas", "adatas", "path", "collection"]),  # opening zarr takes longest
        kind=kind,
        shuffle=dice.random() < 0.7,
        chunk_size=chunk_size,
        preload_nchunks=batch_size // math.gcd(batch_size, chunk_size) * dice.randint(1, 3),
        batch_size=batch_size,
        chosen=dice.random() < 0.2,
        drop_last=dice.random() < 0.4,
        seed=dice.randrange(2**40),
        query=query,
        donors=donors,
        prefetch=dice.choice([0, 1, 8, None]),
        donor_rows=dice.choice(["batch", "window"]),
        to=dice.choice(["torch", "numpy"]),
        densify=dice.random() < 0.4,
        dtype=dtype,
        csr=dice.random() < 0.4 and dtype != "float16",  # scipy has no sparse float16
        backing=dice.choice(BACKINGS),
        variants=dice.choice(list(VARIANTS)),
        obs_columns=dice.choice([(), ("cell_type",), ("row", "donor_id")]),
        genotype_memory=dice.choice(["1GB", 0]),
    )


class TestJoinedRight:
    """Invariants 1 and 3."""

    @given(setting=the_settings())
    @settings(max_examples=50)
    def test_every_batch_is_the_naive_join(self, store: Store, setting: Setting) -> None:
        with setting.open(store) as loader:
            for _epoch in range(2):
                kept = list(loader)  # all kept before any is looked at: a buffer used again would show
                setting.check(kept, store)
                setting.check_coverage(flat(kept), len(kept), store)
                assert len(loader) == len(kept)

    @pytest.mark.slow
    @pytest.mark.timeout(3600)
    @settings(max_examples=1000, derandomize=False)
    @given(setting=the_settings())
    def test_every_batch_is_the_naive_join_deep(self, store: Store, setting: Setting) -> None:
        with setting.open(store) as loader:
            kept = list(loader)
            setting.check(kept, store)
            setting.check_coverage(flat(kept), len(kept), store)

    @pytest.mark.parametrize("kind", [None, *KINDS])
    @pytest.mark.parametrize("donor_rows", ["batch", "window"])
    def test_each_sampler(self, store: Store, kind: str | None, donor_rows: str) -> None:
        setting = Setting(
            n_datasets=4,
            kind=kind,
            donor_rows=donor_rows,
            prefetch=2,
            chunk_size=6,
            preload_nchunks=4,
            cells_as="collection",
        )
        with setting.open(store) as loader:
            kept = list(loader)
        setting.check(kept, store)
        setting.check_coverage(flat(kept), len(kept), store)

    @pytest.mark.parametrize("backing", BACKINGS)
    @pytest.mark.parametrize("csr", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_each_kind_of_genotypes(self, store: Store, backing: str, csr: bool, dtype: str) -> None:
        if csr and dtype == "float16":
            pytest.skip("scipy has no sparse float16")
        for memory, variants, donor_rows in (("1GB", "all", "batch"), (0, "names", "window"), (0, "slice", "batch")):
            setting = Setting(
                cells_as="adatas",
                backing=backing,
                csr=csr,
                dtype=dtype,
                variants=variants,
                genotype_memory=memory,
                prefetch=1,
                batch_size=32,
                donor_rows=donor_rows,
            )
            with setting.open(store) as loader:
                setting.check(list(loader), store)

    @pytest.mark.parametrize("donor_rows", ["batch", "window"])
    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize("memory", ["1GB", 0])
    @pytest.mark.parametrize("to", ["torch", "numpy"])
    def test_batches_of_a_megabyte_can_be_kept(self, donor_rows: str, prefetch: int, memory: Any, to: str) -> None:
        """Large buffers are used again, but never while a batch or a view of it refers to them."""
        n_cells, n_genes, n_variants = 1200, 400, 60_000
        x = x_values(n_cells)[:, np.arange(n_genes) % N_GENES] + np.arange(n_genes, dtype=np.float32)
        ids = [f"d{i}" for i in range(7)]
        donors = np.array(ids, dtype=object)[np.random.default_rng(0).integers(0, 7, n_cells)]
        cells = ad.AnnData(
            X=sparse.csr_matrix(x), obs=pd.DataFrame({"donor_id": donors}, index=[f"c{i}" for i in range(n_cells)])
        )
        values = (np.arange(7)[:, None] * 11 + np.arange(n_variants) % 10).astype(np.int8)
        genotypes = ad.AnnData(X=values, obs=pd.DataFrame(index=ids))
        options: dict[str, Any] = {"batch_size": 200, "chunk_size": 50, "preload_nchunks": 8, "densify": True}
        with dl.DonorLoader(
            cells,
            genotypes[::-1].copy(),
            to=to,
            donor_rows=donor_rows,
            prefetch=prefetch,
            genotype_memory=memory,
            **options,
        ) as loader:
            whole, views = [], []
            for _epoch in range(3):
                for k, batch in enumerate(loader):
                    index, row = as_numpy(batch["index"]), [ids.index(d) for d in batch["unique_donors"]]
                    if k % 3 == 0:
                        whole.append((index, batch["X"], row, batch["donor_features"]))
                    elif k % 3 == 1:
                        views.append((index, batch["X"].T[3], row, batch["donor_features"][:, 59_000:]))
                    del batch  # or let go of, so that its memory is free for others
        for index, got, row, features in whole:
            np.testing.assert_array_equal(as_numpy(got), x[index])
            np.testing.assert_array_equal(as_numpy(features), values[row])
        for index, column, row, part in views:
            np.testing.assert_array_equal(as_numpy(column), x[index, 3])
            np.testing.assert_array_equal(as_numpy(part), values[row][:, 59_000:])

    def test_a_window_shares_one_table(self, store: Store) -> None:
        setting = Setting(
            donor_rows="window", shuffle=False, chunk_size=10, preload_nchunks=3, batch_size=5, to="numpy"
        )
        cells = store.cells(3)
        with setting.open(store) as loader:
            kept = list(loader)
        setting.check(kept, store)
        for start in range(0, cells.n_obs, 30):
            window = [b for b in kept if start <= b["index"][0] < start + 30]
            assert len({id(b["donor_features"]) for b in window}) == 1 or all(
                np.shares_memory(window[0]["donor_features"], b["donor_features"]) for b in window
            )
            for batch in window:
                assert set(batch["unique_donors"]) == set(cells.donor[start : start + 30])

    def test_without_genotypes(self, store: Store) -> None:
        cells = store.cells(3)
        for prefetch in (0, 3):
            with dl.DonorLoader(cells.path, batch_size=16, prefetch=prefetch, obs_columns=["row"]) as loader:
                kept = list(loader)
            for batch in kept:
                check_batch(batch, cells, None, obs_columns=["row"])
            assert sorted(flat(kept)) == list(range(cells.n_obs))

    def test_in_memory_cells(self, store: Store) -> None:
        cells, genotypes = store.cells(1), store.genotypes()
        with dl.DonorLoader(cells.adatas[0], genotypes.source, batch_size=16) as loader:
            kept = list(loader)
        for batch in kept:
            check_batch(batch, cells, genotypes)
        assert sorted(flat(kept)) == list(range(cells.n_obs))

    def test_one_anndata_zarr(self, store: Store, tmp_path: Any) -> None:
        cells, genotypes = store.cells(1), store.genotypes()
        cells.adatas[0].write_zarr(tmp_path / "cells.zarr")
        with dl.DonorLoader(tmp_path / "cells.zarr", genotypes.source, batch_size=16) as loader:
            kept = list(loader)
        for batch in kept:
            check_batch(batch, cells, genotypes)
        assert sorted(flat(kept)) == list(range(cells.n_obs))

    @pytest.mark.parametrize("missing", ["error", "drop", "nan"])
    @pytest.mark.parametrize("prefetch", [0, 2])
    @pytest.mark.parametrize("donor_rows", ["batch", "window"])
    def test_missing_donors(self, store: Store, missing: str, prefetch: int, donor_rows: str) -> None:
        cells, genotypes = store.cells(4), store.genotypes("int8")
        absent = {"d3", "d10"}
        keep = np.array([i not in absent for i in genotypes.ids])
        fewer = replace(
            genotypes, source=genotypes.source[keep].copy(), ids=genotypes.ids[keep], values=genotypes.values[keep]
        )

        def loader() -> dl.DonorLoader:
            return dl.DonorLoader(
                cells.path,
                fewer.source,
                batch_size=16,
                missing_donors=missing,
                prefetch=prefetch,
                donor_rows=donor_rows,
            )

        if missing == "error":
            with pytest.raises(ValueError, match=r"d10.*d3|d3.*d10"):
                loader()
            return
        with loader() as opened:
            kept = list(opened)
            n_obs = opened.n_obs
        for batch in kept:
            check_batch(batch, cells, fewer, missing=missing, donor_rows=donor_rows)
        rows = np.arange(cells.n_obs)
        expected = rows if missing == "nan" else rows[~np.isin(cells.donor, list(absent))]
        assert sorted(flat(kept)) == list(expected)
        assert n_obs == len(expected)
        if missing == "nan":
            nan = np.concatenate([as_numpy(b["donor_features"])[as_numpy(b["donor_idx"]), 0] for b in kept])
            assert np.isnan(nan).sum() == np.isin(cells.donor, list(absent)).sum() > 0

    @pytest.mark.parametrize("as_type", ["int", "str", "category"])
    def test_ints_and_strings_are_the_same_donor(self, tmp_path: Any, as_type: str) -> None:
        numbers = np.arange(101, 114)
        ids = numbers if as_type == "int" else numbers.astype(str).astype(object)
        cells = make_cells(tmp_path / "cells.zarr", (30, 41), ids=ids, categorical=as_type == "category")
        adata, text, values = genotype_adata(numbers.astype(str))
        with dl.DonorLoader(cells.path, adata, batch_size=9) as loader:
            kept = list(loader)
            assert list(loader.donors) == sorted(set(cells.donor))
        for batch in kept:
            donors = batch["unique_donors"]
            np.testing.assert_array_equal(donors[as_numpy(batch["donor_idx"])], cells.donor[as_numpy(batch["index"])])
            rows = [list(text).index(d) for d in donors]
            np.testing.assert_array_equal(as_numpy(batch["donor_features"]), values[rows])
        assert sorted(flat(kept)) == list(range(71))


class TestOrderIsAPureFunction:
    """Invariant 2."""

    @given(
        setting=the_settings(),
        breaks=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        other_prefetch=st.sampled_from([0, 1, 8]),
        salt=st.integers(0, 2**32 - 1),
    )
    @settings(max_examples=20)
    def test_not_of_what_happened_before(
        self, store: Store, setting: Setting, breaks: list[int], other_prefetch: int, salt: int
    ) -> None:
        expected = []
        with setting.open(store, prefetch=0) as fresh:
            for epoch in reversed(range(len(breaks) + 1)):
                fresh.set_epoch(epoch)
                expected.insert(0, orders(fresh))

        with setting.open(store, prefetch=other_prefetch) as loader:
            for epoch, stop in enumerate(breaks):
                np.random.seed(salt)  # noqa: NPY002
                torch.manual_seed(salt)
                random.seed(salt)
                got = []
                for k, batch in enumerate(loader):
                    assert loader.epoch == epoch
                    np.random.random(3)  # noqa: NPY002
                    got.append(as_numpy(batch["index"]).tolist())
                    if k == stop:
                        break
                assert got == expected[epoch][: len(got)]
            assert orders(loader) == expected[-1]

    @pytest.mark.parametrize("kind", [None, *KINDS])
    @pytest.mark.parametrize("prefetch", [0, 3])
    def test_broken_off_at_any_batch(self, store: Store, kind: str | None, prefetch: int) -> None:
        setting = Setting(n_datasets=3, kind=kind, chunk_size=10, preload_nchunks=4, batch_size=20, prefetch=prefetch)
        with setting.open(store) as loader:
            expected = []
            for epoch in range(10):
                loader.set_epoch(epoch)
                expected.append(orders(loader))
        with setting.open(store) as loader:
            for stop in range(len(loader)):
                for k, batch in enumerate(loader):
                    assert as_numpy(batch["index"]).tolist() == expected[stop][k]
                    if k == stop:
                        break
            assert loader.epoch == len(loader) - 1

    @pytest.mark.parametrize("kind", [None, "random", "own_rows", "own_generator", "no_splits_shuffled", "weighted"])
    def test_epochs_and_seeds_differ(self, store: Store, kind: str | None) -> None:
        setting = Setting(kind=kind, chunk_size=4, preload_nchunks=4)
        seen = []
        for seed in (0, 1, 2**63):
            with replace(setting, seed=seed).open(store) as loader:
                seen += [tuple(flat(loader)) for _ in range(3)]
        assert len(set(seen)) == 9

    def test_a_seed_and_epoch_do_not_share_an_order_with_their_sum(self, store: Store) -> None:
        def order(seed: int, epoch: int) -> tuple[int, ...]:
            with Setting(seed=seed, chunk_size=4).open(store) as loader:
                loader.set_epoch(epoch)
                return tuple(flat(loader))

        assert len({order(0, 2), order(1, 1), order(2, 0)}) == 3

    def test_set_epoch_chooses(self, store: Store) -> None:
        setting = Setting(prefetch=1, chunk_size=4)
        with setting.open(store) as loader:
            assert loader.epoch == 0
            passes = [orders(loader) for _ in range(4)]
            assert loader.epoch == 3
            loader.set_epoch(1)
            assert orders(loader) == passes[1]
            assert orders(loader) == passes[2]
            loader.set_epoch(3)
            iterator = iter(loader)
            assert loader.epoch == 3
            assert orders(iterator) == passes[3]

    def test_iter_begins_a_pass_at_once(self, store: Store) -> None:
        setting = Setting(prefetch=1, chunk_size=4)
        with setting.open(store) as loader:
            expected = [orders(loader) for _ in range(3)]
        with setting.open(store) as loader:
            first, second = iter(loader), iter(loader)
            assert loader.epoch == 1
            assert orders(second) == expected[1]
            assert orders(first) == expected[0]
            assert orders(loader) == expected[2]

    @pytest.mark.parametrize("kind", [None, "no_splits_shuffled", "weighted"])
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_global_state_is_left_alone(self, store: Store, kind: str | None, prefetch: int) -> None:
        """Neither drawn from nor set: a user's own draws do not depend on whether a loader ran."""

        def state() -> list[Any]:
            numpy_state = np.random.get_state()[1].tolist()  # noqa: NPY002
            settings = [dict(zarr.config.config), list(warnings.filters)]
            return [numpy_state, random.getstate(), torch.get_rng_state().tolist(), *settings]

        with Setting(kind=kind, prefetch=prefetch).open(store) as loader:
            list(loader)
            before = state()
            list(loader)
            assert state() == before
        before = state()
        with Setting(kind=kind, prefetch=prefetch).open(store):
            pass
        assert state() == before

    def test_sequential_is_the_order_of_the_collection(self, store: Store) -> None:
        for kind in (None, "sequential"):
            setting = Setting(n_datasets=4, kind=kind, shuffle=False)
            with setting.open(store) as loader:
                for _ in range(2):
                    assert list(flat(loader)) == list(range(store.cells(4).n_obs))

    def test_a_sampler_is_left_as_it_was(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        sampler = make_sampler("random", cells, chunk_size=8, preload_nchunks=2, batch_size=16)
        assert sampler.rng is not None
        before = sampler.rng.bit_generator.state
        seen = []
        for _ in range(2):
            with dl.DonorLoader(cells.path, genotypes.source, batch_sampler=sampler) as loader:
                seen.append(orders(loader))
        assert seen[0] == seen[1]
        assert sampler.rng.bit_generator.state == before

    def test_settings_that_do_not_choose_rows_do_not_change_the_order(self, store: Store) -> None:
        base = Setting(batch_size=20, chunk_size=10, preload_nchunks=4, prefetch=0)
        with base.open(store) as loader:
            expected = orders(loader)
        for other in (
            replace(base, donor_rows="window"),
            replace(base, densify=True),
            replace(base, to="numpy"),
            replace(base, prefetch=None),
            replace(base, variants="one", backing="zarr", genotype_memory=0),
            replace(base, obs_columns=("cell_type",)),
            replace(base, cells_as="adatas"),
        ):
            with other.open(store) as loader:
                assert orders(loader) == expected
        cells = store.cells(3)
        sizes = {"batch_size": 20, "chunk_size": 10, "preload_nchunks": 4}
        with dl.DonorLoader(cells.path, **sizes) as loader:
            assert orders(loader) == expected, "without genotypes"


class TestCoveredOnce:
    """Invariant 3, where a filter or `drop_last` leaves few cells."""

    @given(setting=the_settings(kinds=(None, *ONCE)))
    @settings(max_examples=15)
    def test_the_union_of_batches_is_the_selection(self, store: Store, setting: Setting) -> None:
        with setting.open(store) as loader:
            assert loader.n_obs == len(setting.selected(store.cells(setting.n_datasets)))
            rows = [flat(loader) for _ in range(2)]
        for r in rows:
            setting.check_coverage(r, len(loader), store)

    def test_drop_last_with_fewer_cells_than_a_batch(self, store: Store) -> None:
        paths = store.cells(3).path, store.genotypes().source
        chosen = {"cells_query": QUERIES["sparse"], "chunk_size": 1, "preload_nchunks": 64, "drop_last": True}
        n = len(Setting(query="sparse").selected(store.cells(3)))
        with pytest.raises(ValueError, match=rf"would leave none: {n} cells are in use, and a batch has 64"):
            dl.DonorLoader(*paths, batch_size=64, **chosen)
        with dl.DonorLoader(*paths, batch_size=n, **chosen | {"preload_nchunks": n}) as loader:
            assert len(list(loader)) == len(loader) == 1

    @pytest.mark.parametrize("query", [None, "types"])
    def test_a_sampler_with_a_mask(self, store: Store, query: str | None) -> None:
        """The mask counts the cells that the filters leave."""
        cells, setting = store.cells(3), Setting(query=query)
        sampler = RandomSampler(4, 4, 8, mask=slice(20, 70), rng=np.random.default_rng(0))
        with dl.DonorLoader(
            cells.path, store.genotypes().source, batch_sampler=sampler, cells_query=QUERIES[query]
        ) as loader:
            kept = list(loader)
            assert len(loader) == len(kept) == 7
        setting.check(kept, store)
        assert sorted(flat(kept)) == setting.selected(cells)[20:70].tolist()

    def test_a_subset_of_donors(self, store: Store) -> None:
        cells = store.cells(4)
        with Setting(n_datasets=4, donors=("d11", "d2", "d7"), chosen=True).open(store) as loader:
            assert list(loader.donors) == ["d11", "d2", "d7"]
            assert sorted(flat(loader)) == list(np.flatnonzero(np.isin(cells.donor, ["d2", "d7", "d11"])))

    def test_filters_meet(self, store: Store) -> None:
        cells = store.cells(4)
        setting = Setting(n_datasets=4, donors=("d11", "d2", "d7"), query="types")
        expected = [
            row
            for row in range(cells.n_obs)
            if cells.donor[row] in setting.donors and cells.obs["cell_type"].iloc[row] in ("T", "NK")  # type: ignore[operator]
        ]
        with setting.open(store) as loader:
            assert sorted(flat(loader)) == expected
            assert loader.n_obs == len(expected)


class TestSameCategoriesInEveryBatch:
    """Datasets disagree on categories; batches do not."""

    @pytest.mark.parametrize("cells_as", ["path", "adatas"])
    @pytest.mark.parametrize("query", [None, "types", "row < 80"])
    def test_categories(self, store: Store, cells_as: str, query: str | None) -> None:
        setting = Setting(
            n_datasets=4,
            cells_as=cells_as,
            query=query,
            obs_columns=("cell_type", "donor_id"),
            batch_size=7,
            chosen=True,
        )
        with setting.open(store) as loader:
            kept = list(loader)
        setting.check(kept, store)
        for column, whole in (("cell_type", set(CELL_TYPES)), ("donor_id", set(donor_ids()))):
            categories = [tuple(b["obs"][column].cat.categories) for b in kept]
            assert len(set(categories)) == 1
            assert set(categories[0]) == whole


def test_golden_order(store: Store) -> None:
    """The order of one setting, written down: a change of it breaks everybody's saved runs."""
    setting = Setting(n_datasets=3, seed=7, chunk_size=4, preload_nchunks=4, batch_size=8)
    with setting.open(store) as loader:
        loader.set_epoch(2)
        rows = flat(loader)
    assert sorted(rows) == list(range(store.cells(3).n_obs))
    assert rows[:24].tolist() == GOLDEN


GOLDEN = [20, 22, 136, 21, 130, 138, 139, 128, 46, 131, 47, 23, 44, 45, 137, 129, 90, 76, 106, 104, 66, 65, 105, 91]
