"""The sweep: nowhere, from few variants to many and from small batches to large, slower than the naive loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import baselines, ours
from benchmarks.measure import Result, Stream, alternate, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.data import Data

VARIANTS = (100, 1_000, 3_000, 10_000, 30_000, 100_000)
BATCH_SIZES = (64, 256, 1_024, 4_096)

AGAINST = "naive loop, G in memory, numpy's indexing"


def sweep(data: Data, rounds: int) -> Iterator[Result]:
    """Joined batches against the naive loop, both with the genotypes in memory, over sizes of both tables.

    The loop indexes by numpy, which is the harder to beat. The quick size takes the corners and the middle.
    """
    quick = data.size.name == "quick"
    genotypes = data.genotypes()
    for n_variants in (100, 3_000, 100_000) if quick else VARIANTS:
        part = genotypes[:, :n_variants].copy()
        read_rows = baselines.rows_by_numpy(part)
        for batch_size in (64, 1_024, 4_096) if quick else BATCH_SIZES:
            cells = baselines.annbatch_alone(data, batch_size=batch_size)
            stream = f"joined, {n_variants:,} variants, {batch_size:,} cells a batch"
            with ours.joined(data, part, batch_size=batch_size) as loader:
                speeds = alternate(
                    [
                        Stream(stream, loader.__iter__),
                        Stream(AGAINST, lambda: baselines.naive_loop(cells, read_rows)),  # noqa: B023
                    ],
                    min(3, rounds),
                )
            yield compare("sweep", speeds, stream, AGAINST, bar=1.0)
