"""One rank of several: `python _rank.py folder cells genotypes rank world_size`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import donorloader as dl
from _data import as_numpy


def main(folder: str, cells: str, genotypes: str, rank: str, world_size: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=int(world_size)
    )
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
                assert counted.item() == int(world_size)
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
