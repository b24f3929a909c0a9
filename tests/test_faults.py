"""Fails loudly, ends cleanly: errors in lanes, passes cut short, exit and Ctrl-C."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

import donorloader as dl
from _data import N_GENES, as_numpy, genotype_adata, write_collection, x_values
from _faults import LaneError, hooked_cells, hooked_genotypes, lanes, open_files, wait_until
from _join import check_batch, orders
from _samplers import OwnRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from annbatch.types import LoadRequest

    from _data import Store

N_BATCHES = 20
#: Batch k is cells 10 k to 10 k + 9, all of donor k; the second dataset begins at batch 3.
ONE_DONOR_A_BATCH: dict[str, Any] = {"batch_size": 10, "chunk_size": 10, "preload_nchunks": 1, "shuffle": False}


@dataclass(frozen=True)
class Blocks:
    cells: Path
    genotypes: Path


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Blocks:
    root = tmp_path_factory.mktemp("blocks")
    ids = np.array([f"d{i:02d}" for i in range(N_BATCHES)], dtype=object)
    adatas = [
        ad.AnnData(
            X=sparse.csr_matrix(x_values(stop - start, start=start)),
            obs=pd.DataFrame(
                {"donor_id": pd.Categorical(np.repeat(ids, 10)[start:stop])},
                index=[f"c{i}" for i in range(start, stop)],
            ),
            var=pd.DataFrame(index=[f"gene{g}" for g in range(N_GENES)]),
        )
        for start, stop in ((0, 30), (30, 10 * N_BATCHES))
    ]
    genotypes, _, _ = genotype_adata(ids)
    genotypes.write_h5ad(root / "genotypes.h5ad")
    return Blocks(write_collection(root / "cells.zarr", adatas, rows_per_chunk=10), root / "genotypes.h5ad")


class Fault:
    """Raises, in one lane, at batch 3; remembers the error and when it was raised."""

    def __init__(self, lane: str, blocks: Blocks, *, delay: float = 0.0) -> None:
        self.error = LaneError("the disk is on fire")
        self.armed, self.delay, self.at = True, delay, 0.0
        self.gate = threading.Event()  # opened, unless a test closes it
        self.gate.set()
        self.cells: Any = blocks.cells if lane != "cells" else hooked_cells(blocks.cells, self._read_cells)
        self.genotypes: Any = (
            blocks.genotypes if lane != "genotypes" else hooked_genotypes(blocks.genotypes, self._read_genotypes)
        )

    def _read_cells(self, key: str) -> None:
        if "dataset_1" in key:
            self._raise()

    def _read_genotypes(self, ids: list[str]) -> None:
        if "d03" in ids:
            self._raise()

    def _raise(self) -> None:
        if self.armed:
            self.gate.wait(10)
            time.sleep(self.delay)
            self.at = time.monotonic()
            raise self.error


class TestErrorsInALane:
    @pytest.mark.parametrize("lane", ["cells", "genotypes"])
    @pytest.mark.parametrize("prefetch", [0, 1, 8])
    @pytest.mark.parametrize("memory", ["1GB", 0])
    @pytest.mark.parametrize("densify", [False, True])
    def test_surfaces_as_itself(self, blocks: Blocks, lane: str, prefetch: int, memory: Any, densify: bool) -> None:
        fault = Fault(lane, blocks)
        before = len(lanes())
        loader = dl.DonorLoader(
            fault.cells,
            fault.genotypes,
            prefetch=prefetch,
            genotype_memory=memory,
            densify=densify,
            **ONE_DONOR_A_BATCH,
        )
        with pytest.raises(LaneError) as caught:
            for _ in loader:
                pass
        assert time.monotonic() - fault.at < 2
        assert caught.value is fault.error
        notes = getattr(caught.value, "__notes__", [])
        assert len([n for n in notes if "donorloader" in n]) == 1
        # reading and gathering rows, and filling dense batches, may be lanes of their own
        named = {"cells": "(dense )?cells", "genotypes": "genotype( row)?s"}[lane]
        assert re.search(f"lane '{named}', at batch 3 of epoch 0", notes[-1])
        assert len(lanes()) == before

        fault.armed = False
        assert orders(loader) == [list(range(10 * k, 10 * k + 10)) for k in range(N_BATCHES)], "the loader lives on"
        assert loader.epoch == 1
        loader.close()

    @pytest.mark.parametrize("lane", ["cells", "genotypes"])
    @pytest.mark.parametrize("prefetch", [1, 8])
    def test_while_the_other_lane_is_blocked(self, blocks: Blocks, lane: str, prefetch: int) -> None:
        """The failing lane is slow, so that by then the other one waits for room in its queue."""
        fault = Fault(lane, blocks, delay=0.4)
        with dl.DonorLoader(fault.cells, fault.genotypes, prefetch=prefetch, **ONE_DONOR_A_BATCH) as loader:
            with pytest.raises(LaneError) as caught:
                for _ in loader:
                    pass
            assert time.monotonic() - fault.at < 2
            assert caught.value is fault.error
            assert wait_until(lambda: not lanes())

    @pytest.mark.parametrize("lane", ["cells", "genotypes"])
    def test_while_both_queues_are_full(self, blocks: Blocks, lane: str) -> None:
        """The reader is at its step; the error does not wait behind the batches that are ready."""
        fault = Fault(lane, blocks)
        with dl.DonorLoader(fault.cells, fault.genotypes, prefetch=8, **ONE_DONOR_A_BATCH) as loader:
            fault.gate.clear()
            iterator = iter(loader)
            next(iterator)
            fault.gate.set()
            assert wait_until(lambda: fault.at > 0)
            time.sleep(0.2)
            with pytest.raises(LaneError) as caught:
                next(iterator)
            assert caught.value is fault.error
            assert next(iterator, None) is None, "a pass that failed has ended"

    @pytest.mark.parametrize("prefetch", [0, 4])
    def test_in_a_sampler(self, blocks: Blocks, prefetch: int) -> None:
        """Both lanes run the sampler, so either may be the one that says it."""
        sampler = FailingSampler(10, 10, drop_last=False, rng=np.random.default_rng(0))
        with (
            dl.DonorLoader(blocks.cells, blocks.genotypes, batch_sampler=sampler, prefetch=prefetch) as loader,
            pytest.raises(LaneError, match="out of dice") as caught,
        ):
            list(loader)
        assert any("batch 3" in n for n in caught.value.__notes__)

    @pytest.mark.parametrize("prefetch", [0, 4])
    def test_second_pass_fails_and_the_first_goes_on(self, blocks: Blocks, prefetch: int) -> None:
        fault = Fault("genotypes", blocks)
        fault.armed = False
        with dl.DonorLoader(
            fault.cells, fault.genotypes, prefetch=prefetch, genotype_memory=0, **ONE_DONOR_A_BATCH
        ) as loader:
            first = iter(loader)
            for _ in range(5):
                next(first)
            fault.armed = True
            with pytest.raises(LaneError):
                list(loader)
            assert len(list(first)) == N_BATCHES - 5

    def test_a_base_exception(self, blocks: Blocks) -> None:
        """A lane cannot swallow what is no Exception."""
        fault = Fault("genotypes", blocks)
        fault.error = SystemExit(7)  # type: ignore[assignment]
        with (
            dl.DonorLoader(fault.cells, fault.genotypes, prefetch=2, **ONE_DONOR_A_BATCH) as loader,
            pytest.raises(SystemExit),
        ):
            list(loader)


class FailingSampler(OwnRows):
    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        for k, request in enumerate(super()._sample(n_obs)):
            if k == 3:
                raise LaneError("out of dice")
            yield request


def fail_at(loader: dl.DonorLoader, batch: int) -> None:
    for k, _ in enumerate(loader):
        _ = 1 / (k - batch)


class TestNothingIsLeftBehind:
    @pytest.fixture
    def warm(self, blocks: Blocks) -> Iterator[Callable[..., dl.DonorLoader]]:
        """Loaders after zarr has started its threads; counts of threads and files must return to what they are then."""

        def make(**options: Any) -> dl.DonorLoader:
            options = ONE_DONOR_A_BATCH | {"genotype_memory": 0} | options
            return dl.DonorLoader(blocks.cells, blocks.genotypes, **options)

        for _ in range(3):
            with make() as loader:
                list(loader)
        gc.collect()
        threads, files = set(lanes()), open_files()
        yield make
        gc.collect()
        assert wait_until(lambda: set(lanes()) <= threads), lanes()
        assert wait_until(lambda: open_files() <= files), f"{open_files()} files are open, {files} were"

    def test_200_passes_broken_off(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for prefetch in (0, 1, 8, None):
            for donor_rows in ("batch", "window"):
                with warm(prefetch=prefetch, donor_rows=donor_rows) as loader:
                    threads, files = len(lanes()), open_files()
                    for i in range(25):
                        for k, _ in enumerate(loader):
                            if k == i % 7:
                                break
                    assert wait_until(lambda t=threads: len(lanes()) == t)
                    assert open_files() == files
                    assert loader.epoch == 24

    def test_50_exceptions_in_the_loop(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for prefetch in (1, 4):
            with warm(prefetch=prefetch) as loader:
                threads, files = len(lanes()), open_files()
                for i in range(25):
                    with pytest.raises(ZeroDivisionError):
                        fail_at(loader, i % 7)
                assert wait_until(lambda t=threads: len(lanes()) == t)
                assert open_files() == files

    def test_loaders_dropped_in_mid_pass(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for i in range(20):
            loader = warm(prefetch=i % 3)
            iterator = iter(loader)
            next(iterator)
            del loader, iterator

    def test_loaders_that_could_not_be_made(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for options in ({"donors": ["nobody"]}, {"variants": ["rs999"]}, {"obs_columns": ["age"]}, {"chunk_size": 7}):
            for _ in range(5):
                with pytest.raises((KeyError, ValueError)):
                    warm(**options)

    def test_abandoned_without_a_break(self, warm: Callable[..., dl.DonorLoader]) -> None:
        with warm(prefetch=2) as loader:
            before = len(lanes())
            iterator = iter(loader)
            next(iterator)
            assert len(lanes()) > before
            del iterator
            assert wait_until(lambda: len(lanes()) == before)

    def test_begun_but_never_advanced(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for prefetch in (0, 2):
            with warm(prefetch=prefetch) as loader:
                for _ in range(10):
                    iter(loader)
                assert wait_until(lambda: not lanes())

    def test_a_pass_outlives_the_name_of_its_loader(self, warm: Callable[..., dl.DonorLoader]) -> None:
        iterator = iter(warm(prefetch=2))
        gc.collect()
        assert sum(1 for _ in iterator) == N_BATCHES

    def test_close(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for prefetch in (0, 1, 8):
            loader = warm(prefetch=prefetch)
            iterators = [iter(loader), iter(loader)]
            for iterator in iterators:
                next(iterator)
            start = time.monotonic()
            loader.close()
            assert time.monotonic() - start < 1
            assert not lanes()
            for iterator in iterators:
                with pytest.raises(RuntimeError, match="closed in the middle of a pass: 1 batches of epoch"):
                    next(iterator)
            loader.close()

    def test_close_after_the_last_batch(self, warm: Callable[..., dl.DonorLoader]) -> None:
        for prefetch in (0, 2):
            loader = warm(prefetch=prefetch)
            iterator = iter(loader)
            assert sum(1 for _ in iterator) == N_BATCHES
            loader.close()
            assert_ended(iterator)

    def test_close_closes_files(self, warm: Callable[..., dl.DonorLoader]) -> None:
        """At once, not when the loader is collected."""
        files = open_files()
        loader = warm()
        next(iter(loader))
        assert open_files() > files
        loader.close()
        assert wait_until(lambda: open_files() == files)

    def test_close_of_a_pass(self, warm: Callable[..., dl.DonorLoader]) -> None:
        with warm(prefetch=2) as loader:
            iterator = iter(loader)
            next(iterator)
            iterator.close()  # type: ignore[attr-defined]
            iterator.close()  # type: ignore[attr-defined]
            assert not lanes()
            assert_ended(iterator)
            assert len(list(loader)) == N_BATCHES


def assert_ended(iterator: Any) -> None:
    """No batch comes any more."""
    assert next(iterator, None) is None


class TestTwoPasses:
    @pytest.mark.parametrize("prefetch", [0, 1, 8])
    @pytest.mark.parametrize("memory", ["1GB", 0])
    @pytest.mark.parametrize("densify", [False, True])
    def test_interleaved(self, store: Store, prefetch: int, memory: Any, densify: bool) -> None:
        cells, genotypes = store.cells(3), store.genotypes("int8", backing="h5ad")
        options: dict[str, Any] = {"batch_size": 16, "chunk_size": 4, "preload_nchunks": 8, "densify": densify}
        with dl.DonorLoader(cells.path, genotypes.source, prefetch=0, **options) as loader:
            expected = [orders(loader) for _ in range(2)]
        with dl.DonorLoader(
            cells.path, genotypes.source, prefetch=prefetch, genotype_memory=memory, **options
        ) as loader:
            kept: list[list[Any]] = [[], []]
            for pair in zip(iter(loader), iter(loader), strict=True):
                for k, batch in enumerate(pair):
                    kept[k].append(batch)
        for k in range(2):
            assert orders(kept[k]) == expected[k]
            for batch in kept[k]:
                check_batch(batch, cells, genotypes, densify=densify)


class TestTheJoinIsChecked:
    """Each batch's donors are compared between the lanes, and `check=False` switches it off."""

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_a_sampler_of_global_state(self, store: Store, prefetch: int) -> None:
        """It cannot be replayed: cells and genotypes would follow two orders."""
        cells, genotypes = store.cells(3), store.genotypes()
        sampler = GlobalState(30, 10, drop_last=False, rng=np.random.default_rng(0))
        with (
            dl.DonorLoader(cells.path, genotypes.source, batch_sampler=sampler, prefetch=prefetch) as loader,
            pytest.raises((RuntimeError, ValueError), match=r"(?s)donor.*(sampler|order)") as caught,
        ):
            list(loader)
        assert "Row " in str(caught.value)

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_it_can_be_switched_off(self, store: Store, prefetch: int) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        sampler = GlobalState(30, 10, drop_last=False, rng=np.random.default_rng(0))
        with dl.DonorLoader(
            cells.path, genotypes.source, batch_sampler=sampler, prefetch=prefetch, check=False
        ) as loader:
            kept = list(loader)
        donors = np.concatenate([b["unique_donors"][as_numpy(b["donor_idx"])] for b in kept])
        rows = np.concatenate([as_numpy(b["index"]) for b in kept])
        assert (donors != cells.donor[rows]).any(), "wrong, as asked for: the check is what notices it"

    def test_a_sampler_that_gives_the_lanes_other_batches(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        sampler = FirstCallOnly(30, 10, drop_last=False, rng=np.random.default_rng(0))
        with (
            dl.DonorLoader(cells.path, genotypes.source, batch_sampler=sampler, prefetch=0) as loader,
            pytest.raises(RuntimeError, match="belong together"),
        ):
            list(loader)


class GlobalState(OwnRows):
    """Draws from numpy's global generator, as many samplers in the wild do."""

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        rows = np.random.permutation(n_obs)  # noqa: NPY002
        for start in range(0, n_obs, self.window):
            part = rows[start : start + self.window]
            yield {"requests": part, "splits": [np.arange(len(part))]}


class FirstCallOnly(OwnRows):
    """Says fewer cells the second time that it is asked."""

    calls: list[int] = []  # noqa: RUF012 - shared by all copies on purpose

    def _sample(self, n_obs: int) -> Iterator[LoadRequest]:
        self.calls.append(1)
        yield {"requests": np.arange(20), "splits": [np.arange(10), np.arange(10, 20)][: len(self.calls)]}


def child(script: str, blocks: Blocks, *, slow: bool = False) -> subprocess.Popen[str]:
    """A Python process with a loader in mid-pass; it says 'ready' when it is."""
    prelude = f"""
        import sys, time
        sys.path[:0] = {[str(Path(__file__).parent)]!r}
        import donorloader as dl
        from _faults import hooked_cells, hooked_genotypes
        cells, genotypes = {str(blocks.cells)!r}, {str(blocks.genotypes)!r}
        if {slow}:
            cells = hooked_cells(cells, lambda key: time.sleep(0.2))
            genotypes = hooked_genotypes(genotypes, lambda ids: time.sleep(0.3))
        loader = dl.DonorLoader(
            cells, genotypes, batch_size=10, chunk_size=10, preload_nchunks=1, prefetch=2, genotype_memory=0
        )
        def ready():
            print("ready", flush=True)
    """
    source = Path(dl.__file__).parents[1]
    path = os.pathsep.join([str(source), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def kill(process: subprocess.Popen[str]) -> str:
    """End a child that did not end itself, and what it had to say."""
    process.kill()
    return process.communicate()[1]


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    """Wait until a child says a line."""
    assert process.stdout is not None
    if (said := process.stdout.readline()) != line + "\n":
        pytest.fail(f"the child should say {line!r}, but said {said!r}: {kill(process)}")


def end_of(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Exit status and stderr of a child that must end in time."""
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running {seconds:.1f} s later: {kill(process)}")
    return process.returncode, stderr


@pytest.fixture(scope="module")
def in_time(blocks: Blocks) -> float:
    """2 s more than a process takes to end whose pass is over: torch alone takes seconds to go on a busy machine."""
    process = child("list(loader)\nloader.close()\nready()", blocks)
    wait_for(process, "ready")
    start = time.monotonic()
    assert end_of(process, 60)[0] == 0
    return 2 + 1.5 * (time.monotonic() - start)


def without_warnings(stderr: str) -> str:
    """What is left of stderr without the warnings of libraries."""
    lines, kept = stderr.splitlines(), []
    skip = False
    for line in lines:
        if "Warning: " in line:
            skip = True
        elif skip and line.startswith("  "):
            skip = False
        else:
            kept.append(line)
    return "\n".join(kept).strip()


class TestExit:
    @pytest.mark.parametrize(
        ("action", "status", "slow"),
        [
            ("break", 0, False),
            ("sys.exit(3)", 3, True),
            pytest.param("break", 0, True, marks=pytest.mark.slow),
            pytest.param("sys.exit(3)", 3, False, marks=pytest.mark.slow),
            pytest.param("raise ValueError('stop here')", 1, False, marks=pytest.mark.slow),
            pytest.param("raise ValueError('stop here')", 1, True, marks=pytest.mark.slow),
        ],
        ids=[
            "end_of_script-idle",
            "sys.exit-reading",
            "end_of_script-reading",
            "sys.exit-idle",
            "exception-idle",
            "exception-reading",
        ],
    )
    def test_in_mid_pass(self, blocks: Blocks, in_time: float, action: str, status: int, slow: bool) -> None:
        script = f"""
            iterator = iter(loader)  # a name that lives until the interpreter goes
            for k, batch in enumerate(iterator):
                if k == 3:
                    ready()
                    {action}
        """
        process = child(script, blocks, slow=slow)
        wait_for(process, "ready")
        code, stderr = end_of(process, in_time)
        assert code == status, stderr
        if status == 1:
            assert without_warnings(stderr).endswith("ValueError: stop here")
            assert stderr.count("Traceback") == 1
        else:
            assert without_warnings(stderr) == ""

    def test_while_another_thread_trains(self, blocks: Blocks, in_time: float) -> None:
        script = """
            import threading
            def train():
                for k, batch in enumerate(loader):
                    if k == 3:
                        ready()
                        begun.set()
                    time.sleep(0.02)
            begun = threading.Event()
            threading.Thread(target=train, daemon=True).start()
            begun.wait()
        """
        process = child(script, blocks, slow=True)
        wait_for(process, "ready")
        code, stderr = end_of(process, in_time)
        assert code == 0, stderr
        assert without_warnings(stderr) == ""

    @pytest.mark.parametrize("where", ["step", "waiting"])
    def test_ctrl_c(self, blocks: Blocks, in_time: float, where: str) -> None:
        """In the loop's own step, and while it waits for a lane that reads."""
        script = f"""
            try:
                for k, batch in enumerate(loader):
                    if k == 2:
                        ready()
                        {"time.sleep(30)" if where == "step" else "pass"}
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                raise
        """
        process = child(script, blocks, slow=where == "waiting")
        wait_for(process, "ready")
        time.sleep(0.1)  # until it is inside of what it does next
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        wait_for(process, "interrupted")
        assert time.monotonic() - start < 2
        code, stderr = end_of(process, in_time)
        assert code in (-signal.SIGINT, 128 + signal.SIGINT), stderr
        assert without_warnings(stderr).endswith("KeyboardInterrupt")
        assert stderr.count("Traceback") == 1
        assert "Exception ignored" not in stderr

    @pytest.mark.slow
    def test_the_loop_can_go_on_after_ctrl_c(self, blocks: Blocks) -> None:
        script = """
            try:
                for batch in loader:
                    ready()
                    time.sleep(30)
            except KeyboardInterrupt:
                pass
            from _faults import lanes, wait_until
            assert wait_until(lambda: not lanes()), lanes()
            assert sum(1 for _ in loader) == 20
        """
        process = child(script, blocks)
        wait_for(process, "ready")
        process.send_signal(signal.SIGINT)
        code, stderr = end_of(process, 30)
        assert code == 0, stderr
        assert without_warnings(stderr) == ""


def test_the_blocks_are_what_they_are_said_to_be(blocks: Blocks) -> None:
    with dl.DonorLoader(blocks.cells, blocks.genotypes, **ONE_DONOR_A_BATCH) as loader:
        kept = list(loader)
    assert [list(b["unique_donors"]) for b in kept] == [[f"d{k:02d}"] for k in range(N_BATCHES)]
