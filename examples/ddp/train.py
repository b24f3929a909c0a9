"""Plain torch on several processes: torchrun --nproc-per-node 2 train.py study [--resume checkpoint.pt]."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import donorloader as dl


class Autoencoder(torch.nn.Module):
    """Stands for your model: counts and genotypes in, counts out."""

    def __init__(self, n_genes: int, n_variants: int, width: int = 32):
        super().__init__()
        self.cell, self.donor = torch.nn.Linear(n_genes, width), torch.nn.Linear(n_variants, width)
        self.out = torch.nn.Linear(width, n_genes)

    def forward(self, x: torch.Tensor, genotypes: torch.Tensor) -> torch.Tensor:
        """Reconstructed log counts."""
        return self.out(torch.relu(self.cell(x) + self.donor(genotypes)))


def main() -> None:
    """Train on this process's share of each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="cells of each process")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--resume", type=Path, help="a checkpoint, also of a run with another number of processes")
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if cuda else torch.device("cpu")

    # the loader finds its rank in torch.distributed, and takes that share of each epoch
    loader = dl.DonorLoader(
        arguments.study,
        batch_size=arguments.batch_size,
        densify=True,
        genotype_encoding="dosage",
        missing_calls="mean",
        device=device,
        seed=0,
    )
    torch.manual_seed(0)
    model = Autoencoder(len(loader.var_names), len(loader.variant_names)).to(device)
    model = DistributedDataParallel(model)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    if arguments.resume:
        checkpoint = torch.load(arguments.resume, map_location=device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimiser.load_state_dict(checkpoint["optimiser"])
        loader.load_state_dict(checkpoint["loader"])

    def save() -> None:
        if dist.get_rank() == 0:  # the loader's state is the same on every rank
            state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "loader": loader.state_dict()}
            torch.save(state, arguments.checkpoint)

    with loader:
        for epoch in range(loader.epoch, arguments.epochs):
            for step, batch in enumerate(loader, start=1):
                x = torch.log1p(batch["X"])
                loss = torch.nn.functional.mse_loss(model(x, batch["donor_features"][batch["donor_idx"]]), x)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                if step % arguments.save_every == 0:
                    save()
            save()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
