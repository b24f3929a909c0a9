"""One rank of several: `python _rank.py folder cells genotypes rank world_size`; without these two under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import donorloader as dl
from _data import as_numpy


def main(folder: str, cells: str, genotypes: str, *numbers: str) -> None:
    if numbers:
        rank, world_size = map(int, numbers)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
        )
    else:
        torch.distributed.init_process_group("gloo")
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told: dict[str, list[list[list[int]]]] = {"cells": [], "bags": []}
    with (
        dl.DonorLoader(cells, genotypes, batch_size=8, chunk_size=4, preload_nchunks=8) as loader,
        dl.BagLoader(cells, genotypes, bags_per_batch=2, max_cells=5) as bags,
    ):
        for _ in range(2):
            steps = []
            for batch in loader:
                counted = torch.ones(1)
                torch.distributed.all_reduce(counted)  # hangs where a rank has fewer steps
                assert counted.item() == world_size
                steps.append(as_numpy(batch["index"]).tolist())
            told["cells"].append(steps)
            numbers = {donor: number for number, donor in enumerate(bags.donors)}
            steps = []
            for batch in bags:
                torch.distributed.barrier()
                steps.append([numbers[donor] for donor in batch["donors"]])
            told["bags"].append(steps)
    torch.distributed.destroy_process_group()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
