"""Bags in, predictions for donors never seen out: training and evaluation of the model of bags."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

import donorloader as dl

from ._bags_model import AttentionModel
from ._bags_simulate import DISEASE, SIGNAL
from ._train import Epoch, mean_dosages, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_LEARNING_RATE = 0.007
_WEIGHT_DECAY, _VARIANT_DECAY = 1.5, 0.01  # few weights are of variants, and they can do less harm
_TRAINING_CELLS = 64  # of a larger bag, another random subset each epoch


@dataclass(frozen=True)
class BagScores:
    """Predictions for some donors, and where the model looked.

    Attributes
    ----------
    donors
        One row per donor, by id: ``prediction`` (larger is likelier ill) and ``disease``.
    cells
        One row per cell of the ill among them: ``attention``, times the cells of the bag, so that 1 is what all would
        get if it looked nowhere in particular; and ``signal``. Empty where a predictor has no attention.
    """

    donors: pd.DataFrame
    cells: pd.DataFrame

    @property
    def auc(self) -> float:
        """Chance that an ill donor's prediction is above a healthy one's."""
        return rank_auc(self.donors["prediction"], self.donors["disease"])

    @property
    def attention_auc(self) -> float:
        """Chance that a signal cell of an ill donor gets more attention than another cell of an ill donor."""
        return rank_auc(self.cells["attention"], self.cells["signal"])

    @property
    def attention_ratio(self) -> float:
        """Mean attention of signal cells over the mean attention of the other cells of ill donors."""
        means = self.cells.groupby("signal")["attention"].mean()
        return float(means[True] / means[False])


def rank_auc(score: Any, positive: Any) -> float:
    """Area under the ROC curve, from ranks (Mann and Whitney's U); ties count one half.

    Parameters
    ----------
    score, positive
        (n,) the score of each item, and whether it is a positive one.

    Raises
    ------
    ValueError
        If there are no positive or no negative items.
    """
    positive = np.asarray(positive).astype(bool)
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if n_positive == 0 or n_negative == 0:
        raise ValueError(f"An AUC needs both kinds, got {n_positive} positive and {n_negative} negative items.")
    ranks = pd.Series(np.asarray(score)).rank().to_numpy()
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


def open_bags(study: dl.Study, table: pd.DataFrame, variants: Any = None, **options: Any) -> dl.BagLoader:
    """A loader of dense bags with their disease status, without genotypes where `variants` is `None`."""
    options = {"labels": DISEASE, "donor_table": table, "densify": True, **options}
    if variants is None:
        return dl.BagLoader(study.bags or study.cells, donor_key=study.donor_key, **options)
    return dl.BagLoader(study, variants=variants, **options)


def fit_bags(
    study: dl.Study,
    table: pd.DataFrame,
    donors: NDArray[np.object_],
    variants: NDArray[np.object_] | None,
    *,
    epochs: int,
    seed: int,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> tuple[AttentionModel, tuple[Epoch, ...]]:
    """Train the model on the bags of some donors.

    Parameters
    ----------
    study
        The prepared study.
    table
        Donors by id, with the column ``disease``.
    donors
        Ids of the donors to train on.
    variants
        Names of variants to give to the model; `None` for a model without genotypes.
    epochs
        Passes over the bags.
    seed
        Of the order of bags, the choice of cells, the initial weights and the genes dropped.
    on_epoch
        Called after each epoch.

    Returns
    -------
    The model, and the loss of each epoch.
    """
    options = {"donors": donors, "max_cells": _TRAINING_CELLS, "seed": seed}
    history = []
    with open_bags(study, table, variants, **options) as loader, one_thread():
        means = None
        if variants is not None:
            store = dl.open_genotypes(study.genotypes)
            means = torch.from_numpy(mean_dosages(store, donors, variants))
            store.close()
        generator = torch.Generator().manual_seed(seed)
        model = AttentionModel(genes=len(loader.var_names), mean_dosage=means, generator=generator)
        groups = [{"params": list(model.cell_parameters()), "weight_decay": _WEIGHT_DECAY}]
        if model.variant is not None:
            groups.append({"params": [model.variant], "weight_decay": _VARIANT_DECAY})
        optimizer = torch.optim.AdamW(groups, lr=_LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LEARNING_RATE, total_steps=epochs * len(loader))
        for number in range(1, epochs + 1):
            started = time.perf_counter()
            total, bags = 0.0, 0
            for batch in loader:
                log_odds, _ = model(batch)
                loss = F.binary_cross_entropy_with_logits(log_odds, batch["labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(log_odds)
                bags += len(log_odds)
            history.append(Epoch(number, total / bags, time.perf_counter() - started))
            on_epoch(history[-1])
    return model.eval(), tuple(history)


def score_bags(
    model: AttentionModel,
    study: dl.Study,
    table: pd.DataFrame,
    donors: NDArray[np.object_],
    variants: NDArray[np.object_] | None,
) -> BagScores:
    """Predict the disease of some donors from all their cells, and collect the attention of each cell.

    Parameters
    ----------
    model
        Trained.
    study, table, variants
        As in training.
    donors
        Ids of the donors to predict for.
    """
    seen, predictions, cells = [], [], []
    options = {"donors": donors, "max_cells": None, "shuffle": False, "obs_columns": [SIGNAL]}
    with open_bags(study, table, variants, **options) as loader, one_thread(), torch.no_grad():
        for batch in loader:
            log_odds, attention = model(batch)
            seen.append({"donors": batch["donors"]})
            predictions.append(log_odds)
            bag = batch["donor_idx"]
            ill = (batch["labels"][bag] == 1).numpy()
            relative = (attention * batch["offsets"].diff()[bag]).numpy()
            signal = batch["obs"][SIGNAL].to_numpy().astype(bool)  # the truth, to judge the attention with
            cells.append(pd.DataFrame({"attention": relative[ill], "signal": signal[ill]}))
    return BagScores(_with_disease(dl.collect_bags(seen, predictions), table), pd.concat(cells, ignore_index=True))


def score_means(
    study: dl.Study, table: pd.DataFrame, train: NDArray[np.object_], held_out: NDArray[np.object_]
) -> BagScores:
    """What the mean over a donor's cells tells: ridge regression of the disease on mean log expression.

    Parameters
    ----------
    study, table
        As for `fit_bags`.
    train, held_out
        Ids of the donors to fit on, and to predict for.
    """
    seen, means = [], []
    with open_bags(study, table, max_cells=None, shuffle=False) as loader:
        for batch in loader:
            seen.append({"donors": batch["donors"]})
            means.append(dl.bag_reduce(AttentionModel.log_expression(batch["X"]), batch, "mean"))
    features = dl.collect_bags(seen, means).astype(np.float64)
    known = features.loc[train]
    features = (features - known.mean()) / (known.std() + 1e-6)
    x, y = features.loc[train].to_numpy(), table.loc[train, DISEASE].to_numpy(np.float64)
    weights = np.linalg.solve(x.T @ x + x.shape[1] * np.eye(x.shape[1]), x.T @ (y - y.mean()))
    predictions = (features.loc[held_out] @ weights).to_frame("prediction")
    return BagScores(_with_disease(predictions, table), pd.DataFrame({"attention": [], "signal": []}))


def _with_disease(predictions: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    return predictions.assign(disease=table.loc[predictions.index, DISEASE].to_numpy())
