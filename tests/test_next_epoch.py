"""The next epoch, read while the last batches of this one are used: the same batches, sooner, and nothing is left."""

from __future__ import annotations

import gc
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import donorloader as dl
from _data import as_numpy
from _faults import LaneError, hooked_cells, lanes, wait_until
from _join import check_batch, orders
from test_livi import batches as livi_batches
from test_livi import check as check_livi
from test_livi import panel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from _data import Store

pytestmark = pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")

SMALL: dict[str, Any] = {"batch_size": 8, "chunk_size": 4, "preload_nchunks": 8}
AHEAD: dict[str, Any] = {"read_next_epoch": True, **SMALL}


@pytest.fixture(autouse=True)
def no_threads_are_left() -> Iterator[None]:
    before = len(lanes())
    yield
    gc.collect()
    assert wait_until(lambda: len(lanes()) == before)


@pytest.fixture
def paths(store: Store) -> tuple[str, str]:
    return str(store.cells(3).path), str(store.genotypes(backing="zarr").source)


class Reads:
    """Cells whose reads are counted, and fail where they are to."""

    def __init__(self, path: Any) -> None:
        self.count, self.error = 0, None
        self.cells = hooked_cells(path, self._note)

    def _note(self, key: str) -> None:
        self.count += 1
        if self.error is not None:
            raise self.error


def pass_over(batches: Iterable[Any]) -> list[list[int]]:
    """Rows of every batch of a pass; the next one is waited for until it waits to be asked for."""
    seen = [as_numpy(batch["index"]).tolist() for batch in batches]
    time.sleep(0.05)
    return seen


class TestSameBatches:
    @pytest.mark.parametrize(
        ("donor_rows", "memory"), [("batch", "auto"), ("batch", 0), ("batch", 300), ("window", "auto"), ("window", 0)]
    )
    @pytest.mark.parametrize("densify", [False, True])
    def test_of_cells(self, store: Store, paths: Any, donor_rows: Any, memory: Any, densify: bool) -> None:
        """Every field of three epochs, in the order that they have without; 300 bytes hold some of the rows."""
        cells, genotypes = store.cells(3), store.genotypes(backing="zarr")
        made = {"donor_rows": donor_rows, "genotype_memory": memory, "densify": densify}
        with dl.DonorLoader(*paths, **made, **SMALL) as plain, dl.DonorLoader(*paths, **made, **AHEAD) as loader:
            for epoch in range(3):
                seen = []
                for batch in loader:
                    check_batch(batch, cells, genotypes, donor_rows=donor_rows, densify=densify)
                    seen.append(batch["index"].tolist())
                assert loader.epoch == epoch
                assert seen == orders(plain)

    def test_of_bags(self, paths: Any) -> None:
        with (
            dl.BagLoader(*paths, max_cells=9) as plain,
            dl.BagLoader(*paths, max_cells=9, read_next_epoch=True) as bags,
        ):
            for _ in range(3):
                for ours, expected in zip(bags, plain, strict=True):
                    assert list(ours["donors"]) == list(expected["donors"])
                    for name in ("X", "index", "offsets", "donor_features"):
                        np.testing.assert_array_equal(as_numpy(ours[name]), as_numpy(expected[name]))

    def test_of_livi(self, store: Store) -> None:
        cells, genotypes = store.cells(3), panel()
        made = livi_batches(cells, loader={"read_next_epoch": True})
        for _ in range(3):
            seen = []
            for batch in made:
                check_livi(batch, cells, genotypes, list(made.donor_categories))
                seen += batch["index"].tolist()
            assert sorted(seen) == list(range(cells.n_obs))
        plain = next(iter(made.loader))
        assert set(plain) > {"X", "donor_features"}, "the loader itself gives its own batches, though LIVI's wait"
        made.close()

    def test_with_workers(self, paths: Any) -> None:
        plain, ahead = (
            dl.dataloader(dl.DonorLoader(*paths, read_next_epoch=ahead, **SMALL), num_workers=1)
            for ahead in (False, True)
        )
        for _ in range(3):
            assert orders(ahead) == orders(plain)


class TestWhatIsAskedFor:
    """A pass that waits is used only if it is the one that is asked for."""

    @pytest.mark.parametrize("epoch", [0, 1, 5])
    def test_an_epoch_that_is_chosen(self, paths: Any, epoch: int) -> None:
        with dl.DonorLoader(*paths, **SMALL) as plain, dl.DonorLoader(*paths, **AHEAD) as loader:
            pass_over(loader)
            loader.set_epoch(epoch)
            plain.set_epoch(epoch)
            for _ in range(2):
                assert pass_over(loader) == orders(plain)

    def test_a_state_that_is_loaded(self, paths: Any) -> None:
        with dl.DonorLoader(*paths, **SMALL) as plain, dl.DonorLoader(*paths, **AHEAD) as loader:
            whole = pass_over(loader)
            assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0), "what waits is not there"
            first = next(islice(plain, 2, 3))["index"].tolist()
            assert first == whole[2]
            loader.load_state_dict(plain.state_dict())
            assert pass_over(loader) == whole[3:]
            assert pass_over(loader) == orders(plain)

    def test_a_state_of_other_ranks(self, paths: Any) -> None:
        """The order of a resumed epoch is replaced when it is over."""
        made = {"num_canonical_shards": 8, "rank": 0, **SMALL}
        with dl.DonorLoader(*paths, world_size=2, **made) as loader:
            next(islice(loader, 2, 3))
            state = loader.state_dict()
        results = []
        for ahead in (False, True):
            with dl.DonorLoader(*paths, world_size=4, read_next_epoch=ahead, **made) as loader:
                loader.load_state_dict(state)
                results.append([pass_over(loader) for _ in range(2)])
                loader.set_epoch(2)
                results[-1] += [pass_over(loader) for _ in range(2)]
        assert results[0] == results[1]

    def test_passes_side_by_side(self, paths: Any) -> None:
        with dl.DonorLoader(*paths, **SMALL) as plain, dl.DonorLoader(*paths, **AHEAD) as loader:
            one, two = iter(loader), iter(loader)
            pairs = list(zip(one, two, strict=True))
            for number in range(2):
                assert [pair[number]["index"].tolist() for pair in pairs] == orders(plain)
            assert pass_over(loader) == orders(plain)

    def test_a_pass_that_is_left_early(self, paths: Any) -> None:
        """The next one begins when all cells of this one are read, not before."""
        before = len(lanes())
        with (
            dl.DonorLoader(*paths, prefetch=1, **SMALL) as plain,
            dl.DonorLoader(*paths, prefetch=1, **AHEAD) as loader,
        ):
            for left in (0, 1, len(loader) - 1):
                for batch, expected in islice(zip(loader, plain, strict=False), left + 1):
                    assert batch["index"].tolist() == expected["index"].tolist()
                if left < len(loader) - 1:
                    gc.collect()
                    assert wait_until(lambda: len(lanes()) == before)
            assert pass_over(loader) == orders(plain)


class TestSooner:
    def test_is_read_before_it_is_asked_for(self, store: Store) -> None:
        """And, where it was, is not read again."""
        reads = Reads(store.cells(3).path)
        with dl.DonorLoader(reads.cells, **SMALL) as loader:
            pass_over(loader)
            of_a_pass = reads.count
        reads.count = 0
        with dl.DonorLoader(reads.cells, **AHEAD) as loader:
            pass_over(loader)
            assert wait_until(lambda: reads.count > of_a_pass)
            for batch in loader:
                del batch
            loader.set_epoch(7)  # what waits is not for this one
            assert reads.count <= 3 * of_a_pass
            gc.collect()
        with dl.DonorLoader(reads.cells, **SMALL) as loader:
            reads.count = 0
            pass_over(loader)
            assert reads.count == of_a_pass, "and without it, nothing is"

    @pytest.mark.parametrize("memory", [0, 300])
    def test_rows_under_a_budget_wait_for_their_pass(self, paths: Any, memory: int) -> None:
        """The budget is for one pass; what that one has left in it is still there for the next."""
        with (
            dl.DonorLoader(*paths, genotype_memory=memory, **SMALL) as plain,
            dl.DonorLoader(*paths, genotype_memory=memory, **AHEAD) as loader,
        ):
            for _ in range(3):
                pass_over(loader)
                pass_over(plain)
                assert loader.genotype_reads == plain.genotype_reads


class TestEnds:
    def test_closed(self, paths: Any) -> None:
        loader = dl.DonorLoader(*paths, prefetch=1, **AHEAD)
        pass_over(loader)
        assert lanes(), "one waits"
        loader.close()
        assert not lanes()

    @pytest.mark.parametrize("kind", ["cells", "bags", "livi"])
    def test_let_go_of(self, store: Store, paths: Any, kind: str) -> None:
        """Lanes that wait hold on to nothing that holds on to them."""
        blocked = {"read_next_epoch": True, "prefetch": 1}
        made: Any
        if kind == "livi":
            made = livi_batches(store.cells(3), loader=blocked)
        elif kind == "bags":
            made = dl.BagLoader(*paths, bags_per_batch=1, **blocked)
        else:
            made = dl.DonorLoader(*paths, **SMALL, **blocked)
        pass_over(made)
        assert lanes()
        del made
        gc.collect()
        assert wait_until(lambda: not lanes())

    def test_a_loop_that_outlives_its_loader(self, paths: Any) -> None:
        batches = iter(dl.DonorLoader(*paths, prefetch=1, **AHEAD))
        gc.collect()
        assert pass_over(batches)
        assert wait_until(lambda: not lanes()), "nobody could ask for the next pass"

    def test_an_error_is_of_the_pass_that_has_it(self, store: Store) -> None:
        reads = Reads(store.cells(3).path)
        with dl.DonorLoader(reads.cells, prefetch=2, **AHEAD) as loader:
            batches = iter(loader)
            seen = [next(batches)]
            while len(seen) < len(loader) - 2:
                seen.append(next(batches))
            assert wait_until(lambda: batches._conveyor.has_ended("cells"))
            reads.error = LaneError("the disk is on fire")
            seen += batches
            assert len(seen) == len(loader)
            assert loader.state_dict()["epoch"] == 1
            with pytest.raises(LaneError) as caught:
                pass_over(loader)
            assert "at batch 0 of epoch 1" in caught.value.__notes__[-1]
            reads.error = None
            loader.set_epoch(1)
            assert len(pass_over(loader)) == len(loader)

    def test_needs_threads(self, paths: Any) -> None:
        with pytest.raises(ValueError, match=r"prefetch=0 allows none"):
            dl.DonorLoader(*paths, prefetch=0, **AHEAD)
