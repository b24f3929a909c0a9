"""Stopped at any batch and continued in a new process, a loader yields what it would have yielded."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from annbatch.samplers import RandomSampler, SequentialSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from torchdata.stateful_dataloader import StatefulDataLoader

import donorloader as dl
from _data import as_numpy, write_collection
from _join import orders
from _resume import CASES, digest, digests, make
from donorloader.samplers import delivered_batches, donor_requests, replay, request_rows, skip_batches

if TYPE_CHECKING:
    from _data import Store

pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")


@pytest.fixture(scope="module")
def paths(store: Store) -> tuple[str, str]:
    """Cells and genotypes as a new process finds them."""
    return str(store.cells(3).path), str(store.genotypes(backing="zarr").source)


#: Of the other cases, some batches are tried, among them the first, the last, and none.
EVERY_BATCH = ("random", "one table a window", "rank 1 of 2", "bags", "bags larger than a window")


def all_resumed(paths: tuple[str, str], folder: Path) -> dict[str, list[tuple[dict, dict, dict]]]:
    """Per case: states of every batch, what each should give, and what a new process gave."""
    cells, genotypes = paths
    jobs, expected = [], {}
    for number, case in enumerate(CASES):
        with make(case, cells, genotypes, prefetch=0) as loader:
            loader.set_epoch(3)
            states, here = [loader.state_dict()], []
            for batch in loader:
                here.append(digest(batch))
                states.append(loader.state_dict())
            states.append(loader.state_dict())
            following = digests(loader)
            then = digests(itertools.islice(loader, 2))
            common = {"length": len(loader)}
        told = [common | {"epoch": 3, "rest": here[k:], "next": following[:2]} for k in range(len(here) + 1)]
        told.append(common | {"epoch": 4, "rest": following, "next": then})
        chosen = np.arange(len(states))
        if len(states) > 40:
            number_of_states = 20 if os.environ.get("RESUME_EVERYWHERE") else 5
            chosen = np.random.default_rng(0).choice(chosen, number_of_states, replace=False)
        elif case not in EVERY_BATCH and not os.environ.get("RESUME_EVERYWHERE"):
            chosen = chosen[[0, 1, len(chosen) // 2, -2, -1]]
        states = [states[k] for k in chosen]
        expected[case] = list(zip(states, [told[k] for k in chosen], strict=True))
        prefetch = None if number % 2 else 0
        jobs.append({"case": case, "states": states, "cells": cells, "genotypes": genotypes, "prefetch": prefetch})
    results = in_new_process(jobs, folder)
    return {
        case: [(state, want, got) for (state, want), got in zip(expected[case], gots, strict=True)]
        for case, gots in zip(CASES, results, strict=True)
    }


def in_new_process(jobs: list[dict[str, Any]], folder: Path) -> list[Any]:
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("_resume.py")
    command = [sys.executable, "-W", "ignore", str(script), str(folder / "jobs.json"), str(folder / "results.json")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(command, check=True, timeout=280, env=environment)
    return json.loads((folder / "results.json").read_text())


class TestNewProcess:
    @pytest.mark.timeout(300)
    def test_goes_on_bit_for_bit(self, paths: tuple[str, str], tmp_path: Path) -> None:
        """All cases in one process, and one test, as its imports take longer than all of them."""
        resumed = all_resumed(paths, tmp_path)
        assert resumed.keys() == CASES.keys()
        for case, results in resumed.items():
            assert len(results) > 4
            for state, want, got in results:
                assert got == want, f"{case}, resumed after batch {state['batches']} of epoch {state['epoch']}"


class TestState:
    def test_is_small_and_of_json(self, paths: tuple[str, str]) -> None:
        for case in ("random", "filtered", "annbatch's weighted classes", "rank 1 of 2", "bags, balanced"):
            with make(case, *paths) as loader:
                text = json.dumps(loader.state_dict())
                assert len(text) < 3000
                loader.load_state_dict(json.loads(text))

    def test_is_of_what_was_delivered(self, paths: tuple[str, str]) -> None:
        """Not of what was read ahead, in any number."""
        for prefetch in (0, 1, None):
            with make("random", *paths, prefetch=prefetch) as loader:
                iterator = iter(loader)
                for batches in range(4):
                    assert loader.state_dict()["batches"] == batches
                    next(iterator)

    def test_resumed_twice(self, paths: tuple[str, str]) -> None:
        with make("random", *paths) as loader:
            whole, following = digests(loader), digests(loader)
        state, seen = None, []
        for taken in (3, 0, 4, 2, 9):
            with make("random", *paths) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                seen += [digest(batch) for _, batch in zip(range(taken), loader, strict=False)]
                state = loader.state_dict()
        assert seen == whole
        assert (state["epoch"], state["batches"]) == (1, 0)
        with make("random", *paths) as loader:
            loader.load_state_dict(state)
            assert digests(loader) == following

    def test_epoch_and_length(self, paths: tuple[str, str]) -> None:
        with make("random", *paths) as loader:
            loader.set_epoch(5)
            assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (5, 0)
            next(iter(loader))
            state = loader.state_dict()
        with make("random", *paths) as loader:
            loader.load_state_dict(state)
            assert loader.epoch == 5
            assert loader.state_dict() == state
            assert sum(1 for _ in loader) == len(loader) - 1
            next(iter(loader))
            assert loader.epoch == 6

    def test_set_epoch_names_the_resumed_one_or_another(self, paths: tuple[str, str]) -> None:
        with make("random", *paths) as loader:
            loader.set_epoch(2)
            wholes = {2: digests(loader), 3: digests(loader)}
            loader.set_epoch(2)
            state = _stopped_after(loader, 5)
            for epoch, first in ((2, 5), (3, 0)):
                loader.load_state_dict(state)
                loader.set_epoch(epoch)
                assert digests(loader) == wholes[epoch][first:]
            loader.set_epoch(2)
            assert digests(loader) == wholes[2], "whole again, as the loaded rest was taken or given up"

    def test_an_iterator_that_nobody_asked_does_not_count(self, paths: tuple[str, str]) -> None:
        with make("random", *paths) as loader:
            whole, following = digests(loader), digests(loader)
            loader.set_epoch(0)
            loader.load_state_dict(_stopped_after(loader, 2))
            iter(loader)
            iter(loader)
            assert digests(loader) == whole[2:]
            assert digests(loader) == following

    def test_a_loop_that_is_left_early(self, paths: tuple[str, str]) -> None:
        """Its rest is resumed; in the same process, or told the next epoch, a new one begins."""
        with make("random", *paths) as loader:
            states = [_stopped_after(loader, 4) for _ in range(3)]
            assert [(s["epoch"], s["batches"]) for s in states] == [(0, 4), (1, 4), (2, 4)]

    def test_ten_batches_an_epoch_see_other_cells_each_time(self, paths: tuple[str, str]) -> None:
        with make("random", *paths, batch_size=4) as loader:
            seen = [np.concatenate(orders(itertools.islice(loader, 10))) for _ in range(6)]
        assert len(np.unique(np.concatenate(seen))) > 1.5 * 40
        assert len({tuple(sorted(rows)) for rows in seen}) == 6

    def test_bag_ids_are_those_of_the_rest(self, paths: tuple[str, str]) -> None:
        with make("bags", *paths) as loader:
            loader.load_state_dict(_stopped_after(loader, 2))
            kept = list(loader)
            assert [list(ids) for ids in loader.bag_ids()] == [list(batch["donors"]) for batch in kept]
            assert len(loader.bag_ids(0)) == len(loader) == len(kept) + 2
            counted = list(itertools.islice(loader, len(loader)))  # a loop that does not ask for the end
            assert [list(ids) for ids in loader.bag_ids()] == [list(batch["donors"]) for batch in counted]


def _stopped_after(loader: Any, batches: int) -> dict[str, Any]:
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"batch_size": 32}, r"batch_size \(16 there, 32 here\)"),
            ({"seed": 4}, r"seed \(0 there, 4 here\)"),
            ({"shuffle": False}, r"sampler \('RandomSampler' there, 'SequentialSampler' here\)"),
            ({"drop_last": True}, "drop_last"),
            ({"chunk_size": 4, "preload_nchunks": 16}, "chunk_size .*preload_nchunks"),
            ({"cells_query": "cell_type == 'B'"}, "cells in use"),
            ({"donors": ["d1", "d3"]}, "cells in use"),
            ({"variants": [0, 1]}, "variants"),
            ({"genotype_encoding": "dosage"}, r"genotype_encoding .*dtype"),
        ],
    )
    def test_other_settings(self, paths: tuple[str, str], changes: dict[str, Any], named: str) -> None:
        with make("random", *paths) as there, make("random", *paths, **changes) as here:
            state = there.state_dict()
            with pytest.raises(ValueError, match=named):
                here.load_state_dict(state)
            assert here.epoch == 0

    @pytest.mark.parametrize(
        ("changes", "named"),
        [({"max_cells": 8}, r"max_cells \(9 there, 8 here\)"), ({"bags_per_batch": 2}, "bags_per_batch")],
    )
    def test_other_bags(self, paths: tuple[str, str], changes: dict[str, Any], named: str) -> None:
        with make("bags", *paths) as there, make("bags", *paths, **changes) as here:
            state = there.state_dict()
            with pytest.raises(ValueError, match=named):
                here.load_state_dict(state)
            with make("random", *paths) as cells, pytest.raises(ValueError, match=r"loader \('BagLoader' there"):
                cells.load_state_dict(state)

    def test_other_data(self, store: Store, paths: tuple[str, str]) -> None:
        with make("random", *paths) as there:
            state = there.state_dict()
        for cells, genotypes, named in (
            (store.cells(4).path, paths[1], r"cells \(181 there, 193 here\)"),
            (paths[0], None, "variants .*absent here"),
            (_renamed(store, "obs"), paths[1], "donors "),
            (_renamed(store, "var"), paths[1], "genes "),
        ):
            with make("random", cells, genotypes) as here, pytest.raises(ValueError, match=named):
                here.load_state_dict(state)

    def test_another_order_of_the_same_settings(self, paths: tuple[str, str]) -> None:
        """As another version of annbatch or numpy might give."""
        with make("random", *paths) as loader:
            state = loader.state_dict()
            state["of"]["order"] = "other"
            with pytest.raises(ValueError, match="versions of annbatch, numpy or donorloader differ"):
                loader.load_state_dict(state)

    @pytest.mark.parametrize(
        ("broken", "error", "match"),
        [
            ({"version": 2}, ValueError, "reads states of format version 1, but this one is of version 2. Update"),
            ({"version": 0}, ValueError, "of version 0. Load it with the version of donorloader that wrote it"),
            ({"version": "1"}, ValueError, "of version '1'"),
            ({"epoch": -1}, ValueError, "'epoch' must be an integer of at least 0, got -1"),
            ({"batches": 2.0}, ValueError, "'batches' must be an integer of at least 0, got 2.0"),
            ({"world_size": None}, ValueError, "'world_size' must be an integer"),
            ({"world_size": 0}, ValueError, "'world_size' must be an integer of at least 1, got 0"),
            ({"position": "far"}, ValueError, "'position' must be an integer"),
            ({"position": 3}, ValueError, "'position' goes with a number of canonical shards"),
            ({"num_canonical_shards": 0}, ValueError, "'num_canonical_shards' must be an integer of at least 1, got 0"),
            ({"batches": 13}, ValueError, "13 batches of an epoch that has 12"),
            ({"of": None}, ValueError, "'of' must say"),
        ],
    )
    def test_broken_states(
        self, paths: tuple[str, str], broken: dict[str, Any], error: type[Exception], match: str
    ) -> None:
        with make("random", *paths) as loader:
            state = loader.state_dict() | broken
            with pytest.raises(error, match=match):
                loader.load_state_dict(state)

    @pytest.mark.parametrize("no_state", [None, {}, [1, 2], "state"])
    def test_no_state(self, paths: tuple[str, str], no_state: Any) -> None:
        with make("random", *paths) as loader, pytest.raises(TypeError, match="the dict that state_dict"):
            loader.load_state_dict(no_state)


def _renamed(store: Store, axis: str) -> list[ad.AnnData]:
    """The same cells, two of other donors, or with another gene."""
    adatas = [adata.copy() for adata in store.cells(3).adatas]
    if axis == "obs":
        donors = np.array(adatas[0].obs["donor_id"].astype(object))
        donors[[0, 1]] = "d3", "d4"
        adatas[0].obs["donor_id"] = donors
    else:
        for adata in adatas:
            adata.var_names = [f"gene{g}" for g in range(adata.n_vars - 1)] + ["another"]
    return adatas


class TestSkippedIsNotRead:
    """What skipped windows would read is made unreadable: a loader that touches it fails."""

    OPTIONS: ClassVar[dict[str, Any]] = {"batch_size": 16, "chunk_size": 16, "preload_nchunks": 2, "shuffle": False}

    def adatas(self) -> list[ad.AnnData]:
        x = (np.arange(256 * 5).reshape(256, 5) + 1).astype(np.float32)
        donors = np.repeat(list("abcdefgh"), 32).astype(object)
        obs = pd.DataFrame({"donor_id": donors}, index=[f"c{i}" for i in range(256)])
        return [ad.AnnData(sparse.csr_matrix(x[k : k + 128]), obs=obs[k : k + 128]) for k in (0, 128)]

    @pytest.fixture
    def broken(self, tmp_path: Path) -> tuple[Path, Path]:
        """128 cells of donors a–d before 128 of donors e–h; all that is stored of the first four is garbage."""
        cells = write_collection(tmp_path / "cells.zarr", self.adatas())
        values = np.arange(8 * 6, dtype=np.int16).reshape(8, 6)
        genotypes = tmp_path / "genotypes.zarr"
        ad.AnnData(values, obs=pd.DataFrame(index=list("abcdefgh"))).write_zarr(genotypes, chunks=(4, 6))
        first_rows = [
            p for p in (genotypes / "X").rglob("*") if re.fullmatch(r"(c/)?0[/.]0", _below(p, genotypes / "X"))
        ]
        x_of_first = [p for part in ("data", "indices") for p in (cells / "dataset_0" / "X" / part / "c").rglob("*")]
        assert len(first_rows) == 1
        for path in [*first_rows, *(p for p in x_of_first if p.is_file())]:
            path.write_bytes(b"garbage" * 50)
        return cells, genotypes

    @pytest.mark.parametrize("memory", [0, "1GB"])
    def test_neither_cells_nor_genotypes(self, broken: tuple[Path, Path], memory: Any) -> None:
        cells, genotypes = broken
        with dl.DonorLoader(cells, genotypes, genotype_memory=memory, **self.OPTIONS) as loader:
            state = loader.state_dict()
            with pytest.raises((RuntimeError, ValueError), match=r"damaged|crc32c|checksum|decod|size"):
                next(iter(loader))
            loader.load_state_dict(state | {"batches": 8})
            rest = list(loader)
        assert np.concatenate(orders(rest)).tolist() == list(range(128, 256))
        assert as_numpy(rest[0]["donor_features"]).tolist() == [list(range(24, 30))]

    @pytest.mark.parametrize("lane", ["cells", "genotypes"])
    def test_each_lane_would_fail(self, broken: tuple[Path, Path], lane: str) -> None:
        """On what is skipped, so the test before tells of both."""
        cells, genotypes = broken
        if lane == "genotypes":
            cells = [ad.AnnData(np.ones((128, 3), np.float32), obs=adata.obs) for adata in self.adatas()]
        source = genotypes if lane == "genotypes" else None
        with dl.DonorLoader(cells, source, **self.OPTIONS) as loader:
            with pytest.raises(ValueError if lane == "cells" else RuntimeError) as caught:
                next(iter(loader))
            assert any(f"lane '{lane}" in note for note in caught.value.__notes__)
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "batches": 8})
            assert len(list(loader)) == 8


def _below(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


class TestSkipBatches:
    @given(
        n_obs=st.integers(1, 300),
        batch_size=st.sampled_from([1, 3, 8]),
        shuffle=st.booleans(),
        share=st.floats(0, 1),
        epoch=st.integers(0, 3),
    )
    def test_the_rest_is_the_rest(self, n_obs: int, batch_size: int, shuffle: bool, share: float, epoch: int) -> None:
        sizes = {"chunk_size": 4, "preload_nchunks": 6, "batch_size": batch_size}
        sampler = RandomSampler(**sizes) if shuffle else SequentialSampler(**sizes)
        whole = _batches(replay(sampler, n_obs, seed=1, epoch=epoch))
        skip = round(share * len(whole))
        requests = list(replay(sampler, n_obs, seed=1, epoch=epoch, skip=skip))
        assert all(delivered_batches(request) == 0 for request in requests[1:])
        rest = _batches(requests)
        assert [b.tolist() for b in rest] == [b.tolist() for b in whole[skip:]]

    @settings(max_examples=30)
    @given(
        bags_per_batch=st.integers(1, 4),
        max_cells=st.sampled_from([None, 2, 7]),
        window_cells=st.sampled_from([1, 4, 10, 50]),
        share=st.floats(0, 1),
    )
    def test_bags(self, bags_per_batch: int, max_cells: int | None, window_cells: int, share: float) -> None:
        """Also of batches that take several requests."""
        codes = np.random.default_rng(2).integers(0, 9, 70)
        sampler = dl.BagSampler(
            codes, bags_per_batch=bags_per_batch, max_cells=max_cells, window_cells=window_cells, n_bags=None
        )
        whole = _bags(donor_requests(replay(sampler, 70, seed=0, epoch=1), codes))
        skip = round(share * len(whole))
        assert _bags(donor_requests(replay(sampler, 70, seed=0, epoch=1, skip=skip), codes)) == whole[skip:]

    def test_more_than_there_are(self) -> None:
        requests = replay(SequentialSampler(4, 2, 4), 20, seed=0, epoch=0)
        with pytest.raises(ValueError, match="after batch 6: it has only 5"):
            list(skip_batches(requests, 6))


def _batches(requests: Any) -> list[np.ndarray]:
    return [request_rows(r["requests"])[split] for r in requests for split in r["splits"][delivered_batches(r) :]]


def _bags(requests: Any) -> list[tuple[list[int], list[int], list[int]]]:
    return [
        (bags.tolist(), request["requests"][split].tolist(), index.tolist())
        for request in requests
        for bags, split, index in zip(request["bags"], request["splits"], request["donor_idx"], strict=True)
    ]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
class TestTorchData:
    @pytest.mark.parametrize("case", ["random", "bags"])
    def test_stateful_data_loader(self, paths: tuple[str, str], case: str) -> None:
        """Without a line of user code: at the start, in the middle, at the last batch, and after the end."""
        with make(case, *paths) as loader:
            whole = [digests(loader) for _ in range(3)]
        n = len(whole[0])
        for taken, rest, following in (
            (0, whole[0], whole[1]),
            (2, whole[0][2:], whole[1]),
            (n, [], whole[1]),
            (n + 1, whole[1], whole[2]),
        ):
            with make(case, *paths) as loader:
                there = StatefulDataLoader(loader, batch_size=None, num_workers=0)
                if taken == 0:
                    state = there.state_dict()
                iterator = iter(there)
                for _ in range(taken):
                    next(iterator, None)
                state = there.state_dict() if taken else state
            with make(case, *paths) as loader:
                here = StatefulDataLoader(loader, batch_size=None, num_workers=0)
                here.load_state_dict(json.loads(json.dumps(state)))
                assert digests(here) == rest
                assert digests(here) == following
