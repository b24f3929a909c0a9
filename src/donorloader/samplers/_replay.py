"""The same pass again: a replica of a sampler whose generators are made anew from (seed, epoch)."""

from __future__ import annotations

import copy
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from ._resume import skip_batches
from ._rows import complete_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from annbatch.abc import Sampler
    from annbatch.types import LoadRequest

__all__ = ["pass_generator", "replay", "replica"]


def pass_generator(seed: int, epoch: int, stream: int = 0) -> np.random.Generator:
    """A generator that depends on nothing but its arguments.

    Each pass gets its own, so that a pass cut short cannot change the next; `stream` tells apart several generators
    of one pass. The words are spawn keys of one :class:`numpy.random.SeedSequence`, so that streams are independent
    (https://numpy.org/doc/stable/reference/random/parallel.html).
    """
    return np.random.default_rng(np.random.SeedSequence(entropy=seed, spawn_key=(epoch, stream)))


def replica[S: Sampler](sampler: S, *, seed: int, epoch: int) -> S:
    """A copy of a sampler in which every random generator starts from (seed, epoch).

    All generators that the sampler reaches count, also those of samplers that it wraps: numpy's `Generator` and
    `RandomState`, :class:`random.Random`, and torch's `Generator`. The k-th of them, in the order in which a deep copy
    meets them, gets stream k; one that is shared stays shared. A sampler that keeps count of epochs in another way is
    told by its `set_epoch`, where it has one.

    Raises
    ------
    TypeError
        If the sampler cannot be deep-copied.
    """
    memo: dict[int, object] = {}
    try:
        twin = copy.deepcopy(sampler, memo)
    except TypeError as error:
        raise TypeError(
            f"Cells and genotypes each follow their own copy of the sampler, but {type(sampler).__name__} cannot be "
            f"copied ({error}). Give it a `__deepcopy__` that passes `memo` on, or hold files and locks elsewhere."
        ) from error
    # memo maps the id of each original to its copy, in the order met; a set would lose that order
    for stream, generator in enumerate((v for v in memo.values() if _is_generator(v)), start=1):
        _restart(generator, seed, epoch, stream)
    if callable(set_epoch := getattr(twin, "set_epoch", None)):
        set_epoch(epoch)
    return twin


def _is_generator(value: object) -> bool:
    if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
        return True
    # by name, as samplers know no torch
    return type(value).__module__.startswith("torch") and hasattr(value, "manual_seed")


def _restart(generator: Any, seed: int, epoch: int, stream: int) -> None:
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(epoch, stream))
    if isinstance(generator, random.Random):
        generator.seed(int.from_bytes(sequence.generate_state(8).tobytes(), "little"))
    elif isinstance(generator, np.random.RandomState):
        generator.seed(sequence.generate_state(8))
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(sequence).state
    else:
        generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)))


def replay(sampler: Sampler, n_obs: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[LoadRequest]:
    """Load requests of the pass (seed, epoch) of a sampler: the same on every thread, in every process.

    Parameters
    ----------
    sampler
        Left untouched: a :func:`replica` is run.
    n_obs
        Number of rows to sample from.
    seed, epoch
        Which pass.
    skip
        Batches to leave out, from the first on: those that were delivered before the pass was resumed.
    """
    requests = complete_requests(replica(sampler, seed=seed, epoch=epoch), n_obs, pass_generator(seed, epoch))
    return skip_batches(requests, skip) if skip else requests
