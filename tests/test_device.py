"""Copies to a device: the steps on the CPU, and the real thing where there is a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import donorloader as dl
from _join import check_batch, orders
from donorloader.pipeline import DeviceCopier

if TYPE_CHECKING:
    from _data import Store

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
TENSORS = ("X", "index", "donor_idx", "donor_features")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [0, 2, None])
@pytest.mark.parametrize("donor_rows", ["batch", "window"])
@pytest.mark.parametrize("densify", [False, True])
def test_batches_are_the_same_on_a_device(
    store: Store, device: str, prefetch: int | None, donor_rows: Any, densify: bool
) -> None:
    cells, genotypes = store.cells(3), store.genotypes()
    options: dict[str, Any] = {"batch_size": 32, "donor_rows": donor_rows, "densify": densify, "prefetch": prefetch}
    with dl.DonorLoader(cells.path, genotypes.source, **options) as plain:
        expected = orders(plain)
    with dl.DonorLoader(cells.path, genotypes.source, device=device, **options) as loader:
        batches = list(loader)
    assert orders(to_cpu(b) for b in batches) == expected
    for batch in batches:
        assert all(batch[key].device.type == device for key in TENSORS)
        check_batch(to_cpu(batch), cells, genotypes, donor_rows=donor_rows, densify=densify)


def to_cpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def test_a_table_shared_by_batches_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = DeviceCopier(torch.device("cpu"))
    copied: list[int] = []
    # on the CPU a copy is the tensor itself, so that of another device is stood in for
    monkeypatch.setattr(copier, "_to_device", lambda tensor: copied.append(id(tensor)) or tensor.clone())
    table = torch.arange(6.0)
    batches = [{"donor_features": table, "index": torch.tensor([i])} for i in range(3)]
    out = list(copier.finish(copier.start(batches)))
    assert copied.count(id(table)) == 1
    assert len({id(batch["donor_features"]) for batch in out}) == 1
    assert [int(batch["index"]) for batch in out] == [0, 1, 2]


def test_fields_that_are_no_tensors_pass_through() -> None:
    copier = DeviceCopier(torch.device("cpu"))
    donors = np.array(["a"], dtype=object)
    [(batch, event)] = list(copier.start([{"unique_donors": donors, "obs": None}]))
    assert batch["unique_donors"] is donors
    assert batch["obs"] is None
    assert event is None


@pytest.mark.parametrize("to", ["numpy"])
def test_a_device_needs_tensors(store: Store, to: Any) -> None:
    with pytest.raises(ValueError, match=r"device='cpu' needs to='torch'"):
        dl.DonorLoader(store.cells(1).path, device="cpu", to=to)
