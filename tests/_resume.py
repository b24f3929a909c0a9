"""Loaders to interrupt and resume, and the process that resumes them: `python _resume.py jobs.json results.json`."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from annbatch.samplers import ClassSampler, RandomSampler, WeightedClassSampler

import donorloader as dl
from _data import SIZES, as_numpy, cell_table, donor_ids
from _samplers import NoSplits, OwnRows

if TYPE_CHECKING:
    from collections.abc import Iterable

SMALL = {"batch_size": 16, "chunk_size": 8, "preload_nchunks": 8}
RUNS = {"chunk_size": 10, "preload_nchunks": 8, "batch_size": 16}


def _classes(made: Any) -> Any:
    classes = pd.Categorical(cell_table(SIZES[3], donor_ids())["run"])
    return made(**RUNS, classes=classes, num_samples=170, rng=np.random.default_rng(5))


#: What is resumed: the loader's class, and its options, made anew for each loader.
CASES: dict[str, tuple[type, Any]] = {
    "random": (dl.DonorLoader, lambda: {**SMALL, "obs_columns": ["cell_type"]}),
    "random, few cells a batch": (dl.DonorLoader, lambda: {"batch_size": 1, "chunk_size": 4, "preload_nchunks": 5}),
    "sequential, the last batch dropped": (dl.DonorLoader, lambda: {**SMALL, "shuffle": False, "drop_last": True}),
    "one table a window": (dl.DonorLoader, lambda: {**SMALL, "donor_rows": "window"}),
    "genotypes read by window": (dl.DonorLoader, lambda: {**SMALL, "genotype_memory": 0, "variants": slice(3, 19, 2)}),
    "filtered": (
        dl.DonorLoader,
        lambda: {**SMALL, "cells_query": "cell_type != 'B'", "donors": [f"d{i}" for i in range(10)], "seed": 7},
    ),
    "a split of donors, of rank 0 of 2": (
        dl.DonorLoader,
        lambda: {**SMALL, "donors": _split()["train"], "cells_query": "cell_type != 'B'", "rank": 0, "world_size": 2},
    ),
    "annbatch's classes": (dl.DonorLoader, lambda: {"batch_sampler": _classes(ClassSampler)}),
    "annbatch's weighted classes": (dl.DonorLoader, lambda: {"batch_sampler": _classes(WeightedClassSampler)}),
    "annbatch's random, filtered": (
        dl.DonorLoader,
        lambda: {"batch_sampler": RandomSampler(**RUNS), "cells_query": "cell_type == 'B'"},
    ),
    "a user's sampler": (
        dl.DonorLoader,
        lambda: {"batch_sampler": OwnRows(48, 16, drop_last=False, rng=np.random.default_rng(3))},
    ),
    "splits left to annbatch": (
        dl.DonorLoader,
        lambda: {"batch_sampler": NoSplits(8, 6, 16, shuffle=True), "to": "numpy"},
    ),
    "rank 1 of 2": (dl.DonorLoader, lambda: {**SMALL, "batch_size": 8, "rank": 1, "world_size": 2}),
    "rank 2 of 3, of a sampler": (
        dl.DonorLoader,
        lambda: {"batch_sampler": RandomSampler(8, 2, 4), "rank": 2, "world_size": 3, "uneven": "pad"},
    ),
    "bags of rank 0 of 2": (
        dl.BagLoader,
        lambda: {"bags_per_batch": 1, "max_cells": 9, "window_cells": 40, "rank": 0, "world_size": 2},
    ),
    "bags": (dl.BagLoader, lambda: {"bags_per_batch": 3, "max_cells": 9, "window_cells": 60}),
    "bags larger than a window": (dl.BagLoader, lambda: {"bags_per_batch": 2, "max_cells": None, "window_cells": 11}),
    "bags of a split": (
        dl.BagLoader,
        lambda: {"bags_per_batch": 1, "max_cells": 9, "window_cells": 40, "donors": _split()["train"]},
    ),
    "bags, balanced": (
        dl.BagLoader,
        lambda: {"bags_per_batch": 4, "balance": "side", "labels": "side", "n_bags": 18, "donor_table": _sides()},
    ),
    "bags of cell types, resampled": (
        dl.BagLoader,
        lambda: {"bag_by": ["donor_id", "cell_type"], "exact_cells": 6, "bags_per_batch": 7, "densify": True},
    ),
    "bags, filtered": (
        dl.BagLoader,
        lambda: {"bags_per_batch": 1, "cells_query": "cell_type != 'T'", "donors": ["d1", "d12", "d5", "d3"]},
    ),
}


def _sides() -> pd.DataFrame:
    return pd.DataFrame({"side": ["left"] * 4 + ["right"] * 9}, index=donor_ids())


def _split() -> dl.Splits:
    """Drawn anew in each process."""
    return dl.split_donors(_sides(), fractions={"train": 0.7, "val": 0.3}, seed=2, stratify="side")


def make(case: str, cells: Any, genotypes: Any, **changes: Any) -> Any:
    made, options = CASES[case]
    return made(cells, genotypes, **(options() | changes))


def digest(batch: dict[str, Any]) -> str:
    """A text that two batches share only if all their fields are equal to the last bit."""
    told = hashlib.sha256()
    for name, value in sorted(batch.items()):
        told.update(name.encode())
        if isinstance(value, dict):
            told.update(digest(value).encode())
        elif isinstance(value, pd.DataFrame):
            told.update(value.to_csv().encode())
        elif value is not None:
            array = as_numpy(value)
            told.update(f"{type(value)} {array.dtype} {array.shape}".encode())
            told.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return told.hexdigest()


def digests(batches: Iterable[dict[str, Any]]) -> list[str]:
    return [digest(batch) for batch in batches]


def resume(job: dict[str, Any]) -> list[dict[str, Any]]:
    """For each of some states, load it and run on: the rest of its epoch, then the beginning of another one."""
    results = []
    with make(job["case"], job["cells"], job["genotypes"], prefetch=job["prefetch"]) as loader:
        for state in job["states"]:
            loader.load_state_dict(state)
            told = {"epoch": loader.epoch, "length": len(loader), "rest": digests(loader)}
            results.append(told | {"next": digests(itertools.islice(loader, 2))})
    return results


if __name__ == "__main__":
    results = [resume(job) for job in json.loads(Path(sys.argv[1]).read_text())]
    Path(sys.argv[2]).write_text(json.dumps(results))
