"""Models of torchmil take the batches of a BagLoader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from tensordict import TensorDict
from torchmil.data import collate_fn
from torchmil.models import ABMIL, CLAM_SB, DSMIL, IIBMIL, MILModelWrapper, TransformerABMIL
from torchmil.nn import MaxPool
from torchmil.utils import Trainer

import donorloader as dl
from _data import N_DONORS, N_GENES, donor_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from _data import Store

#: A third of the donors, not the first ones.
SICK = pd.DataFrame({"sick": [i % 3 == 1 for i in range(N_DONORS)]}, index=donor_ids())


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    """Values of the test data go up to thousands; a model wants some about 1."""
    return batch | {"X": batch["X"] / 2000}


@pytest.fixture
def batches(store: Store) -> list[dict[str, Any]]:
    """All donors, in batches of bags of many sizes."""
    options = {"labels": "sick", "donor_table": SICK, "bags_per_batch": 5, "max_cells": 20, "densify": True}
    with dl.BagLoader(store.cells(3).path, **options) as loader:
        return [scaled(batch) for batch in loader]


def gated_abmil() -> ABMIL:
    torch.manual_seed(0)
    return ABMIL((N_GENES,), att_dim=16, gated=True, feat_ext=torch.nn.Sequential(torch.nn.Linear(N_GENES, 16)))


def test_the_dict_is_that_of_its_collate(batches: list[dict[str, Any]]) -> None:
    """Keys, shapes and values of torchmil's own collate_fn; the mask as bool, which MaxPool needs."""
    for batch in batches:
        parts = torch.split(batch["X"], batch["offsets"].diff().tolist())
        expected = collate_fn([{"X": x, "Y": y} for x, y in zip(parts, batch["labels"], strict=True)])
        out = dl.to_torchmil(batch)
        assert set(out) == set(expected.keys())
        assert torch.equal(out["X"], expected["X"])
        assert torch.equal(out["Y"], expected["Y"])
        assert out["mask"].dtype == torch.bool
        assert torch.equal(out["mask"], expected["mask"].bool())
        largest = MaxPool()(out["X"], out["mask"])
        torch.testing.assert_close(largest, dl.bag_reduce(batch["X"], batch, "max"))


def test_abmil_trains(batches: list[dict[str, Any]]) -> None:
    model = gated_abmil()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        total = 0.0
        for batch in batches:
            out = dl.to_torchmil(batch)
            prediction, loss = model.compute_loss(**out)
            assert prediction.shape == (len(batch["donors"]),)
            (value,) = loss.values()
            assert torch.isfinite(value)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
            total += float(value.detach())
        losses.append(total / len(batches))
    assert losses[-1] < 0.8 * losses[0], losses


@pytest.mark.parametrize(
    "make",
    [
        gated_abmil,
        lambda: ABMIL((N_GENES,)),
        lambda: TransformerABMIL((N_GENES,)),
        lambda: IIBMIL((N_GENES,)),
        lambda: CLAM_SB((N_GENES,), k_sample=1),
    ],
    ids=["ABMIL gated", "ABMIL", "TransformerABMIL", "IIBMIL", "CLAM_SB"],
)
def test_padding_does_not_count(batches: list[dict[str, Any]], make: Callable[[], Any]) -> None:
    """A bag's prediction beside larger bags is the one that it gets alone."""
    torch.manual_seed(0)
    model = make().eval()
    for batch in batches:
        out = dl.to_torchmil(batch)
        assert not out["mask"].all()  # there is padding
        with torch.no_grad():
            together = model(X=out["X"], mask=out["mask"])
            parts = torch.split(batch["X"], batch["offsets"].diff().tolist())
            alone = torch.cat([model(X=x[None]) for x in parts])
        assert together.shape == (len(batch["donors"]),)
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_bags_of_one_size_suit_dsmil(store: Store) -> None:
    """It looks at padding too; `exact_cells` leaves none."""
    torch.manual_seed(0)
    model = DSMIL((N_GENES,)).eval()
    with dl.BagLoader(store.cells(3).path, exact_cells=12, densify=True) as loader:
        for batch in map(scaled, loader):
            out = dl.to_torchmil(batch)
            assert out["mask"].all()
            with torch.no_grad():
                alone = torch.cat([model(X=x[None]) for x in out["X"]])
                torch.testing.assert_close(model(X=out["X"], mask=out["mask"]), alone, atol=1e-5, rtol=1e-4)


def test_its_trainer_takes_them(batches: list[dict[str, Any]]) -> None:
    model = gated_abmil()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(
        model, torch.optim.Adam(model.parameters(), lr=0.01), device="cpu", disable_pbar=True, verbose=False
    )
    trainer.train(2, [TensorDict(dl.to_torchmil(batch)) for batch in batches])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert MILModelWrapper(model)(dl.to_torchmil(batches[0])).shape == (5,)


def test_whole_numbers_become_float() -> None:
    cells = ad.AnnData(
        sparse.csr_matrix(np.arange(12, dtype=np.int32).reshape(4, 3)),
        obs=pd.DataFrame({"donor_id": ["a", "b", "b", "b"], "sick": [True, False, False, False]}, index=list("wxyz")),
    )
    with dl.BagLoader(cells, labels="sick") as loader:
        batch = next(iter(loader))
    assert batch["X"].dtype == torch.int32
    out = dl.to_torchmil(batch)
    assert out["X"].dtype == torch.float32
    assert torch.isfinite(ABMIL((3,)).compute_loss(**out)[1]["BCEWithLogitsLoss"])


def test_without_labels(store: Store) -> None:
    with dl.BagLoader(store.cells(3).path) as loader:
        out = dl.to_torchmil(next(iter(loader)))
    assert set(out) == {"X", "mask"}
