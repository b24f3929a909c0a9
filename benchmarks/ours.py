"""donorloader as the benchmarks open it: the same batches, chunks and windows as the baselines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import donorloader as dl
from benchmarks.data import DONOR_KEY

if TYPE_CHECKING:
    from pathlib import Path

    import anndata as ad

    from benchmarks.data import Data


def joined(
    data: Data, genotypes: Path | ad.AnnData | None, *, batch_size: int | None = None, **options: Any
) -> dl.DonorLoader:
    """Cells of `data` joined with `genotypes`; `options` are those of `DonorLoader`."""
    size = data.size
    return dl.DonorLoader(
        data.cells,
        genotypes,
        donor_key=DONOR_KEY,
        batch_size=batch_size or size.batch_size,
        chunk_size=size.chunk_size,
        preload_nchunks=size.chunks_per_window,
        seed=0,
        **options,
    )
