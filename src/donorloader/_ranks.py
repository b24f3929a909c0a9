"""Which of several processes this is: told, or found in torch.distributed or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

__all__ = ["Ranks", "find_ranks"]

# What torchrun and SLURM's srun tell each process: its number, and how many there are. SLURM_NTASKS would not do: it is
# what a job asked for, and a script that sbatch runs has it too, though it is one process.
_VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))


@dataclass(frozen=True)
class Ranks:
    """One process among those that share each epoch.

    Attributes
    ----------
    rank, world_size
        Which of how many.
    n_shards
        The user's number of canonical shards, or `None`.
    uneven
        What to do where ranks would get different numbers of batches.
    source
        Where rank and world size are from, for messages.
    """

    rank: int
    world_size: int
    n_shards: int | None
    uneven: Literal["drop", "pad"]
    source: str


def find_ranks(
    rank: int | None, world_size: int | None, num_canonical_shards: int | None, uneven: Literal["drop", "pad"]
) -> Ranks:
    """The user's choice, else what torch.distributed says if it is initialised, else the environment, else one rank.

    Raises
    ------
    ValueError
        If numbers are impossible, or only one of `rank` and `world_size` is given.
    """
    if uneven not in ("drop", "pad"):
        raise ValueError(f"uneven must be 'drop' or 'pad', got {uneven!r}.")
    if num_canonical_shards is not None and _number(num_canonical_shards, "num_canonical_shards") < 1:
        raise ValueError(f"num_canonical_shards must be at least 1, got {num_canonical_shards}.")
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, but got {rank=} and {world_size=}.")
    if rank is not None:
        found, source = (_number(rank, "rank"), _number(world_size, "world_size")), "rank and world_size"
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        found, source = (torch.distributed.get_rank(), torch.distributed.get_world_size()), "torch.distributed"
    else:
        found, source = _from_environment()
    if not 0 <= found[0] < found[1]:
        raise ValueError(
            f"Ranks are numbered from 0 to world_size - 1, but {source} say rank {found[0]} of {found[1]}."
        )
    return Ranks(*found, num_canonical_shards, uneven, source)


def _from_environment() -> tuple[tuple[int, int], str]:
    for variables in _VARIABLES:
        if all(variable in os.environ for variable in variables):
            source = " and ".join(variables)
            try:
                rank, world_size = (int(os.environ[variable]) for variable in variables)
            except ValueError:
                told = ", ".join(f"{variable}={os.environ[variable]!r}" for variable in variables)
                raise ValueError(f"{source} must be whole numbers, but the environment has {told}.") from None
            return (rank, world_size), source
    return (0, 1), "nothing"


def _number(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be a whole number, got {value!r}.")
    return int(value)
