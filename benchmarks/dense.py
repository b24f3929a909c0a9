"""The row about dense X on the CPU: `densify=True` against annbatch's batch made dense afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import baselines, ours
from benchmarks.cells import VARIANTS
from benchmarks.measure import Result, Stream, alternate, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.data import Data

TO_DENSE = "annbatch's batch followed by torch's to_dense()"
TO_ARRAY = "annbatch's batch followed by scipy's toarray()"


def dense(data: Data, rounds: int) -> Iterator[Result]:
    """Joined dense float32 batches against annbatch's (without genotypes) made dense by torch, and by scipy."""
    stream = "joined, 3,000 variants, dense float32 X, on the CPU"
    as_torch = baselines.annbatch_alone(data)
    as_scipy = baselines.annbatch_alone(data, to=None)
    with ours.joined(data, data.genotypes_rows, variants=VARIANTS, densify=True) as loader:
        speeds = alternate(
            [
                Stream(stream, lambda: loader),
                Stream(
                    TO_DENSE,
                    lambda: baselines.to_dense(as_torch),
                    only_batches=data.size.batches_of(windows=4),
                    at_most_rounds=3,
                ),
                Stream(TO_ARRAY, lambda: baselines.to_array(as_scipy)),
            ],
            rounds,
        )
    yield compare("dense", speeds, stream, TO_DENSE, bar=6.0)
    yield compare("dense", speeds, stream, TO_ARRAY)
