"""One line in an existing annbatch loop: the features are those of each batch's donors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from annbatch import Loader

import donorloader as dl
from _data import as_numpy, open_collection
from _faults import LaneError, hooked_genotypes, lanes, wait_until
from _samplers import KINDS, make_sampler

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _data import Cells, Genotypes, Store


def check(
    batches: Iterable[dict[str, Any]], cells: Cells, genotypes: Genotypes, key: str = "donor_features"
) -> list[int]:
    """Compare all batches with the naive join; returns the rows of X, read off its values."""
    rows = []
    for batch in batches:
        assert {"X", "obs", key, "unique_donors", "donor_idx"} <= set(batch)
        ids = [str(i) for i in batch["obs"]["donor_id"]]
        unique, position = np.asarray(batch["unique_donors"], dtype=object), as_numpy(batch["donor_idx"])
        assert position.dtype == np.int64
        assert list(unique) == sorted(set(ids))
        assert list(unique[position]) == ids
        np.testing.assert_array_equal(as_numpy(batch[key]), genotypes.rows(unique))
        assert as_numpy(batch[key]).dtype == genotypes.values.dtype
        row = batch["obs"]["row"].to_numpy()
        np.testing.assert_array_equal(as_numpy(batch["X"]), cells.x[row])
        assert list(cells.donor[row]) == ids
        if batch["index"] is not None:
            np.testing.assert_array_equal(batch["index"], row)
        rows += row.tolist()
    return rows


def sampler_of(kind: str, cells: Cells, *, drop_last: bool = False) -> Any:
    return make_sampler(kind, cells, chunk_size=6, preload_nchunks=4, batch_size=8, drop_last=drop_last, seed=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", ["torch", None])
def test_each_sampler(store: Store, kind: str, to: Any) -> None:
    cells, genotypes = store.cells(3), store.genotypes("int8", backing="h5ad")
    loader = Loader(batch_sampler=sampler_of(kind, cells), to=to, return_index=to is None, preload_to_gpu=False)
    loader.use_collection(open_collection(cells.path))
    batches = list(dl.attach_donor_features(loader, genotypes.source))
    assert len(batches) == len(loader)
    rows = check(batches, cells, genotypes)
    if kind in ("sequential", "no_splits"):
        assert rows == list(range(cells.n_obs))
    if to == "torch":
        assert isinstance(batches[0]["donor_features"], torch.Tensor)
        assert isinstance(batches[0]["donor_idx"], torch.Tensor)
    else:
        assert isinstance(batches[0]["donor_features"], np.ndarray)


@pytest.mark.parametrize("n_datasets", [1, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_many_epochs_in_a_row(store: Store, n_datasets: int, drop_last: bool) -> None:
    """annbatch's generator moves on from pass to pass, and further after a pass broken off."""
    cells, genotypes = store.cells(n_datasets), store.genotypes("float32")
    loader = Loader(
        batch_size=10,
        chunk_size=5,
        preload_nchunks=4,
        shuffle=True,
        drop_last=drop_last,
        rng=np.random.default_rng(2),
        preload_to_gpu=False,
    )
    loader.add_adatas(cells.adatas)
    seen = set()
    for epoch in range(4):
        rows = check(dl.attach_donor_features(loader, genotypes.source), cells, genotypes)
        assert len(rows) == (cells.n_obs // 10 * 10 if drop_last else cells.n_obs)
        assert len(set(rows)) == len(rows)
        seen.add(tuple(rows))
        if epoch % 2:
            for k, batch in enumerate(dl.attach_donor_features(loader, genotypes.source)):
                check([batch], cells, genotypes)
                if k == 2:
                    break
    assert len(seen) == 4


def test_the_order_is_the_loaders_own(store: Store) -> None:
    """Attaching does not change which cells come when, nor what a later plain pass gives."""
    cells, genotypes = store.cells(3), store.genotypes()

    def make() -> Loader[Any, Any]:
        loader = Loader(batch_sampler=sampler_of("random", cells), return_index=True, preload_to_gpu=False)
        return loader.use_collection(open_collection(cells.path))

    plain, attached = make(), make()
    for _ in range(3):
        expected = [b["index"].tolist() for b in plain]
        got = [b["index"].tolist() for b in dl.attach_donor_features(attached, genotypes.source)]
        assert got == expected
    assert [b["index"].tolist() for b in attached] == [b["index"].tolist() for b in plain]


def test_a_generator_moved_by_others(store: Store) -> None:
    """Who draws from the sampler's generator in mid-pass changes the batches to come: refused, never wrong."""
    cells, genotypes = store.cells(3), store.genotypes()
    rng = np.random.default_rng(0)
    sampler = make_sampler("random", cells, chunk_size=6, preload_nchunks=4, batch_size=8)
    sampler.rng = rng
    loader = Loader(batch_sampler=sampler, preload_to_gpu=False).use_collection(open_collection(cells.path))
    batches = []

    def meddle() -> None:
        for batch in dl.attach_donor_features(loader, genotypes.source):
            rng.random(5)
            batches.append(batch)

    with pytest.raises(RuntimeError, match=r"(?s)not of the donors that were planned.*sampler"):
        meddle()
    assert batches
    check(batches, cells, genotypes)  # up to there


def test_names_and_layer(store: Store) -> None:
    cells, genotypes = store.cells(3), store.genotypes("float64")
    adata = genotypes.source.copy()
    adata.layers["dosage"] = genotypes.values + 0.25
    adatas = []
    for dataset in cells.adatas:
        dataset = dataset.copy()
        dataset.obs["patient"] = dataset.obs["donor_id"]
        adatas.append(dataset)
    loader = Loader(batch_sampler=sampler_of("random", cells), preload_to_gpu=False).add_adatas(adatas)
    for batch in dl.attach_donor_features(loader, adata, donor_id_key="patient", layer="dosage", key="g"):
        assert "donor_features" not in batch
        np.testing.assert_array_equal(as_numpy(batch["g"]), genotypes.rows(batch["unique_donors"]) + 0.25)


def test_g_as_store_and_path(store: Store) -> None:
    cells = store.cells(3)
    for backing in ("memory", "zarr", "h5ad", "collection", "backed"):
        genotypes = store.genotypes("uint8", csr=True, backing=backing)
        for source in (genotypes.source, dl.open_genotypes(genotypes.source)):
            loader = Loader(batch_sampler=sampler_of("own_rows", cells), preload_to_gpu=False)
            loader.add_adatas(cells.adatas)
            assert sorted(check(dl.attach_donor_features(loader, source), cells, genotypes)) == list(range(cells.n_obs))


class TestEnds:
    """The thread that reads ahead ends with the loop."""

    def test_broken_off_or_dropped(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes("int8", backing="h5ad")
        loader = Loader(batch_sampler=sampler_of("random", cells), preload_to_gpu=False).add_adatas(cells.adatas)
        opened = dl.open_genotypes(genotypes.source)
        for stop in range(5):
            for k, _ in enumerate(dl.attach_donor_features(loader, opened)):
                if k == stop:
                    break
            batches = dl.attach_donor_features(loader, opened)
            next(batches)
            assert lanes()
            del batches
            assert wait_until(lambda: not lanes())
        opened.close()

    @pytest.mark.parametrize("at", [0, 3])
    def test_an_error_while_reading(self, store: Store, at: int) -> None:
        cells, genotypes = store.cells(3), store.genotypes("int8", backing="h5ad")
        error = LaneError("the disk is on fire")
        reads = iter(range(100))

        def hook(_ids: list[str]) -> None:
            if next(reads) == at:
                raise error

        loader = Loader(batch_sampler=sampler_of("sequential", cells), preload_to_gpu=False).add_adatas(cells.adatas)
        batches = dl.attach_donor_features(loader, hooked_genotypes(genotypes.source, hook), genotype_memory=0)
        with pytest.raises(LaneError) as caught:
            list(batches)
        assert caught.value is error
        assert any("genotype" in note for note in caught.value.__notes__)
        assert wait_until(lambda: not lanes())

    def test_an_error_of_the_loop(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        loader = Loader(batch_sampler=sampler_of("sequential", cells), preload_to_gpu=False).add_adatas(cells.adatas)

        def fail() -> None:
            for _ in dl.attach_donor_features(loader, genotypes.source):
                _ = 1 / 0

        with pytest.raises(ZeroDivisionError):
            fail()
        assert wait_until(lambda: not lanes())


class TestRefused:
    def test_no_donor_column(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        loader = Loader(batch_size=8, chunk_size=8, preload_nchunks=1, preload_to_gpu=False)
        loader.use_collection(open_collection(cells.path))
        with pytest.raises(KeyError, match="patient") as caught:
            next(iter(dl.attach_donor_features(loader, genotypes.source, donor_id_key="patient")))
        assert "cell_type" in str(caught.value), "says which columns there are"

    def test_no_obs(self, store: Store) -> None:
        cells, genotypes = store.cells(1), store.genotypes()
        loader = Loader(batch_size=8, chunk_size=8, preload_nchunks=1, preload_to_gpu=False)
        loader.add_datasets([cells.adatas[0].X])
        with pytest.raises((KeyError, ValueError), match="obs"):
            next(iter(dl.attach_donor_features(loader, genotypes.source)))

    def test_a_donor_without_genotypes(self, store: Store) -> None:
        cells, genotypes = store.cells(3), store.genotypes()
        few = genotypes.source[genotypes.ids != "d11"].copy()
        loader = Loader(batch_sampler=sampler_of("sequential", cells), preload_to_gpu=False)
        loader.use_collection(open_collection(cells.path))
        with pytest.raises((KeyError, ValueError), match="d11"):
            list(dl.attach_donor_features(loader, few))

    def test_something_that_is_no_loader(self, store: Store) -> None:
        with pytest.raises((TypeError, AttributeError), match=r"annbatch|Loader|loader"):
            next(iter(dl.attach_donor_features([1, 2], store.genotypes().source)))  # type: ignore[arg-type]
