"""Recycled memory is lent to one array at a time, for as long as anything refers to it."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import donorloader as dl
from donorloader._buffers import BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from _data import Store

SHAPE = (512, 1024)  # 2 MB, above what the pool leaves to the allocator


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again() -> None:
    pool = BufferPool()
    first = pool.empty(SHAPE, np.float32)
    where = address(first)
    del first
    assert address(pool.empty(SHAPE, np.float32)) == where


@pytest.mark.parametrize(
    "keep",
    [
        lambda array: array[3:5],
        lambda array: array.reshape(-1)[::7],
        lambda array: array.view(np.int32),
        lambda array: np.asarray(array),
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[1],
        lambda array: torch.from_numpy(array).view(-1)[5:],
        lambda array: torch.from_numpy(array)[2].numpy(),
        lambda array: torch.from_numpy(array).detach(),
        lambda array: memoryview(array),
    ],
    ids=["slice", "strided", "view", "asarray", "tensor", "row", "flat", "back in numpy", "detached", "memoryview"],
)
def test_memory_in_use_is_never_lent_again(keep: Callable[[np.ndarray], object]) -> None:
    pool = BufferPool()
    array = pool.empty(SHAPE, np.float32)
    array[...] = 7
    where = address(array)
    kept = keep(array)
    del array
    gc.collect()
    others = [pool.empty(SHAPE, np.float32) for _ in range(3)]
    assert where not in map(address, others)
    for other in others:
        other[...] = -1
    expected = np.float32(7).view(np.int32) if getattr(kept, "dtype", None) == np.int32 else 7
    assert (np.asarray(kept) == expected).all()
    del kept, other, others
    gc.collect()
    assert where in [address(a) for a in [pool.empty(SHAPE, np.float32) for _ in range(4)]]


def test_free_buffers_are_bounded() -> None:
    pool = BufferPool(keep=2)
    lent = [pool.empty(SHAPE, np.uint8) for _ in range(6)]
    lent.clear()
    gc.collect()
    assert len(pool._free) == 2


def test_what_comes_back_while_the_pool_is_at_work_is_kept() -> None:
    """A garbage collection may give a buffer back on the very thread that holds the pool's lock."""
    pool = BufferPool(keep=2)
    lent = [pool.empty(SHAPE, np.uint8) for _ in range(4)]
    with pool._lock:
        lent.clear()
        gc.collect()
    assert not pool._free
    pool.empty(SHAPE, np.uint8)
    assert len(pool._free) == 2
    pool.clear()
    assert not pool._free
    assert not pool._returned


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what pools had to take from the system."""
    monkeypatch.setattr("donorloader._buffers._SMALL", 0)
    sizes: list[int] = []
    take = BufferPool._take

    def counted(self: BufferPool, nbytes: int) -> np.ndarray:
        self._tidy()
        held = {memory.ctypes.data for memory in self._free}
        memory = take(self, nbytes)
        if memory.ctypes.data not in held:
            sizes.append(nbytes)
        return memory

    monkeypatch.setattr(BufferPool, "_take", counted)
    return sizes


@pytest.mark.parametrize("densify", [False, True])
def test_an_epoch_takes_no_fresh_memory(store: Store, fresh: list[int], densify: bool) -> None:
    """After the first one, whatever the loop and the lanes have in hand, and however late batches are let go of."""
    options = {"batch_size": 16, "chunk_size": 4, "preload_nchunks": 16, "densify": densify}
    with dl.DonorLoader(store.cells(3).path, store.genotypes().source, **options) as loader:
        for _ in range(2):  # the lanes run full, then empty
            for _batch in loader:
                time.sleep(0.002)
            del _batch
        first = len(fresh)
        for _ in range(4):
            for number, _batch in enumerate(loader):
                time.sleep(0.01 if number % 8 == 0 else 0)
            del _batch
        n_batches = 4 * len(loader)
    assert len(fresh) - first <= n_batches // 4, (first, len(fresh) - first, n_batches)


@pytest.mark.filterwarnings("ignore:Bags are read fastest:UserWarning")
def test_nor_do_dense_bags_within_a_budget(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is larger than all that may wait is used again all the same."""
    monkeypatch.setattr("donorloader._buffers._SMALL", 0)
    monkeypatch.setattr("donorloader.bags.window_budget", lambda *_args, **_options: (10_000, 1))
    with dl.BagLoader(store.cells(3).path, bags_per_batch=2, densify=True) as loader:
        dense = loader._engine._dense_pool
        for _batch in loader:
            pass
        del _batch
        assert dense._free  # where the last batches went, and the next ones come from


def test_a_buffer_may_be_lent_smaller_but_not_much_smaller() -> None:
    pool = BufferPool()
    large = pool.empty(SHAPE, np.float32)
    where = address(large)
    del large
    half = pool.empty((SHAPE[0] // 2, SHAPE[1]), np.float32)
    assert address(half) == where
    del half
    assert address(pool.empty((SHAPE[0] // 4, SHAPE[1]), np.float32)) != where


def test_a_list_of_all_batches_stays_right(store: Store) -> None:
    """Keeping every batch of an epoch keeps its values, dense X and wide genotypes included."""
    cells, genotypes = store.cells(3), store.genotypes()
    wide = np.repeat(genotypes.values, 20_000, axis=1)
    import anndata as ad
    import pandas as pd

    G = ad.AnnData(
        wide,
        obs=pd.DataFrame(index=pd.Index(genotypes.ids, dtype=object)),
        var=pd.DataFrame(index=[f"v{i}" for i in range(wide.shape[1])]),
    )
    with dl.DonorLoader(cells.path, G, batch_size=32, chunk_size=8, preload_nchunks=8, densify=True) as loader:
        batches = list(loader)
    row_of = {donor: row for row, donor in enumerate(genotypes.ids)}
    for batch in batches:
        np.testing.assert_array_equal(batch["X"].numpy(), cells.x[batch["index"].numpy()])
        rows = [row_of[donor] for donor in batch["unique_donors"]]
        np.testing.assert_array_equal(batch["donor_features"].numpy(), wide[rows])
