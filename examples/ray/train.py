"""Ray Train on several workers: python train.py /shared/study --workers 2. Needs `pip install "ray[train]"`."""

from __future__ import annotations

import argparse
from typing import Any

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model

import donorloader as dl


def train_worker(config: dict[str, Any]) -> None:
    """What each worker runs. Ray has initialised torch.distributed, where the loader finds its rank."""
    device = get_device()
    with dl.DonorLoader(
        config["study"], batch_size=config["batch_size"], densify=True, device=device, seed=config["seed"]
    ) as loader:
        n_genes = len(loader.var_names)
        model = prepare_model(
            torch.nn.Sequential(torch.nn.Linear(n_genes, 32), torch.nn.ReLU(), torch.nn.Linear(32, n_genes))
        )
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        for epoch in range(config["epochs"]):
            total = torch.zeros((), device=device)
            for batch in loader:  # not ray.train.torch.prepare_data_loader: the loader has its rank and its device
                x = torch.log1p(batch["X"])
                loss = torch.nn.functional.mse_loss(model(x), x)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                total += loss.detach()
            loss = total.item() / len(loader)
            ray.train.report({"epoch": epoch, "loss": loss})
            print(f"rank {ray.train.get_context().get_world_rank()}, epoch {epoch}: loss {loss:.4f}")


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", help="a folder that all workers can read")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256)
    arguments = parser.parse_args()
    config = {"study": arguments.study, "epochs": arguments.epochs, "batch_size": arguments.batch_size, "seed": 0}
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(name="donorloader"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
