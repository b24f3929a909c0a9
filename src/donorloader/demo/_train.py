"""The training loop: batches of a loader in, estimated cis effects out."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from ._model import CisModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from donorloader import DonorLoader, GenotypeStore

POOL = "pool"  # the obs column that the model corrects for
_LEARNING_RATE = 0.02


@dataclass(frozen=True)
class Epoch:
    """One epoch of training: its number from 1, the mean loss of its cells, and its wall time in seconds."""

    number: int
    loss: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What training found.

    Attributes
    ----------
    epochs
        One for each pass over the cells.
    effects
        The pairs in cis (gene, variant, effect) with their ``estimate``.
    """

    epochs: tuple[Epoch, ...]
    effects: pd.DataFrame

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimated with true effects, over all pairs in cis: also those without an effect."""
        return float(np.corrcoef(self.effects["effect"], self.effects["estimate"])[0, 1])

    @property
    def planted(self) -> pd.DataFrame:
        """The pairs that have an effect."""
        return self.effects[self.effects["effect"] != 0]


def mean_dosages(
    genotypes: GenotypeStore, donors: NDArray[np.object_], variants: NDArray[np.object_]
) -> NDArray[np.float32]:
    """Mean dosage of each variant over the donors with a call, (n_variants,)."""
    rows = pd.Index(genotypes.ids).get_indexer(pd.Index(donors))
    columns = pd.Index(genotypes.names(slice(None))).get_indexer(pd.Index(variants))
    dosages = genotypes.read(rows, columns)
    return np.ma.masked_less(dosages, 0).mean(axis=0).filled(0).astype(np.float32)


def fit(
    loader: DonorLoader,
    mean_dosage: NDArray[np.float32],
    cis: pd.DataFrame,
    *,
    pools: int,
    epochs: int,
    seed: int,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> Fit:
    """Train the model on a loader's batches.

    Parameters
    ----------
    loader
        Dense batches (``densify=True``) of torch tensors with the obs column ``pool``.
    mean_dosage
        Of the loader's variants; see `mean_dosages`.
    cis
        Pairs in cis: gene, variant and the true effect. The model is given the pairs, never the effects.
    pools
        How many pools there are.
    epochs
        Passes over the cells.
    seed
        Of the initial weights and the noise in training.
    on_epoch
        Called after each epoch.

    Returns
    -------
    Loss of each epoch, and the estimated effects.
    """
    model = CisModel(
        genes=len(loader.var_names),
        pools=pools,
        donors=[str(donor) for donor in loader.donors],
        cis_gene=torch.from_numpy(pd.Index(loader.var_names).get_indexer(cis["gene"])),
        cis_variant=torch.from_numpy(pd.Index(loader.variant_names).get_indexer(cis["variant"])),
        mean_dosage=torch.from_numpy(mean_dosage),
        generator=torch.Generator().manual_seed(seed),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=epochs * len(loader))

    history = []
    with one_thread():
        for number in range(1, epochs + 1):
            started = time.perf_counter()
            total = 0.0
            for batch in loader:
                pool = torch.from_numpy(batch["obs"][POOL].cat.codes.to_numpy(np.int64))
                loss = model.loss(
                    counts=batch["X"],
                    pool=pool,
                    donors=batch["unique_donors"],
                    donor_idx=batch["donor_idx"],
                    dosages=batch["donor_features"],
                )
                optimizer.zero_grad()
                (loss + model.penalty() / loader.n_obs).backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(pool)
            history.append(Epoch(number, total / loader.n_obs, time.perf_counter() - started))
            on_epoch(history[-1])
    return Fit(tuple(history), cis.assign(estimate=model.cis_effect.detach().numpy()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, then as it did before.

    The model is so small that threads wait for one another more than they compute: on a machine that does anything
    else, two of them take several times as long as one. And sums on one thread are the same on every machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
