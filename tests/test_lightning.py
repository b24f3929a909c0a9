"""Lightning's Trainer, under both of its names, on our data modules: tiny models, CPU, no files."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import numpy as np
import pandas as pd
import pytest
import torch
from annbatch.samplers import WeightedClassSampler

import donorloader as dl
from _data import N_GENES
from _join import orders
from donorloader.integrations._lightning import is_on

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import pytorch_lightning

if TYPE_CHECKING:
    from pathlib import Path

    from _data import Store

BOTH = pytest.mark.parametrize("pl", [lightning.pytorch, pytorch_lightning], ids=["lightning", "pytorch_lightning"])

pytestmark = [
    pytest.mark.filterwarnings("ignore:Bags are read fastest"),
]


def trainer(pl: Any, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    return pl.Trainer(accelerator="cpu", devices=1, num_sanity_val_steps=0, **{**quiet, **options})


def small_model(pl: Any) -> Any:
    """A model that notes which cells it has seen, and whose prediction is the sum of a cell's counts."""

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(N_GENES, 1)
            self.seen: dict[str, list[Any]] = {"train": [], "val": [], "test": []}
            self.losses: list[float] = []

        def step(self, batch: dict[str, Any], stage: str) -> torch.Tensor:
            rows = batch["index"].tolist()
            self.seen[stage].append((self.current_epoch, rows))
            x = batch["X"] if "X" in batch else batch["x"]
            x = x.to_dense() if x.layout != torch.strided else x
            return (self.layer(torch.log1p(x)) ** 2).mean()

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            loss = self.step(batch, "train")
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.log("val", self.step(batch, "val"), batch_size=len(batch["index"]))

        def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.step(batch, "test")

        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, torch.Tensor]:
            x = batch["X"].to_dense()
            return {"index": batch["index"], "sum": x.sum(dim=1), "z": x[:, :2]}

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    return Model()


def rows_of(epochs: list[Any], epoch: int) -> list[int]:
    return [row for at, rows in epochs if at == epoch for row in rows]


@BOTH
def test_fit_test_predict(store: Store, pl: Any) -> None:
    cells, genotypes = store.cells(3), store.genotypes().source
    split = dl.split_donors(cells.path, seed=1)
    with dl.DonorDataModule(cells.path, genotypes, split=split, batch_size=32, drop_last=True, seed=4) as data:
        assert isinstance(data, pl.LightningDataModule)
        next(iter(data.loader("train")))  # a pass of somebody else's: epochs are the Trainer's all the same
        model = small_model(pl)
        fitter = trainer(pl, max_epochs=2)
        fitter.fit(model, datamodule=data)
        fitter.test(model, datamodule=data, verbose=False)
        predictions = fitter.predict(model, datamodule=data)
        table = dl.collect_cells(data, predictions)

    # training: the loader's own passes 0 and 1; the rest complete, in order, the same each time
    with dl.DonorLoader(cells.path, genotypes, donors=split["train"], batch_size=32, drop_last=True, seed=4) as loader:
        for epoch in range(2):
            assert rows_of(model.seen["train"], epoch) == [row for batch in loader for row in batch["index"].tolist()]
    for epoch in range(2):
        assert rows_of(model.seen["val"], epoch) == list(cells.rows(donors=split["val"]))
    assert [row for _, rows in model.seen["test"] for row in rows] == list(cells.rows(donors=split["test"]))
    assert list(table.index) == list(range(cells.n_obs))
    np.testing.assert_array_equal(table["sum"], cells.x.sum(axis=1))
    np.testing.assert_array_equal(table[["z_0", "z_1"]], cells.x[:, :2])


@pytest.mark.parametrize(
    ("pl", "kind", "stop_after"),  # of 6 batches an epoch (bags: 5): within one, and at its end
    [
        (lightning.pytorch, "cells", 6),
        (lightning.pytorch, "bags", 7),
        (lightning.pytorch, "livi", 9),
        (pytorch_lightning, "cells", 3),
    ],
    ids=["cells-end-of-epoch", "bags", "livi", "cells-pytorch_lightning"],
)
def test_resumed_in_mid_epoch(store: Store, tmp_path: Path, pl: Any, kind: str, stop_after: int) -> None:
    """The loss curve of an interrupted run is that of one that was not."""
    cells = store.cells(3)

    def run(stop: int | None, checkpoint: Path | None) -> tuple[list[float], Any]:
        class Stop(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == stop:
                    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
                    raise KeyboardInterrupt

        split = {"train": None, "val": None}
        if kind == "livi":
            data: Any = dl.LIVIDataModule(cells.path, covariates=["run"], batch_size=32, seed=3, split=split)
        elif kind == "bags":
            data = dl.DonorDataModule(cells.path, bags=True, bags_per_batch=3, seed=3, split=split)
        else:
            data = dl.DonorDataModule(cells.path, batch_size=32, seed=3, split=split)
        model = small_model(pl)
        fitter = trainer(pl, max_epochs=2, limit_val_batches=0, callbacks=[Stop()])
        with data:
            if stop is None:
                fitter.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
            else:
                with pytest.raises(SystemExit):
                    fitter.fit(model, datamodule=data)
        return model.losses, model.seen["train"]

    losses, seen = run(None, None)
    before, seen_before = run(stop_after, None)
    after, seen_after = run(None, tmp_path / "stopped.ckpt")
    assert len(before) == stop_after
    assert seen_before + seen_after == seen
    np.testing.assert_allclose(before + after, losses, rtol=0, atol=1e-6)


@BOTH
@pytest.mark.parametrize("by", ["flag", "factory"])
def test_bags(store: Store, pl: Any, by: str) -> None:
    cells = store.cells(3)
    split = {"train": "n_cells > 12", "val": ["d1", "d2"]}

    def make(study: Any, genotypes: Any, *, drop_last: bool, **options: Any) -> dl.BagLoader:
        return dl.BagLoader(study, genotypes, **options)

    how = {"bags": True} if by == "flag" else {"loader": make}
    with dl.DonorDataModule(cells.path, split=split, bags_per_batch=3, **how) as data:
        model = small_model(pl)
        trainer(pl, max_epochs=1).fit(model, datamodule=data)
    counts = pd.Series(cells.donor).value_counts()
    expected = cells.rows(donors=counts.index[counts > 12])
    assert sorted(rows_of(model.seen["train"], 0)) == list(expected)
    assert sorted(rows_of(model.seen["val"], 0)) == list(cells.rows(donors=["d1", "d2"]))


def test_balance_is_for_training_alone(store: Store) -> None:
    cells = store.cells(3)
    with dl.DonorDataModule(
        cells.path, split={"train": None, "val": None}, bags=True, donor_weights={"d1": 1}, n_bags=5
    ) as data:
        assert {d for batch in data.loader("train") for d in batch["donors"]} == {"d1"}
        assert {d for batch in data.loader("val") for d in batch["donors"]} == set(cells.donor)


@BOTH
def test_the_next_epoch_is_read_for_training_alone(store: Store, pl: Any) -> None:
    cells = store.cells(3)
    expected = [orders(epoch_of(cells.path, epoch)) for epoch in range(3)]
    with dl.DonorDataModule(
        cells.path, split={"train": None, "val": None}, batch_size=32, read_next_epoch=True, prefetch=2
    ) as data:
        model = small_model(pl)
        trainer(pl, max_epochs=3).fit(model, datamodule=data)
        assert model.seen["train"] == [(epoch, batch) for epoch in range(3) for batch in expected[epoch]]
    with dl.DonorDataModule(cells.path, split={"train": None, "val": None}, read_next_epoch=True) as data:
        assert [data.loader(stage)._engine.reads_next_epoch for stage in ("train", "val", "predict")] == [
            True,
            False,
            False,
        ]


def epoch_of(path: Path, epoch: int) -> dl.DonorLoader:
    loader = dl.DonorLoader(path, batch_size=32)
    loader.set_epoch(epoch)
    return loader


def test_a_sampler_is_for_training_alone(store: Store) -> None:
    cells = store.cells(3)
    runs = pd.Categorical(cells.obs["run"])
    sizes = {"chunk_size": 10, "preload_nchunks": 4, "batch_size": 20}
    sampler = WeightedClassSampler(**sizes, classes=runs, num_samples=160, class_weights=[1.0, 0.0, 0.0])
    for options, size in (({}, 20), ({"batch_size": 64}, 64)):
        split = {"train": None, "val": ["d1", "d2", "d3"]}
        with dl.DonorDataModule(cells.path, split=split, batch_sampler=sampler, **options) as data:
            drawn = [row for batch in data.loader("train") for row in batch["index"].tolist()]
            assert len(drawn) == 160
            assert set(runs[drawn]) == {"r0"}
            val = [batch["index"].tolist() for batch in data.loader("val")]
            assert [row for rows in val for row in rows] == list(cells.rows(donors=split["val"]))
            assert len(val[0]) == min(size, cells.rows(donors=split["val"]).size)


@BOTH
def test_no_validation_split(store: Store, pl: Any) -> None:
    data = dl.DonorDataModule(store.cells(3).path, batch_size=64)
    model = small_model(pl)
    with pytest.warns(UserWarning, match="have no `val_dataloader`"):  # Lightning sees that there is none, and says so
        trainer(pl, max_epochs=1).fit(model, datamodule=data)
    assert sorted(rows_of(model.seen["train"], 0)) == list(range(181))
    assert model.seen["val"] == []


@pytest.mark.parametrize("way", [lambda made: pickle.loads(pickle.dumps(made)), copy.deepcopy])
def test_a_data_module_is_sent(store: Store, way: Any) -> None:
    cells = store.cells(3)
    split = dl.split_cells(cells.path, fractions={"train": 0.8, "val": 0.2})
    with dl.DonorDataModule(cells.path, split=split, batch_size=32) as data:
        data.trainer = SimpleNamespace(
            strategy=SimpleNamespace(root_device=torch.device("cpu")), global_rank=0, world_size=1
        )
        expected = [batch["index"].tolist() for batch in data.loader("train")]
        with way(data) as twin:
            assert isinstance(twin, lightning.pytorch.LightningDataModule)
            assert isinstance(twin, pytorch_lightning.LightningDataModule)
            assert twin.loader("train") is not data.loader("train")
            assert [batch["index"].tolist() for batch in twin.loader("train")] == expected
    assert way(dl.CellsPerSecond(3)).__dict__ == dl.CellsPerSecond(3).__dict__ | {"_began": ANY}


@BOTH
@pytest.mark.parametrize("batches", [2, 10])  # of 6 an epoch: then at its end
def test_speed_is_shown(store: Store, pl: Any, batches: int) -> None:
    callback = dl.CellsPerSecond(batches=batches)
    assert isinstance(callback, pl.Callback)
    fitter = trainer(pl, max_epochs=1, callbacks=[callback])
    data = dl.DonorDataModule(store.cells(3).path, split={"train": None, "val": ["d1"]}, batch_size=32)
    fitter.fit(small_model(pl), datamodule=data)
    assert 0 < fitter.progress_bar_metrics["cells/s"] < 1e7


def test_batches_are_copied_to_a_device_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dl.DonorDataModule(store.cells(3).path, batch_size=32)
    copied = []
    monkeypatch.setattr(
        pytorch_lightning.LightningDataModule, "transfer_batch_to_device", lambda *a: copied.append(a) or a[1]
    )
    monkeypatch.setattr(
        lightning.pytorch.LightningDataModule, "transfer_batch_to_device", lambda *a: copied.append(a) or a[1]
    )
    batch = next(iter(data.loader("train")))
    cpu, elsewhere = torch.device("cpu"), torch.device("meta")
    assert data.transfer_batch_to_device(batch, cpu, 0) is batch
    assert not copied
    data.transfer_batch_to_device(batch, elsewhere, 0)
    assert len(copied) == 1
    assert not is_on({"a": [batch["index"], batch["index"].to("meta")]}, cpu)
    assert is_on({"donors": batch["unique_donors"], "obs": None}, elsewhere)


def as_rank(rank: int, world_size: int) -> Any:
    """What a data module asks of a Trainer of several processes."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(global_rank=rank, world_size=world_size, current_epoch=1, strategy=strategy)


@pytest.mark.parametrize("bags", [False, True])
def test_ranks_share_an_epoch(store: Store, bags: bool) -> None:
    cells = store.cells(3)
    options = {"bags": True, "bags_per_batch": 2} if bags else {"batch_size": 16}
    shares: dict[str, list[list[list[int]]]] = {"train": [], "val": []}
    for rank in range(2):
        with dl.DonorDataModule(cells.path, split={"train": None, "val": None}, seed=1, **options) as data:
            assert len(data.loader("train")) == len(data.loader("val"))  # opened before the Trainer is known
            data.trainer = as_rank(rank, 2)
            assert not isinstance(data.train_dataloader(), torch.utils.data.DataLoader)
            for stage, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
                shares[stage].append([batch["index"].tolist() for batch in loader])
            with pytest.raises(RuntimeError, match="2 processes"):
                data.predict_dataloader()
    for stage, (first, second) in shares.items():
        assert len(first) == len(second)
        one, other = ({row for rows in share for row in rows} for share in (first, second))
        if stage == "val" or not bags:  # of 13 bags, training leaves one out
            assert one | other == set(range(181))
        if stage == "train":
            assert not one & other


@pytest.mark.slow
@pytest.mark.timeout(320)  # the processes import torch and Lightning one after the other
def test_ddp(store: Store, tmp_path: Path) -> None:
    """Two processes of a real Trainer: other cells, all of them, and the same model in the end."""
    script = tmp_path / "train.py"
    script.write_text(DDP)
    done = subprocess.run(
        [sys.executable, script, str(store.cells(3).path), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for epoch in range(2):
        one, other = (set(result["rows"][epoch]) for result in results)
        assert not one & other
        assert one | other == set(range(181))
    assert results[0]["rows"][0] != results[0]["rows"][1]
    assert results[0]["weight"] == results[1]["weight"]


DDP = """
import json, sys
import torch
from annbatch.samplers import WeightedClassSampler
import pytorch_lightning as pl
import donorloader as dl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.rows = torch.nn.Linear(11, 1), [[], []]
    def training_step(self, batch, batch_idx):
        self.rows[self.current_epoch] += batch["index"].tolist()
        return self.layer(torch.log1p(batch["X"])).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

pl.seed_everything(0)
data, model = dl.DonorDataModule(sys.argv[1], batch_size=16, densify=True), Model()
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(model, datamodule=data)
with open(f"{sys.argv[2]}/rank{trainer.global_rank}.json", "w") as file:
    json.dump({"rows": model.rows, "weight": model.layer.weight.tolist()}, file)
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split": {"training": None}}, ["training", "train, val, test, predict"]),
        ({"bags": True, "loader": dl.BagLoader}, ["give one"]),
        ({"bags": True, "batch_size": 4}, ["bags_per_batch"]),
    ],
)
def test_errors(store: Store, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as caught:
        dl.DonorDataModule(store.cells(3).path, **options)
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(KeyError, match="no split 'test'"):
        dl.DonorDataModule(store.cells(3).path).loader("test")


@BOTH
def test_livi(store: Store, pl: Any) -> None:
    from test_livi import KNOWN, SmallLIVI, panel

    cells = store.cells(3)
    split = dl.split_cells(cells.path, fractions={"train": 0.8, "val": 0.2})
    with dl.LIVIDataModule(
        cells.path, panel(), split=split, covariates=["cell_type"], known_cis=KNOWN, batch_size=64, seed=2
    ) as data:

        class Model(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = SmallLIVI(data.n_genes, data.n_donors, data.n_cis_snps, data.covariates_dims)
                self.losses: dict[str, list[float]] = {"train": [], "val": []}

            def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
                loss = self.model.loss(batch)
                self.losses["train"].append(loss.item())
                return loss

            def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
                self.losses["val"].append(self.model.loss(batch).item())

            def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
                return batch["index"], batch["y"]

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.05)

        torch.manual_seed(0)
        model, fitter = Model(), trainer(pl, max_epochs=4)
        fitter.fit(model, datamodule=data)
        assert model.losses["val"][-1] < model.losses["val"][0]
        codes = dl.collect_cells(data, fitter.predict(model, datamodule=data))["prediction"]
        assert list(data.donor_categories[codes]) == list(cells.donor)
        assert data.missing_calls.sum() == 0


class TestCollect:
    def results(self, loader: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(batch["index"], batch["index"] * 2.0) for batch in loader]

    def test_any_order(self, store: Store) -> None:
        with dl.DonorLoader(store.cells(3).path, batch_size=32, donors=["d1", "d5"]) as loader:
            table = dl.collect_cells(loader, self.results(loader)[::-1])
        assert list(table.index) == list(store.cells(3).rows(donors=["d1", "d5"]))
        assert list(table["prediction"]) == [2.0 * row for row in table.index]

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            (lambda r: r[1:], ValueError, ["are missing"]),
            (lambda r: [*r, r[0]], ValueError, ["come more than once"]),
            (lambda r: [*r, (torch.tensor([999]), torch.zeros(1))], ValueError, ["are not the loader's", "row 999"]),
            (lambda r: [r[0][1]], TypeError, ["'index'"]),
            (lambda r: [(r[0][0], r[0][1][1:]), *r[1:]], ValueError, ["one row per cell"]),
            (lambda r: [{"index": r[0][0], "z": r[0][1]}, *r[1:]], ValueError, ["same columns"]),
            (lambda r: [], ValueError, ["181 are missing"]),
        ],
    )
    def test_errors(self, store: Store, change: Any, error: type[Exception], words: list[str]) -> None:
        with dl.DonorLoader(store.cells(3).path, batch_size=32) as loader:
            results = change(self.results(loader))
            with pytest.raises(error) as caught:
                dl.collect_cells(loader, results)
        assert all(word in str(caught.value) for word in words), caught.value
