"""Samplers on their own: subsets, replicas, donor requests, sizes."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.abc import Sampler
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given
from hypothesis import strategies as st

import donorloader as dl
from donorloader.samplers import (
    EpochSampler,
    RequestPlan,
    choose_geometry,
    complete_requests,
    pass_generator,
    replay,
    replica,
    request_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.types import LoadRequest


def batches(requests: Iterator[LoadRequest]) -> list[np.ndarray]:
    return [request_rows(r["requests"])[split] for r in requests for split in r["splits"]]


def random_sampler(**changes: Any) -> RandomSampler:
    settings = {"chunk_size": 4, "preload_nchunks": 6, "batch_size": 8, "rng": np.random.default_rng(9)}
    return RandomSampler(**(settings | changes))


class TestSubsetSampler:
    @given(
        n_obs=st.integers(1, 400),
        share=st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]),
        seed=st.integers(0, 5),
        shuffle=st.booleans(),
    )
    def test_each_chosen_row_once(self, n_obs: int, share: float, seed: int, shuffle: bool) -> None:
        rows = np.flatnonzero(np.random.default_rng(seed).random(n_obs) < share)
        rows = rows if rows.size else np.array([n_obs - 1])
        inner = random_sampler() if shuffle else SequentialSampler(chunk_size=4, preload_nchunks=6, batch_size=8)
        sampler = dl.SubsetSampler(inner, rows)
        got = batches(replay(sampler, n_obs, seed=seed, epoch=2))
        assert len(got) == sampler.n_batches(n_obs)
        assert [len(b) for b in got[:-1]] == [8] * (len(got) - 1)
        flat = np.concatenate(got)
        np.testing.assert_array_equal(np.sort(flat), rows)
        if not shuffle:
            np.testing.assert_array_equal(flat, rows)

    def test_order_is_that_of_the_rows_alone(self) -> None:
        """What is chosen decides, not how it is written: as mask, as numbers, in any order, with repeats."""
        mask = np.arange(100) % 3 == 1
        rows = np.flatnonzero(mask)
        expected = batches(replay(dl.SubsetSampler(random_sampler(), mask), 100, seed=1, epoch=0))
        for same in (rows, rows[::-1], np.concatenate([rows, rows[:5]]), rows.astype(np.uint16)):
            got = batches(replay(dl.SubsetSampler(random_sampler(), same), 100, seed=1, epoch=0))
            assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))

    def test_reads_across_small_gaps_but_holds_few_rows_more(self) -> None:
        near = np.arange(0, 4000, 2)
        for request in replay(dl.SubsetSampler(SequentialSampler(64, 4, 64), near), 4000, seed=0, epoch=0):
            assert len(request["requests"]) == 1
        far = np.arange(0, 40_000, 40)
        for request in replay(dl.SubsetSampler(SequentialSampler(64, 4, 64), far), 40_000, seed=0, epoch=0):
            wanted = sum(map(len, request["splits"]))
            assert request_rows(request["requests"]).size <= 4 * wanted

    def test_over_a_sampler_that_repeats_rows(self) -> None:
        inner = random_sampler(replacement=True, num_samples=200)
        rows = np.arange(5, 95, 3)
        got = np.concatenate(batches(replay(dl.SubsetSampler(inner, rows), 100, seed=0, epoch=0)))
        assert got.size == 200
        assert np.isin(got, rows).all()

    @pytest.mark.parametrize(
        ("rows", "error", "match"),
        [
            ([], ValueError, "at least one row"),
            (np.zeros(10, dtype=bool), ValueError, "at least one row"),
            ([-1, 3], ValueError, "0 or more, got -1"),
            ([0.5], TypeError, "row numbers or a boolean mask"),
        ],
    )
    def test_bad_rows(self, rows: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            dl.SubsetSampler(random_sampler(), np.asarray(rows, dtype=None if len(rows) else int))

    def test_rows_beyond_the_data(self) -> None:
        with pytest.raises(ValueError, match="below the 10 rows of the data, got 12"):
            dl.SubsetSampler(random_sampler(), np.array([1, 12])).validate(10)

    def test_the_sampler_of_a_subset_is_told_its_size(self) -> None:
        sampler = dl.SubsetSampler(random_sampler(mask=slice(0, 50)), np.arange(20))
        with pytest.raises(ValueError, match=r"mask\.stop \(50\)") as caught:
            sampler.validate(100)
        assert any("20 selected of 100" in note for note in caught.value.__notes__)


class TwoGenerators(Sampler):
    """Draws from three kinds of generator, one of them shared."""

    def __init__(self) -> None:
        self.a = np.random.default_rng(1)
        self.again = self.a
        self.b = np.random.RandomState(2)
        self.c = random.Random(3)

    batch_size = 4
    shuffle = False

    def n_batches(self, n_obs: int) -> int:
        return 1

    def validate(self, n_obs: int) -> None:
        pass

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rows = [self.a.integers(n_obs), self.again.integers(n_obs), self.b.randint(n_obs), self.c.randrange(n_obs)]
        yield {"requests": np.array(rows), "splits": [np.arange(4)]}


class TestReplica:
    def test_every_generator_starts_from_seed_and_epoch(self) -> None:
        sampler = TwoGenerators()
        first = batches(replay(sampler, 10**9, seed=0, epoch=0))
        sampler.a.random(100), sampler.b.rand(5), sampler.c.random()
        np.testing.assert_array_equal(batches(replay(sampler, 10**9, seed=0, epoch=0)), first)
        others = [batches(replay(sampler, 10**9, seed=s, epoch=e)) for s, e in ((0, 1), (1, 0), (1, 1))]
        values = np.concatenate([np.ravel(first), *map(np.ravel, others)])
        assert len(set(values.tolist())) == values.size

    def test_a_shared_generator_stays_shared(self) -> None:
        twin = replica(TwoGenerators(), seed=0, epoch=0)
        assert twin.a is twin.again

    def test_the_original_does_not_advance(self) -> None:
        sampler = random_sampler()
        before = sampler.rng.bit_generator.state
        list(replay(sampler, 100, seed=0, epoch=0))
        assert sampler.rng.bit_generator.state == before

    @pytest.mark.parametrize("bits", [np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM])
    def test_other_bit_generators(self, bits: Any) -> None:
        sampler = random_sampler(rng=np.random.Generator(bits(4)))
        once, again, other = (batches(replay(sampler, 100, seed=0, epoch=e)) for e in (3, 3, 4))
        assert all(np.array_equal(a, b) for a, b in zip(once, again, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(once, other, strict=True))

    def test_what_cannot_be_copied(self) -> None:
        sampler = random_sampler()
        sampler.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match=r"RandomSampler cannot be copied .*__deepcopy__"):
            replica(sampler, seed=0, epoch=0)

    def test_streams_of_a_pass_are_apart(self) -> None:
        drawn = [pass_generator(s, e, k).integers(2**63) for s in range(3) for e in range(3) for k in range(3)]
        assert len(set(drawn)) == 27


class Wrong(Sampler):
    batch_size = 4
    shuffle = False

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request

    def n_batches(self, n_obs: int) -> int:
        return 1

    def validate(self, n_obs: int) -> None:
        pass

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        yield dict(self.request)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        ({"requests": [slice(8, 12)], "splits": [np.arange(4)]}, "rows 0 to 9, but Wrong asks for row 10"),
        ({"requests": np.array([-1, 2]), "splits": [np.arange(2)]}, "rows 0 to 9, but Wrong asks for row -1"),
        ({"requests": [slice(0, 4)], "splits": [np.array([0, 4])]}, "index the 4 rows .* gives position 4"),
        ({"requests": [slice(0, 4)], "splits": [np.array([0, -2])]}, "index the 4 rows"),
    ],
)
def test_requests_that_would_read_other_rows(request_: dict[str, Any], match: str) -> None:
    """numpy would take row -1 for the last row, and so another donor's."""
    with pytest.raises(ValueError, match=match):
        list(complete_requests(Wrong(request_), 10, np.random.default_rng(0)))


def test_empty_splits_yield_no_batch() -> None:
    request = {"requests": [slice(0, 4)], "splits": [np.arange(2), np.arange(0), np.arange(2, 4)]}
    [complete] = complete_requests(Wrong(request), 10, np.random.default_rng(0))
    assert [len(split) for split in complete["splits"]] == [2, 2]


class TestDonorSampler:
    @given(n_obs=st.integers(1, 300), n_donors=st.integers(1, 40), seed=st.integers(0, 3), drop_last=st.booleans())
    def test_tells_the_donor_of_every_cell(self, n_obs: int, n_donors: int, seed: int, drop_last: bool) -> None:
        codes = np.random.default_rng(seed).integers(n_donors, size=n_obs)
        cells = random_sampler(drop_last=drop_last)
        expected = batches(replay(cells, n_obs, seed=seed, epoch=1))
        got = []
        for request in dl.DonorSampler(cells, codes, seed=seed, epoch=1).sample(n_obs):
            np.testing.assert_array_equal(request["requests"], np.unique(request["requests"]))
            for split, index in zip(request["splits"], request["donor_idx"], strict=True):
                donors = request["requests"][split]
                np.testing.assert_array_equal(donors, np.unique(donors))
                got.append(donors[index])
                assert set(donors) == set(got[-1])
            used = np.unique(np.concatenate([request["requests"][s] for s in request["splits"]]))
            np.testing.assert_array_equal(used, request["requests"])
        assert all(np.array_equal(donors, codes[rows]) for donors, rows in zip(got, expected, strict=True))

    def test_set_epoch(self) -> None:
        codes = np.arange(50)
        sampler = dl.DonorSampler(random_sampler(), codes)
        first = next(sampler.sample(50))["splits"][0]
        sampler.set_epoch(1)
        assert not np.array_equal(next(sampler.sample(50))["splits"][0], first)
        assert sampler.epoch == 1
        assert sampler.n_batches(50) == 7

    @pytest.mark.parametrize(
        ("codes", "error", "match"),
        [
            (np.zeros((2, 2), dtype=int), TypeError, "one integer per cell"),
            (np.zeros(3), TypeError, "one integer per cell"),
        ],
    )
    def test_bad_codes(self, codes: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            dl.DonorSampler(random_sampler(), codes)

    def test_codes_of_other_cells(self) -> None:
        with pytest.raises(ValueError, match="each of the 60 cells, but has 50"):
            dl.DonorSampler(random_sampler(), np.zeros(50, dtype=int)).sample(60)

    def test_a_cell_that_is_not_in_use(self) -> None:
        codes = np.zeros(50, dtype=int)
        codes[20] = -1
        with pytest.raises(ValueError, match="draws a cell that is not selected"):
            list(dl.DonorSampler(random_sampler(), codes).sample(50))


class TestEpochSampler:
    def test_needs_an_epoch_for_each_pass(self) -> None:
        sampler = EpochSampler(random_sampler(), seed=0)
        with pytest.raises(RuntimeError, match="needs `arm"):
            sampler.sample(50)
        sampler.arm(0, deque())
        assert len(list(sampler.sample(50))) == 3
        with pytest.raises(RuntimeError, match="needs `arm"):
            sampler.sample(50)

    def test_plan_tells_the_batches(self) -> None:
        sampler = EpochSampler(random_sampler(), seed=0)
        plan: deque[RequestPlan] = deque()
        sampler.arm(2, plan)
        got = batches(sampler.sample(50))
        assert [n for request in plan for n in request.sizes] == [len(b) for b in got]
        assert {request.part_of for request in plan} == {None}


class TestGeometry:
    @given(st.integers(1, 20_000))
    def test_windows_hold_whole_batches(self, batch_size: int) -> None:
        chunk, chunks = choose_geometry(batch_size)
        assert (chunk * chunks) % batch_size == 0
        assert chunk * chunks >= batch_size
        assert 16 <= chunk <= 128
        if batch_size <= 4096:
            assert 8_192 <= chunk * chunks <= max(32_768, 16 * batch_size)

    @pytest.mark.parametrize("value", [0, -1, 2.5, True])
    @pytest.mark.parametrize("name", ["batch_size", "chunk_size", "preload_nchunks"])
    def test_bad_sizes(self, name: str, value: Any) -> None:
        sizes: dict[str, Any] = {"batch_size": 8} | {name: value}
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
            choose_geometry(**sizes)
