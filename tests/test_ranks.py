"""Ranks share an epoch: apart, together everything, in equal numbers, and any number of them takes over."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from itertools import chain, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given, settings
from hypothesis import strategies as st

import donorloader as dl
from _data import as_numpy
from _join import check_batch, flat, orders
from donorloader._ranks import find_ranks
from donorloader.samplers import (
    DealSampler,
    ShardBagSampler,
    ShardSampler,
    Share,
    choose_shards,
    delivered_batches,
    replay,
    request_rows,
)

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from _data import Store

pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")

SIZES = {"chunk_size": 4, "preload_nchunks": 8, "batch_size": 8}


def shares(world_size: int, n_shards: int | None = None, uneven: Any = "drop") -> list[Share]:
    return [Share(rank, world_size, n_shards or world_size, uneven) for rank in range(world_size)]


def batches(sampler: Sampler, n_obs: int, *, epoch: int = 0, skip: int = 0) -> list[np.ndarray]:
    requests = replay(sampler, n_obs, seed=3, epoch=epoch, skip=skip)
    return [request_rows(r["requests"])[split] for r in requests for split in r["splits"][delivered_batches(r) :]]


def together(ranks: list[list[np.ndarray]]) -> list[list[int]]:
    """What all ranks deliver, step by step."""
    assert len({len(rank) for rank in ranks}) == 1, "all ranks have as many batches"
    return [sorted(np.concatenate(step).tolist()) for step in zip(*ranks, strict=True)]


class TestCells:
    @given(
        n_obs=st.integers(8, 700),
        world_size=st.integers(1, 5),
        times=st.sampled_from([1, 2, 4]),
        batch_size=st.sampled_from([1, 3, 8]),
        shuffle=st.booleans(),
        uneven=st.sampled_from(["drop", "pad"]),
        drop_last=st.booleans(),
    )
    def test_apart_and_together_all(
        self,
        n_obs: int,
        world_size: int,
        times: int,
        batch_size: int,
        shuffle: bool,
        uneven: Any,
        drop_last: bool,
    ) -> None:
        options = {**SIZES, "batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
        samplers = [ShardSampler(s, **options) for s in shares(world_size, world_size * times, uneven)]
        ranks = [batches(sampler, n_obs, epoch=1) for sampler in samplers]
        assert {len(rank) for rank in ranks} == {samplers[0].n_batches(n_obs)}
        for rank in ranks:
            assert all(len(b) == batch_size for b in rank[:-1])
        rows, counts = np.unique(np.concatenate([[], *(b for rank in ranks for b in rank)]), return_counts=True)
        if drop_last:
            assert n_obs - rows.size < world_size * batch_size
            assert (counts == 1).all()
        elif uneven == "drop":
            assert (counts == 1).all()
            assert n_obs - rows.size == samplers[0]._share.dropped(n_obs, batch_size) < world_size
        else:
            assert rows.size == n_obs
            assert counts.sum() - n_obs < world_size

    @settings(max_examples=12)
    @given(
        n_obs=st.integers(24, 900),
        batch_size=st.sampled_from([2, 5, 8]),
        shards=st.sampled_from([12, 24]),
        epoch=st.integers(0, 2),
    )
    def test_steps_are_the_same_on_any_number_of_ranks(
        self, n_obs: int, batch_size: int, shards: int, epoch: int
    ) -> None:
        """As many cells, in one set of batches or in many small ones, step by step."""

        def steps(world_size: int, size: int) -> list[list[int]]:
            options = {**SIZES, "batch_size": size, "drop_last": True}
            return together(
                [batches(ShardSampler(s, **options), n_obs, epoch=epoch) for s in shares(world_size, shards)]
            )

        one = steps(1, 12 * batch_size)
        for world_size in (2, 3, 4, 6, 12):
            assert steps(world_size, 12 // world_size * batch_size) == one
        # the same batch size: so many steps of one are one of all
        single = steps(1, batch_size)
        for world_size in (2, 3, 4):
            for number, step in enumerate(steps(world_size, batch_size)):
                parts = single[number * world_size : (number + 1) * world_size]
                assert sorted(chain.from_iterable(parts)) == step

    @settings(max_examples=30)
    @given(
        n_obs=st.integers(30, 600),
        before=st.sampled_from([1, 2, 3, 4]),
        after=st.sampled_from([1, 2, 3, 4, 6]),
        batch_size=st.sampled_from([1, 5, 8]),
        share=st.floats(0, 1),
        uneven=st.sampled_from(["drop", "pad"]),
    )
    def test_other_ranks_take_over(
        self, n_obs: int, before: int, after: int, batch_size: int, share: float, uneven: Any
    ) -> None:
        options = {**SIZES, "batch_size": batch_size}
        steps = together([batches(ShardSampler(s, **options), n_obs) for s in shares(before, 12)])
        done = round(share * len(steps))
        delivered = min(n_obs, done * before * batch_size)
        resumed = [ShardSampler(s, **options, resumed=(0, delivered)) for s in shares(after, 12, uneven)]
        rest = [batches(sampler, n_obs) for sampler in resumed]
        together(rest)
        rows, counts = np.unique(np.concatenate([[], *(b for rank in rest for b in rank)]), return_counts=True)
        left = sorted(set(range(n_obs)) - set(chain.from_iterable(steps[:done])))
        assert set(rows) <= set(left)
        assert len(left) - rows.size < after, "but for what equal numbers of batches drop"
        if uneven == "drop":
            assert (counts == 1).all()
        elif len(left) >= after:
            assert rows.tolist() == left
        assert batches(resumed[0], n_obs, epoch=1), "other epochs are whole"
        other = [batches(ShardSampler(s, **options), n_obs, epoch=1) for s in shares(after, 12, uneven)]
        assert [b.tolist() for b in batches(resumed[0], n_obs, epoch=1)] == [b.tolist() for b in other[0]]

    def test_each_rank_reads_its_own_chunks(self) -> None:
        """But for chunks that two shards share in the last window."""
        n_obs, options = 64 * 256, {"chunk_size": 16, "preload_nchunks": 64, "batch_size": 64}
        readers = np.zeros((4, n_obs // 16), dtype=bool)
        for rank, share in enumerate(shares(4, 16)):
            for request in replay(ShardSampler(share, **options), n_obs, seed=0, epoch=0):
                rows = request_rows(request["requests"])
                assert rows.size == 16 * 64, "load requests as large as without ranks"
                readers[rank, np.unique(rows // 16)] = True
        assert (readers.sum(axis=0) == 1).all()

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 16])
    def test_load_requests_stay_in_bounds(self, world_size: int) -> None:
        shards = choose_shards(world_size, 256)
        sampler = ShardSampler(
            Share(0, world_size, shards, "drop"), chunk_size=64, preload_nchunks=256, batch_size=1024
        )
        sizes = [request_rows(r["requests"]).size for r in replay(sampler, 700_001, seed=0, epoch=0)]
        assert max(sizes) <= 2.2 * 16_384
        assert np.mean(sizes[:-1]) > 8000 if len(sizes) > 1 else True
        read = sum(sizes)
        assert read < 1.15 * 700_001 / world_size, "few chunks are read twice"

    def test_batches_are_mixed(self) -> None:
        """A rank's batch has cells of all of its chunks of a window, as without ranks."""
        share = Share(1, 2, 64, "drop")
        sampler = ShardSampler(share, chunk_size=64, preload_nchunks=256, batch_size=1024)
        ordinary = RandomSampler(64, 256, 1024)
        chunks = [np.unique(batches(s, 100_000)[0] // 64).size for s in (sampler, ordinary)]
        assert chunks[0] > 120
        assert chunks[1] > 200

    def test_shares_change_from_epoch_to_epoch(self) -> None:
        sampler = ShardSampler(Share(0, 2, 2, "drop"), **SIZES)
        first, second = (set(np.concatenate(batches(sampler, 400, epoch=e)).tolist()) for e in (0, 1))
        assert 0.3 < len(first & second) / 200 < 0.7

    def test_what_is_dropped_changes_too(self) -> None:
        dropped = set()
        for epoch in range(12):
            ranks = [batches(ShardSampler(s, **SIZES), 8 * 3 * 5 + 2, epoch=epoch) for s in shares(3)]
            dropped |= set(range(122)) - set(np.concatenate([b for r in ranks for b in r]).tolist())
        assert len(dropped) > 12

    def test_fewer_cells_than_ranks(self) -> None:
        with pytest.raises(ValueError, match="Every rank needs a cell, but there are 3 for 4 ranks"):
            list(replay(ShardSampler(shares(4)[0], **SIZES), 3, seed=0, epoch=0))

    def test_shards(self) -> None:
        assert [choose_shards(w, 256) for w in (1, 2, 3, 6, 64, 100)] == [64, 64, 66, 66, 64, 100]
        assert [choose_shards(1, most) for most in (1, 7, 8, 1000)] == [1, 4, 8, 64]
        with pytest.raises(ValueError, match=r"3 does not divide 8\. Run on 1, 2, 4 or 8"):
            choose_shards(3, 256, 8)


class TestBags:
    @settings(max_examples=40)
    @given(
        n_bags=st.integers(5, 60),
        world_size=st.integers(1, 5),
        times=st.sampled_from([1, 2, 4]),
        bags_per_batch=st.integers(1, 4),
        shuffle=st.booleans(),
        uneven=st.sampled_from(["drop", "pad"]),
    )
    def test_apart_and_together_all(
        self, n_bags: int, world_size: int, times: int, bags_per_batch: int, shuffle: bool, uneven: Any
    ) -> None:
        codes = np.concatenate([np.arange(n_bags), np.random.default_rng(0).integers(0, n_bags, 100)])
        options = {"bags_per_batch": bags_per_batch, "max_cells": 5, "window_cells": 17, "shuffle": shuffle}
        samplers = [ShardBagSampler(codes, share=s, **options) for s in shares(world_size, world_size * times, uneven)]
        ranks = [_bags(sampler, codes, epoch=2) for sampler in samplers]
        assert {len(rank) for rank in ranks} == {samplers[0].n_batches(codes.size)}
        bags, counts = np.unique(np.concatenate([b for rank in ranks for b, _ in rank]), return_counts=True)
        assert n_bags - bags.size < (world_size if uneven == "drop" else 1)
        assert counts.sum() - bags.size < (1 if uneven == "drop" else world_size)

    @pytest.mark.parametrize("max_cells", [5, None])  # None: bags that lie side by side are read together
    def test_cells_of_a_bag_are_the_same_on_any_number_of_ranks(self, max_cells: int | None) -> None:
        codes = np.random.default_rng(0).integers(0, 24, 300)
        options = {"bags_per_batch": 2, "max_cells": max_cells}
        drawn = []
        for world_size in (1, 2, 3, 4):
            samplers = [ShardBagSampler(codes, share=s, **options) for s in shares(world_size, 12)]
            drawn.append(
                {int(b): r for s in samplers for bs, rows in _bags(s, codes) for b, r in zip(bs, rows, strict=True)}
            )
        assert all(other == drawn[0] for other in drawn[1:])

    @pytest.mark.parametrize("max_cells", [9, None])
    @pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (3, 2), (4, 3), (1, 6)])
    def test_other_ranks_take_over(self, before: int, after: int, max_cells: int | None) -> None:
        codes = np.random.default_rng(0).integers(0, 53, 700)
        options = {"bags_per_batch": 2, "max_cells": max_cells}
        for done in range(4):
            there = [_bags(ShardBagSampler(codes, share=s, **options), codes)[:done] for s in shares(before, 12)]
            seen = {int(b) for rank in there for bags, _ in rank for b in bags}
            samplers = [
                ShardBagSampler(codes, share=s, resumed=(0, done * before * 2), **options)
                for s in shares(after, 12, "pad")
            ]
            rest = [_bags(sampler, codes) for sampler in samplers]
            assert len({len(rank) for rank in rest}) == 1
            assert {int(b) for rank in rest for bags, _ in rank for b in bags} == set(range(53)) - seen

    def test_cells_are_balanced(self) -> None:
        sizes = np.random.default_rng(1).lognormal(4, 1, 400).astype(int) + 1
        codes = np.repeat(np.arange(400), sizes)
        spread = {}
        for shuffle in (True, False):  # without, bags keep their order, and nothing is balanced
            cells = []
            for share in shares(4, 32):
                sampler = ShardBagSampler(codes, share=share, max_cells=None, bags_per_batch=8, shuffle=shuffle)
                cells.append(sum(len(r) for _, rows in _bags(sampler, codes) for r in rows))
            spread[shuffle] = max(cells) / min(cells)
        assert spread[True] < 1.12
        assert spread[False] > 1.2

    def test_order_is_not_one_of_sizes(self) -> None:
        codes = np.repeat(np.arange(64), np.arange(1, 65))
        sampler = ShardBagSampler(codes, share=Share(0, 1, 64, "drop"), max_cells=None, bags_per_batch=1)
        order = [int(bags[0]) for bags, _ in _bags(sampler, codes)]
        assert abs(np.corrcoef(order, np.arange(64))[0, 1]) < 0.4

    def test_fewer_bags_than_ranks(self) -> None:
        with pytest.raises(ValueError, match="Every rank needs a bag, but there are 3 bags for 4 ranks"):
            ShardBagSampler(np.array([0, 1, 2, 2]), share=shares(4)[1])


def _bags(sampler: ShardBagSampler, codes: np.ndarray, *, epoch: int = 0) -> list[tuple[np.ndarray, list[list[int]]]]:
    """Bags of each batch, and the rows of each bag."""
    out, parts = [], []
    for request in replay(sampler, codes.size, seed=3, epoch=epoch):
        rows = [request_rows(request["requests"])[split] for split in request["splits"]]
        if (whole := request.get("part_of")) is not None:
            parts += rows
            if sum(map(len, parts)) < whole:
                continue
            rows, parts = [np.concatenate(parts)], []
        for bags, offsets, of_batch in zip(request["bags"], request["offsets"], rows, strict=True):
            of_bags = [part.tolist() for part in np.split(of_batch, offsets[1:-1])]
            assert all((codes[part] == bag).all() for bag, part in zip(bags, of_bags, strict=True))
            out.append((bags, of_bags))
    return out


@pytest.mark.parametrize("kind", ["cells", "bags"])
def test_the_last_ones_of_an_epoch_are_padded(kind: str) -> None:
    """However few are left for the ranks that take over, none of them is left out."""
    n, codes = 31, np.repeat(np.arange(31), 2)
    for world_size, begin in product((2, 3, 4), range(n + 1)):
        took: list[list[int]] = []
        for share in shares(world_size, 12, "pad"):
            if kind == "cells":
                sizes = {"chunk_size": 2, "preload_nchunks": 4, "batch_size": 3}
                parts = batches(ShardSampler(share, resumed=(0, begin), **sizes), n)
            else:
                sampler = ShardBagSampler(codes, share=share, resumed=(0, begin), bags_per_batch=3, max_cells=None)
                parts = [bags for bags, _ in _bags(sampler, codes)]
            took.append([int(part) for part in np.concatenate([*parts, np.empty(0, dtype=np.int64)])])
        order = (
            flat_of(ShardSampler(Share(0, 1, 12, "drop"), **(sizes | {"batch_size": 1})), n)
            if kind == "cells"
            else [int(bags[0]) for bags, _ in _bags(_one_by_one(codes), codes)]
        )
        assert set(order[begin:]) <= set(chain(*took)) <= set(order[max(0, begin - world_size) :])
        assert len({-(-len(rank) // 3) for rank in took}) == 1, "as many batches"
        assert len(list(chain(*took))) < n - begin + world_size


def flat_of(sampler: Sampler, n_obs: int) -> list[int]:
    return np.concatenate(batches(sampler, n_obs)).tolist()


def _one_by_one(codes: np.ndarray) -> ShardBagSampler:
    return ShardBagSampler(codes, share=Share(0, 1, 12, "drop"), bags_per_batch=1, max_cells=None)


class TestAnySampler:
    @given(
        n_obs=st.integers(40, 500),
        world_size=st.integers(1, 4),
        shuffle=st.booleans(),
        uneven=st.sampled_from(["drop", "pad"]),
        subset=st.booleans(),
    )
    def test_apart_and_together_all(
        self, n_obs: int, world_size: int, shuffle: bool, uneven: Any, subset: bool
    ) -> None:
        inner: Any = RandomSampler(**SIZES) if shuffle else SequentialSampler(**SIZES)
        chosen = np.arange(n_obs)
        if subset:
            chosen = np.flatnonzero(np.arange(n_obs) % 5 < 4)
            inner = dl.SubsetSampler(inner, chosen)
        samplers = [DealSampler(inner, s) for s in shares(world_size, uneven=uneven)]
        ranks = [batches(sampler, n_obs, epoch=1) for sampler in samplers]
        assert {len(rank) for rank in ranks} == {samplers[0].n_batches(n_obs)}
        rows, counts = np.unique(np.concatenate([b for rank in ranks for b in rank]), return_counts=True)
        assert np.isin(rows, chosen).all()
        if uneven == "drop":
            assert (counts == 1).all()
            assert chosen.size - rows.size <= (world_size - 1) * SIZES["batch_size"]
        else:
            assert rows.tolist() == chosen.tolist()

    def test_fewer_batches_than_ranks(self) -> None:
        with pytest.raises(ValueError, match="Every rank needs a batch, but there are 2 for 3 ranks"):
            DealSampler(RandomSampler(**SIZES), shares(3)[0]).validate(16)


SMALL = {"batch_size": 8, "chunk_size": 4, "preload_nchunks": 8, "prefetch": 0}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher around the tests."""
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


class TestLoader:
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    @pytest.mark.parametrize("query", [None, "cell_type != 'B'"])
    def test_cells_with_their_genotypes(self, store: Store, world_size: int, query: str | None) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        seen = []
        for rank in range(world_size):
            with dl.DonorLoader(
                cells.path, genotypes.source, rank=rank, world_size=world_size, cells_query=query, **SMALL
            ) as loader:
                kept = list(loader)
                assert len(kept) == len(loader)
                for batch in kept:
                    check_batch(batch, cells, genotypes)
                seen.append(flat(kept))
        rows = np.concatenate(seen)
        assert len(set(rows.tolist())) == rows.size
        assert np.isin(rows, cells.rows(query)).all()
        assert cells.rows(query).size - rows.size < world_size

    def test_one_rank_has_the_ordinary_order(self, store: Store, alone: pytest.MonkeyPatch) -> None:
        with dl.DonorLoader(store.cells(3).path, **SMALL) as loader:
            expected = orders(loader)
        for options in ({"rank": 0, "world_size": 1}, {"uneven": "pad"}):
            with dl.DonorLoader(store.cells(3).path, **SMALL, **options) as loader:
                assert orders(loader) == expected
        ordinary = RandomSampler(4, 8, 8, rng=np.random.default_rng(0))
        assert expected == [b.tolist() for b in _rows(replay(ordinary, 181, seed=0, epoch=0))]

    def test_a_validation_loader_beside(self, store: Store) -> None:
        """One may share, the other not, and neither disturbs the other."""
        train = [f"d{i}" for i in range(9)]
        held_out = [f"d{i}" for i in range(9, 13)]
        cells = store.cells(3)
        with (
            dl.DonorLoader(cells.path, donors=train, rank=1, world_size=2, **SMALL) as mine,
            dl.DonorLoader(cells.path, donors=held_out, rank=0, world_size=1, shuffle=False, **SMALL) as whole,
            dl.DonorLoader(cells.path, donors=held_out, rank=1, world_size=2, shuffle=False, **SMALL) as half,
        ):
            both = [orders(mine), orders(whole), orders(half)]
            assert np.isin(np.concatenate(both[0]), cells.rows(donors=train)).all()
            assert sorted(np.concatenate(both[1])) == cells.rows(donors=held_out).tolist()
            assert set(np.concatenate(both[2])) < set(np.concatenate(both[1]))

    @pytest.mark.parametrize("kind", ["cells", "filtered cells", "bags"])
    @pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 4), (4, 3)])
    def test_saved_on_some_ranks_continued_on_others(
        self, store: Store, alone: pytest.MonkeyPatch, kind: str, before: int, after: int
    ) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        shards = 12 if 3 in (before, after) or before == 1 else None

        def make(rank: int, world_size: int, n_shards: int | None = shards) -> Any:
            options = {"rank": rank, "world_size": world_size, "num_canonical_shards": n_shards, "uneven": "pad"}
            if world_size == 1 and before > 1:
                options = {}  # as a user would on one rank; the shards are those of the state
            if kind == "bags":
                return dl.BagLoader(
                    cells.path, genotypes.source, bags_per_batch=1, max_cells=None, prefetch=0, **options
                )
            query = "cell_type != 'T'" if kind == "filtered cells" else None
            return dl.DonorLoader(cells.path, genotypes.source, cells_query=query, **SMALL, **options)

        done = 2 if before > 1 else 3
        states, seen = [], []
        for rank in range(before):
            with make(rank, before) as loader:
                loader.set_epoch(1)
                iterator = iter(loader)
                seen += [as_numpy(next(iterator)["index"]) for _ in range(done)]
                states.append(loader.state_dict())
        assert all(state == states[0] for state in states), "any rank may save it"
        following = []
        rest = []
        for rank in range(after):
            with make(rank, after) as loader:
                loader.load_state_dict(json.loads(json.dumps(states[0])))
                assert loader.epoch == 1
                kept = list(loader)
                if kind != "bags":
                    for batch in kept:
                        check_batch(batch, cells, genotypes, missing="error")
                rest.append(kept)
                following.append(flat(loader))
                assert loader.epoch == 2
        assert len({len(kept) for kept in rest}) == 1
        before_and_after = np.concatenate([*seen, *(flat(kept) for kept in rest)])
        expected = cells.rows("cell_type != 'T'" if kind == "filtered cells" else None)
        assert np.unique(before_and_after).tolist() == expected.tolist(), "nothing is missing"
        if kind != "bags":
            assert before_and_after.size - expected.size < after, "and nothing comes twice, but what is repeated to pad"
        assert np.unique(np.concatenate(following)).tolist() == expected.tolist(), "the next epoch is whole"

    @pytest.mark.parametrize(("before", "after"), [((1, 48), (3, 16)), ((3, 25), (1, 75)), ((2, 300), (4, 150))])
    def test_sizes_of_batches_that_fit_together(
        self, store: Store, before: tuple[int, int], after: tuple[int, int]
    ) -> None:
        """Where sizes of reading are left open, they do not depend on the batch that another number of ranks has."""
        path, states = store.cells(3).path, []
        for world_size, size in (before, after):
            options = {"rank": 0, "world_size": world_size, "num_canonical_shards": 12, "prefetch": 0}
            with dl.DonorLoader(path, batch_size=size, **options) as loader:
                if states:
                    loader.load_state_dict(states[0])
                states.append(loader.state_dict())
        assert states[0] == states[1] | {"world_size": before[0]}

    def test_saved_again_after_it_was_taken_over(self, store: Store) -> None:
        """2 ranks, then 4, which stop at a step that is no whole one of theirs, then 1."""
        path, seen, state = store.cells(3).path, [], None
        for world_size, steps in ((2, 3), (4, 2), (1, 100)):
            states = []
            for rank in range(world_size):
                options = {"rank": rank, "world_size": world_size, "num_canonical_shards": 8}
                with dl.DonorLoader(path, **SMALL, **options) as loader:
                    if state is not None:
                        loader.load_state_dict(state)
                    seen += orders(islice(loader, steps))
                    states.append(loader.state_dict())
            assert all(other == states[0] for other in states)
            state = states[0]
        assert sorted(chain.from_iterable(seen)) == list(range(181))
        assert (state["epoch"], state["position"]) == (1, 0)

    def test_an_epoch_taken_over_is_whole_when_it_is_chosen_again(self, store: Store) -> None:
        options = {"rank": 0, "num_canonical_shards": 8, **SMALL}
        with dl.DonorLoader(store.cells(3).path, world_size=2, **options) as loader:
            next(iter(loader))
            state = loader.state_dict()
        with dl.DonorLoader(store.cells(3).path, world_size=4, **options) as loader:
            whole = orders(loader)
            loader.load_state_dict(state)
            loader.set_epoch(0)
            assert len(orders(loader)) < len(whole) or len(whole) == 6
            loader.set_epoch(0)
            assert orders(loader) == whole

    def test_ranks_that_cannot_take_over(self, store: Store, alone: pytest.MonkeyPatch) -> None:
        path = store.cells(3).path
        with dl.DonorLoader(path, rank=0, world_size=2, num_canonical_shards=8, **SMALL) as loader:
            state = loader.state_dict()
        with (
            dl.DonorLoader(path, rank=0, world_size=3, **SMALL) as three,
            pytest.raises(ValueError, match=r"3 does not divide 8\. Run on 1, 2, 4 or 8\."),
        ):
            three.load_state_dict(state)
        with (
            dl.DonorLoader(path, rank=0, world_size=2, num_canonical_shards=4, **SMALL) as other,
            pytest.raises(ValueError, match="num_canonical_shards is 8 in the state, and 4 here: give 8"),
        ):
            other.load_state_dict(state)
        with (
            dl.DonorLoader(path, **SMALL) as one,
            dl.DonorLoader(path, rank=0, world_size=2, **SMALL) as two,
            pytest.raises(ValueError, match="begin with num_canonical_shards"),
        ):
            two.load_state_dict(one.state_dict())
        dealt = {"batch_sampler": RandomSampler(4, 8, 8), "rank": 0}
        with (
            dl.DonorLoader(path, **dealt, world_size=2) as two,
            dl.DonorLoader(path, **dealt, world_size=3) as three,
            pytest.raises(ValueError, match="was dealt to 2 ranks, and is resumed on as many, not on 3"),
        ):
            three.load_state_dict(two.state_dict())

    def test_fewer_bags_or_cells_than_ranks(self, store: Store) -> None:
        with pytest.raises(ValueError, match=r"there are 13 bags for 14 ranks \(rank and world_size\)"):
            dl.BagLoader(store.cells(3).path, rank=3, world_size=14)
        with pytest.raises(ValueError, match="there are 181 cells for 200 ranks"):
            dl.DonorLoader(store.cells(3).path, rank=3, world_size=200)

    def test_what_equal_counts_drop_is_said(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="donorloader"):
            options = {**SMALL, "batch_size": 15, "preload_nchunks": 15}
            with dl.DonorLoader(store.cells(3).path, rank=1, world_size=4, **options) as loader:
                list(loader), list(loader)
        [line] = [record.message for record in caplog.records]
        assert line == (
            "Rank 1 of 4 (rank and world_size) takes its share of every epoch; "
            "1 of 181 cells are left out of each epoch."
        )

    def test_what_equal_counts_drop_of_a_sampler_is_said(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        told = {}
        for uneven in ("drop", "pad"):
            options = {"batch_sampler": RandomSampler(4, 8, 8), "rank": 0, "world_size": 4, "uneven": uneven}
            with (
                caplog.at_level(logging.INFO, logger="donorloader"),
                dl.DonorLoader(store.cells(3).path, prefetch=0, **options) as loader,
            ):
                told[uneven] = (len(loader), caplog.records[-1].message)
        assert told["drop"][0] == 5, "of 23 batches"
        assert told["drop"][1].endswith("takes its share of every epoch; 3 of 23 batches are left out of each epoch.")
        assert told["pad"] == (6, "Rank 0 of 4 (rank and world_size) takes its share of every epoch.")

    def test_what_a_resumed_epoch_drops_is_said(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        options = {**SMALL, "batch_size": 12, "preload_nchunks": 9, "num_canonical_shards": 12}
        with dl.DonorLoader(store.cells(3).path, rank=0, world_size=3, **options) as loader:
            next(iter(loader))  # and on the others: 145 cells are left, for 4 ranks three batches each
            state = loader.state_dict()
        rows: set[int] = set()
        with caplog.at_level(logging.INFO, logger="donorloader"):
            for rank in range(4):
                with dl.DonorLoader(store.cells(3).path, rank=rank, world_size=4, **options) as loader:
                    loader.load_state_dict(state)
                    rows |= set(chain.from_iterable(orders(loader)))
        assert len(rows) == 144
        assert caplog.records[-1].message == (
            "Epoch 0 is resumed on 4 ranks; 1 of 145 cells that are left are left out of it."
        )


class TestFound:
    @pytest.mark.parametrize(("rank", "world_size"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
    def test_in_the_environment(self, store: Store, alone: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
        alone.setenv(rank, "1")
        assert find_ranks(None, None, None, "drop").world_size == 1, "both are needed"
        alone.setenv(world_size, "3")
        path = store.cells(3).path
        with dl.DonorLoader(path, **SMALL) as found, dl.DonorLoader(path, rank=1, world_size=3, **SMALL) as told:
            assert orders(found) == orders(told)
        assert find_ranks(0, 2, None, "drop").world_size == 2, "what is told wins"
        alone.setenv(world_size, "three")
        with pytest.raises(ValueError, match=f"{world_size}='three'"):
            find_ranks(None, None, None, "drop")

    def test_a_batch_script_is_one_process(self, alone: pytest.MonkeyPatch) -> None:
        """sbatch tells its script how many tasks were asked for; srun alone runs so many."""
        alone.setenv("SLURM_PROCID", "0")
        alone.setenv("SLURM_NTASKS", "4")
        assert find_ranks(None, None, None, "drop").world_size == 1

    def test_torch_distributed_before_the_environment(self, alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
        alone.setenv("RANK", "1")
        alone.setenv("WORLD_SIZE", "3")
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
        try:
            found = find_ranks(None, None, None, "drop")
        finally:
            torch.distributed.destroy_process_group()
        assert (found.rank, found.world_size, found.source) == (0, 1, "torch.distributed")

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            (
                {"rank": 2, "world_size": 2},
                "numbered from 0 to world_size - 1, but rank and world_size say rank 2 of 2",
            ),
            ({"rank": -1, "world_size": 2}, "rank -1 of 2"),
            ({"rank": 0}, "go together"),
            ({"world_size": 2}, "go together"),
            ({"rank": 0.0, "world_size": 2}, "rank must be a whole number"),
            ({"num_canonical_shards": 0}, "at least 1, got 0"),
            ({"rank": 0, "world_size": 3, "num_canonical_shards": 8}, r"3 does not divide 8\. Run on 1, 2, 4 or 8"),
            ({"uneven": "keep"}, "uneven must be 'drop' or 'pad'"),
        ],
    )
    @pytest.mark.parametrize("made", [dl.DonorLoader, dl.BagLoader])
    def test_impossible(self, store: Store, made: Any, changes: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            made(store.cells(3).path, **changes)

    def test_shards_are_not_of_a_sampler(self, store: Store) -> None:
        with pytest.raises(ValueError, match="what a batch_sampler draws is dealt to 2 ranks"):
            dl.DonorLoader(
                store.cells(3).path,
                batch_sampler=RandomSampler(4, 8, 8),
                rank=0,
                world_size=2,
                num_canonical_shards=4,
            )


def _rows(requests: Any) -> list[np.ndarray]:
    return [request_rows(r["requests"])[split] for r in requests for split in r["splits"]]


@pytest.mark.timeout(300)
class TestProcesses:
    @pytest.mark.parametrize(
        ("world_size", "by"),
        [(2, "itself"), *(pytest.param(n, "torchrun", marks=pytest.mark.slow) for n in (1, 2, 3, 4))],
    )
    def test_torch_distributed(self, store: Store, tmp_path: Path, world_size: int, by: str) -> None:
        """Real ranks, by gloo: apart, together all, in as many steps, each after the others."""
        cells, genotypes = store.cells(3), store.genotypes(backing="zarr")
        script = str(Path(__file__).with_name("_rank.py"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        arguments = [script, str(tmp_path), str(cells.path), str(genotypes.source)]
        python = [sys.executable, "-W", "ignore"]
        if by == "torchrun":  # without its command, which has the interpreter that it was installed by
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
            commands = [[*python, *launch, *arguments]]
        else:
            commands = [[*python, *arguments, str(rank), str(world_size)] for rank in range(world_size)]
        children = [subprocess.Popen(command, env=environment) for command in commands]
        try:
            assert [child.wait(timeout=250) for child in children] == [0] * len(children)
        finally:
            for child in children:
                child.terminate()  # torchrun then ends its processes
                child.wait(20)
        told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(world_size)]
        for epoch in range(2):
            rows = [list(chain.from_iterable(each["cells"][epoch])) for each in told]
            assert len({len(each["cells"][epoch]) for each in told}) == 1
            everything = list(chain.from_iterable(rows))
            assert len(set(everything)) == len(everything) > 181 - world_size
            bags = [list(chain.from_iterable(each["bags"][epoch])) for each in told]
            assert len(set(chain.from_iterable(bags))) == sum(map(len, bags)) > 13 - world_size
        assert told[0]["cells"][0] != told[0]["cells"][1], "other shares, or another order, each epoch"
