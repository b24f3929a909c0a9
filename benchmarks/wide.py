"""Rows about wide genotypes: 100,000 variants, against the naive loop over the same genotypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import baselines, ours
from benchmarks.measure import Result, Stream, alternate, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.data import Data

IN_MEMORY = "naive loop, G in memory"
FROM_H5AD = "naive loop, G in .h5ad"
FROM_ZARR = "naive loop, G in .zarr"
BY_NUMPY = "naive loop, G in memory, numpy's indexing"
BY_ZARR = "naive loop, G in .zarr, zarr's oindex"

BARS = {IN_MEMORY: 2.0, BY_NUMPY: 2.0, FROM_H5AD: 4.0, FROM_ZARR: 20.0, BY_ZARR: None}


def wide(data: Data, rounds: int) -> Iterator[Result]:
    """One table per window, and rows of the batch's donors, against the naive loops; then other homes of G."""
    genotypes = data.genotypes()
    cells = baselines.annbatch_alone(data)
    window = data.size.batches_of(windows=1)
    part_of_pass = {FROM_H5AD: 4 * window, FROM_ZARR: window, BY_ZARR: window}

    by_window = "joined, 100,000 variants, one table per window"
    by_batch = "joined, 100,000 variants, rows of the batch's donors"
    other_homes = {
        f"{by_window}, G in .h5ad": {"genotypes": data.genotypes_h5ad},
        f"{by_window}, G in .zarr": {"genotypes": data.genotypes_zarr},
        f"{by_window}, G in memory": {"genotypes": genotypes},
        f"{by_window}, read anew for every window": {"genotypes": data.genotypes_rows, "genotype_memory": "0MB"},
    }
    loaders = {
        by_window: ours.joined(data, data.genotypes_rows, donor_rows="window"),
        by_batch: ours.joined(data, data.genotypes_rows, donor_rows="batch"),
        **{name: ours.joined(data, donor_rows="window", **options) for name, options in other_homes.items()},
    }
    naive = {
        IN_MEMORY: baselines.rows_in_memory(genotypes),
        BY_NUMPY: baselines.rows_by_numpy(genotypes),
        FROM_H5AD: baselines.rows_from_h5ad(data),
        FROM_ZARR: baselines.rows_from_zarr(data),
        BY_ZARR: baselines.rows_by_zarr(data),
    }
    try:
        speeds = alternate(
            [
                *(Stream(name, loader.__iter__) for name, loader in loaders.items()),
                *(
                    Stream(
                        name,
                        lambda read_rows=read_rows: baselines.naive_loop(cells, read_rows),
                        only_batches=part_of_pass.get(name),
                        at_most_rounds=3 if name in part_of_pass else None,
                    )
                    for name, read_rows in naive.items()
                ),
            ],
            rounds,
        )
    finally:
        for loader in loaders.values():
            loader.close()
    for stream in (by_window, by_batch):
        for against, bar in BARS.items():
            yield compare("wide", speeds, stream, against, bar=bar)
    for stream in other_homes:
        yield compare("wide", speeds, stream, IN_MEMORY)
