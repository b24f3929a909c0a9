"""Loaders in the workers of torch's DataLoader, in other processes, and in forked ones."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from annbatch.samplers import RandomSampler

import donorloader as dl
from _data import as_numpy
from _join import check_batch, flat, orders

if TYPE_CHECKING:
    from _data import Store

pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")

SMALL: dict[str, Any] = {"batch_size": 8, "chunk_size": 4, "preload_nchunks": 8}


@pytest.fixture(scope="module")
def paths(store: Store) -> tuple[str, str]:
    return str(store.cells(3).path), str(store.genotypes(backing="zarr").source)


class TestSent:
    @pytest.mark.parametrize("way", [lambda loader: pickle.loads(pickle.dumps(loader)), copy.deepcopy])
    def test_a_twin_gives_the_same(self, paths: tuple[str, str], way: Any) -> None:
        for made, options in ((dl.DonorLoader, {**SMALL, "donors": iter(["d1", "d2"])}), (dl.BagLoader, {})):
            with made(*paths, rank=1, world_size=2, prefetch=0, **options) as loader, way(loader) as twin:
                assert orders(twin) == orders(loader)

    def test_open_genotypes_are_opened_again(self, store: Store, paths: tuple[str, str]) -> None:
        with dl.DonorLoader(paths[0], dl.open_genotypes(paths[1]), prefetch=0, **SMALL) as loader:
            twin = pickle.loads(pickle.dumps(loader))
            loader.close()
            for batch in twin:
                check_batch(batch, store.cells(3), store.genotypes())
            twin.close()

    def test_what_cannot_be_sent(self, store: Store, paths: tuple[str, str]) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        for arguments, options, match in (
            ((cells.adatas,), {}, "its cells are a list in memory"),
            ((paths[0], genotypes.source), {}, "its genotypes are a AnnData in memory"),
            (paths, {"batch_sampler": RandomSampler(4, 8, 8)}, "with batch_sampler="),
            (paths, {"device": "cpu"}, "with device='cpu'"),
        ):
            with dl.DonorLoader(*arguments, **options) as loader:
                with pytest.raises(TypeError, match=match):
                    pickle.dumps(loader)
                with pytest.raises(TypeError, match=r"num_workers=0"):
                    dl.dataloader(loader, num_workers=1)


class TestShares:
    """What workers do, without the processes."""

    @pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 2)])
    def test_of_cells(self, paths: tuple[str, str], ranks: int, workers: int) -> None:
        epochs = []
        for epoch in range(2):
            rows = []
            for rank in range(ranks):
                with dl.DonorLoader(*paths, rank=rank, world_size=ranks, prefetch=0, **SMALL) as loader:
                    twins = [pickle.loads(pickle.dumps(loader)) for _ in range(workers)]
                    kept = [list(twin.iterate_share(epoch, i, workers)) for i, twin in enumerate(twins)]
                    assert len({len(batches) for batches in kept}) == 1
                    assert sum(map(len, kept)) == loader.worker_batches(workers)
                    rows += [flat(batches) for batches in kept]
                    for twin in twins:
                        twin.close()
            together = np.concatenate(rows)
            assert np.unique(together).size == together.size > 181 - ranks * workers
            epochs.append([sorted(part) for part in rows])
        assert epochs[0] != epochs[1] or ranks * workers == 1

    def test_of_bags(self, paths: tuple[str, str]) -> None:
        with dl.BagLoader(*paths, bags_per_batch=2, prefetch=0) as loader:
            twins = [copy.deepcopy(loader) for _ in range(2)]
            bags = [list(chain(*(b["donors"] for b in t.iterate_share(0, i, 2)))) for i, t in enumerate(twins)]
            assert set(bags[0]).isdisjoint(bags[1])
            assert 12 <= len(bags[0] + bags[1]) <= 13
            for twin in twins:
                twin.close()


@pytest.mark.timeout(300)
class TestDataLoader:
    def test_no_workers_is_the_default(self, paths: tuple[str, str]) -> None:
        with dl.DonorLoader(*paths, **SMALL) as loader:
            expected = orders(loader)
            loader.set_epoch(0)
            assert orders(dl.dataloader(loader)) == expected

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_workers(self, store: Store, paths: tuple[str, str], method: Any) -> None:
        # the server's children are forked from it: with all that a loader imports, if nothing that runs
        multiprocessing.get_context("forkserver").set_forkserver_preload(["donorloader"])
        with dl.DonorLoader(*paths, **SMALL) as loader:
            batches = dl.dataloader(loader, num_workers=2, multiprocessing_context=method)
            rows = []
            for epoch in (0, 5):
                if epoch == 5:
                    loader.set_epoch(5)
                kept = list(batches)
                assert loader.epoch == epoch
                assert len(kept) == len(batches)
                for batch in kept:
                    check_batch(batch, store.cells(3), store.genotypes())
                rows.append([part.tolist() for part in map(as_numpy, (b["index"] for b in kept))])
            for epoch, parts in zip((0, 5), rows, strict=True):
                together = list(chain.from_iterable(parts))
                assert len(set(together)) == len(together) > 181 - 2
                twin = copy.deepcopy(loader)
                assert parts[0::2] == orders(twin.iterate_share(epoch, 0, 2))
                twin.close()

    def test_impossible(self, paths: tuple[str, str]) -> None:
        with dl.DonorLoader(*paths, num_canonical_shards=8, **SMALL) as loader:
            with pytest.raises(ValueError, match="by 'spawn' or 'forkserver', got 'fork'"):
                dl.dataloader(loader, num_workers=2, multiprocessing_context="fork")
            with pytest.raises(ValueError, match=r"3 does not divide 8\. Run on 1, 2, 4 or 8"):
                dl.dataloader(loader, num_workers=3)
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            with pytest.raises(ValueError, match="num_workers=0 only"):
                dl.dataloader(loader, num_workers=2)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    """A forked process has none of zarr's threads: it is told so, at once."""

    @pytest.mark.parametrize("iterated", [False, True])
    @pytest.mark.parametrize("what", ["the loader", "a new loader", "a bag"])
    def test_ends_in_an_error(self, paths: tuple[str, str], iterated: bool, what: str) -> None:
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        with dl.DonorLoader(*paths, **SMALL) as loader:
            if iterated:
                list(loader)

            def child() -> None:
                try:
                    if what == "the loader":
                        next(iter(loader))
                    elif what == "a new loader":
                        next(iter(dl.DonorLoader(*paths, **SMALL)))
                    else:
                        dl.BagDataset(*paths)[0]
                    send.send("nothing happened")
                except RuntimeError as error:
                    send.send(str(error))

            process = context.Process(target=child)
            process.start()
            try:
                assert receive.poll(10), "the child hangs"
                assert "fork" in receive.recv()
            finally:
                process.kill()
                process.join()
