"""Lightning's data modules: loaders for training, validation, test and prediction, from one study and its splits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from donorloader.bags import BagLoader
from donorloader.loader import DonorLoader

from ._lightning import EpochLoader, ResumableLoader, is_on, leave_to_lightning, make_with_lightning
from .livi import LIVIBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from donorloader.selections import Splits

__all__ = ["DonorDataModule", "LIVIDataModule"]

_STAGES = ("train", "val", "test", "predict")

# Options that are for training: when a model is evaluated, every cell, or bag, comes once, and the epoch is always 0.
_FOR_TRAINING = ("balance", "donor_weights", "n_bags", "batch_sampler", "read_next_epoch")


class DonorDataModule:
    """A study for a Lightning Trainer: ``Trainer.fit(model, datamodule=DonorDataModule("study/", split=split))``.

    It is a ``LightningDataModule`` of ``lightning`` and of ``pytorch_lightning``, whichever is imported when it is
    made.

    - Training is shuffled, another order each epoch of the Trainer. Validation, test and prediction come in the order
      of the collection, complete.
    - A checkpoint within an epoch has the place in it; ``fit(…, ckpt_path=…)`` goes on with the batch after it.
    - Batches go to the Trainer's device once: on a GPU ahead of the loop, by the loader itself.
    - With several processes (DDP), each takes its share of the cells or bags, in as many batches. Loaders are no torch
      ``DataLoader``, so no distributed sampler is put into them.

    Parameters
    ----------
    study, genotypes
        As for :class:`DonorLoader`, or :class:`BagLoader`.
    split
        What is used for ``"train"``, ``"val"``, ``"test"`` and ``"predict"``: from :func:`split_donors` or
        :func:`split_cells`, or a dict with what the argument `donors` of a loader takes. Default: all is for training.
        What has no ``"predict"`` predicts all that there is.
    bags
        Whether batches are bags.
    loader
        In place of `bags`, a function that makes loaders; it is called with `study`, `genotypes`, and as keywords
        `donors`, `shuffle`, `drop_last`, `device`, `seed` and `options`; with several processes, `rank`, `world_size`
        and `uneven` too.
    device
        Where loaders put batches. Default: the Trainer's device where that is a GPU.
    seed, batch_size, drop_last
        As for :class:`DonorLoader`; `drop_last` is for training alone, and so is a ``batch_sampler`` among `options`,
        beside which `batch_size` is that of the others, by default the sampler's. Bags have ``bags_per_batch`` among
        `options`.
    **options
        Any other option of the loader; what draws bags, and `read_next_epoch`, is for training alone.

    Raises
    ------
    ImportError
        If Lightning is not installed.
    ValueError
        If a split has another name, or the loader refuses an option.
    RuntimeError
        If a Trainer with several processes is to predict.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance that Lightning knows as its own."""
        made: Self = make_with_lightning(cls, "LightningDataModule")
        return made

    def __init__(
        self,
        study: Any,
        genotypes: Any = None,
        *,
        split: Splits | Mapping[str, Any] | None = None,
        bags: bool = False,
        loader: Callable[..., Any] | None = None,
        device: str | torch.device | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        **options: Any,
    ):
        self._trainer: Any = None
        parts = dict(split) if split is not None else {"train": None}
        if unknown := sorted(set(parts) - set(_STAGES)):
            raise ValueError(f"Splits of a data module are called {', '.join(_STAGES)}, got {', '.join(unknown)}.")
        if bags and loader is not None:
            raise ValueError("bags=True and loader=… both say what batches are: give one.")
        if bags and (batch_size is not None or drop_last):
            raise ValueError("Bags have bags_per_batch, and no batch_size nor drop_last.")
        self.study, self.genotypes = study, genotypes
        self.parts = {"predict": None, **parts}
        self._own = loader is None
        self._bags, self._make = bags, loader or (BagLoader if bags else DonorLoader)
        self._device, self._seed, self._drop_last = device, seed, drop_last
        self._options = options if batch_size is None else {"batch_size": batch_size, **options}
        self._open: dict[str, tuple[Any, Any]] = {}
        super().__init__()  # Lightning's

    def loader(self, stage: str) -> Any:
        """The loader of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``, opened when it is first asked for.

        Raises
        ------
        KeyError
            If there is no such split.
        """
        if stage not in self.parts:
            raise KeyError(f"There is no split {stage!r}, only {', '.join(self.parts)}.")
        place = self._place()
        if stage in self._open and self._open[stage][0] != place:  # opened before the Trainer was known
            self._open.pop(stage)[1].close()
        if stage not in self._open:
            self._open[stage] = place, self._make_loader(stage)
        return self._open[stage][1]

    def _make_loader(self, stage: str) -> Any:
        train = stage == "train"
        (rank, world_size), device = self._place()
        options = self._options if train else {k: v for k, v in self._options.items() if k not in _FOR_TRAINING}
        if (sampler := self._options.get("batch_sampler")) is not None:
            if train:  # it has a size of its own
                options = {k: v for k, v in options.items() if k != "batch_size"}
            elif sampler.batch_size is not None:
                options = {"batch_size": sampler.batch_size, **options}
        if not self._bags:
            options = {"drop_last": self._drop_last and train, **options}
        if self._own or world_size > 1:
            options = {"rank": rank, "world_size": world_size, **options}
            if not train:
                options = {"uneven": "pad", **options}
        return self._make(
            self.study,
            self.genotypes,
            donors=self.parts[stage],
            shuffle=train,
            device=device,
            seed=self._seed,
            **options,
        )

    def _place(self) -> tuple[tuple[int, int], Any]:
        """Which of the Trainer's processes this is, and where batches are to go."""
        trainer = self.trainer
        if trainer is None:
            return (0, 1), self._device
        root = trainer.strategy.root_device
        device = root if self._device is None and root.type == "cuda" else self._device
        return (trainer.global_rank, trainer.world_size), device

    @property
    def trainer(self) -> Any:
        """The Trainer that this was given to, or `None`."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        for stage in _STAGES:
            if trainer is not None and stage not in self.parts:
                leave_to_lightning(self, f"{stage}_dataloader", trainer)

    def train_dataloader(self) -> Any:
        """Shuffled batches of the training split."""
        return self._for_trainer("train")

    def val_dataloader(self) -> Any:
        """Batches of the validation split in order, or none."""
        return self._for_trainer("val")

    def test_dataloader(self) -> Any:
        """Batches of the test split in order."""
        return self._for_trainer("test")

    def predict_dataloader(self) -> Any:
        """Batches of what is to be predicted in order: all, unless the split says what."""
        return self._for_trainer("predict")

    def _for_trainer(self, stage: str) -> Any:
        trainer = self.trainer
        if stage == "predict" and trainer is not None and trainer.world_size > 1:
            raise RuntimeError(
                f"Predictions are for every cell once, which {trainer.world_size} processes, some of which repeat a "
                "cell, do not give. Predict with Trainer(devices=1, num_nodes=1)."
            )
        if stage not in self.parts:
            return []
        if stage != "train" or trainer is None:
            return EpochLoader(self.loader(stage), lambda: 0)
        loader = self.loader(stage)
        kind = ResumableLoader if hasattr(loader, "state_dict") else EpochLoader
        return kind(loader, lambda: int(trainer.current_epoch))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Copy a batch, unless the loader has put it there."""
        if is_on(batch, device):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc] # Lightning's

    def teardown(self, stage: str | None = None) -> None:
        """Close the loaders; they are opened again where they are asked for again."""
        self.close()

    def close(self) -> None:
        """Close all loaders."""
        while self._open:
            self._open.popitem()[1][1].close()

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: loaders are opened there when they are asked for."""
        own = {f"{stage}_dataloader" for stage in _STAGES}  # methods that were left to Lightning
        return {**{k: v for k, v in self.__dict__.items() if k not in own}, "_open": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, or a copy."""
        self.__dict__.update(state)
        self.trainer = self._trainer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LIVIDataModule(DonorDataModule):
    """A study for a Trainer and the model LIVI: :class:`DonorDataModule` with the batches of :class:`LIVIBatches`.

    Parameters
    ----------
    study, genotypes, split, device, batch_size, drop_last, seed, **options
        As for :class:`DonorDataModule`. As LIVI has an embedding of each donor, the split is one of cells:
        :func:`split_cells`. Donors are coded in the order of the training split's.
    covariates, known_cis, missing, size_factor
        As for :class:`LIVIBatches`. Of a table `known_cis`, its index is the default of the option `variants`.
    """

    def __init__(
        self,
        study: Any,
        genotypes: Any = None,
        *,
        covariates: Sequence[str] = (),
        known_cis: Any = None,
        missing: str = "error",
        size_factor: str | None = None,
        **options: Any,
    ):
        if hasattr(known_cis, "index") and hasattr(known_cis, "columns"):
            options.setdefault("variants", list(known_cis.index))
        super().__init__(study, genotypes, **options)
        if self._bags:
            raise ValueError("LIVI takes cells, not bags.")
        self._livi = {"covariates": covariates, "known_cis": known_cis, "missing": missing, "size_factor": size_factor}

    def _make_loader(self, stage: str) -> LIVIBatches:
        categories = None if stage == "train" else self._batches.donor_categories
        loader = super()._make_loader(stage)
        try:
            return LIVIBatches(loader, donor_categories=categories, **self._livi)
        except BaseException:
            loader.close()
            raise

    @property
    def _batches(self) -> LIVIBatches:
        batches: LIVIBatches = self.loader("train")
        return batches

    @property
    def n_genes(self) -> int:
        """The model's ``x_dim``."""
        return self._batches.n_genes

    @property
    def n_donors(self) -> int:
        """The model's ``y_dim``."""
        return self._batches.n_donors

    @property
    def n_cis_snps(self) -> int:
        """The model's ``n_cis_snps``."""
        return self._batches.n_cis_snps

    @property
    def covariates_dims(self) -> list[int] | None:
        """The model's ``covariates_dims``."""
        return self._batches.covariates_dims

    @property
    def donor_categories(self) -> NDArray[Any]:
        """(n_donors,) ids of donors by code."""
        return self._batches.donor_categories

    @property
    def missing_calls(self) -> pd.Series | None:
        """Missing calls per variant."""
        return self._batches.missing_calls
