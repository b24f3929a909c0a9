"""Genotypes for a training loop that has an annbatch Loader already: one line around it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import annbatch
import numpy as np
import pandas as pd
import torch
from annbatch.abc import Sampler

from donorloader._buffers import BufferPool
from donorloader._ids import as_text, shorten
from donorloader._options import parse_memory
from donorloader.genotypes import (
    DonorTable,
    make_encoder,
    open_genotypes,
    plan_windows,
    resolve_variants,
    stream_genotypes,
)
from donorloader.pipeline import Conveyor
from donorloader.samplers import complete_requests, donor_requests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from donorloader.genotypes import GenotypeStore
    from donorloader.samplers import DonorRequest

__all__ = ["attach_donor_features"]

_BATCHES_AHEAD = 8


def attach_donor_features(
    loader: annbatch.Loader[Any, Any],
    G: Any,
    donor_id_key: str = "donor_id",
    layer: str | None = None,
    key: str = "donor_features",
    *,
    variants: Any = None,
    obs: pd.DataFrame | None = None,
    genotype_memory: int | str = "1GB",
) -> Iterator[dict[str, Any]]:
    """Add the genotype rows of its donors to each batch of an annbatch loader.

    The loader is iterated once, as ``for batch in loader`` would, in the same order. A copy of its sampler, taken at
    the first batch, tells ahead of time which donors are needed, and their rows are read on a thread of their own.
    Where the order cannot be known ahead (the sampler cannot be copied, or leaves splits to numpy's global state, or
    the loader does not tell its ``obs``), rows are read when their batch is there. Either way the donors are taken
    from each batch's own ``obs``, and compared with those of the plan.

    Parameters
    ----------
    loader
        An annbatch loader with `donor_id_key` in its ``obs``.
    G
        Genotypes, as :func:`open_genotypes` takes them.
    donor_id_key
        Column of ``obs`` with the donor of each cell.
    layer
        Layer of `G` to use in place of `X`.
    key
        Name of the field to add.
    variants
        Variants to use: names, positions, a boolean mask or a slice. Default: all.
    obs
        ``obs`` of all cells of the loader, in its order, with at least `donor_id_key` (for example from
        ``collection.obs([donor_id_key])``). Default: the loader's own.
    genotype_memory
        Budget for genotype rows that stay in memory, in bytes or as text.

    Yields
    ------
    The loader's batches, each with three more fields: `key`, (n_donors, n_variants) genotypes in the type of `G`;
    ``unique_donors``, (n_donors,) ids as text; ``donor_idx``, (n_cells,) int64, the row of `key` of each cell. Arrays
    are torch tensors where ``X`` is one, else numpy's.

    Raises
    ------
    KeyError
        If the loader's ``obs`` lacks `donor_id_key`.
    ValueError
        If a donor of the cells has no row in `G`.
    RuntimeError
        If the donors of a batch are not those planned for it.
    """
    if not isinstance(loader, annbatch.Loader):
        raise TypeError(f"attach_donor_features takes an annbatch Loader, got {type(loader).__name__}.")
    store = open_genotypes(G, layer=layer)
    columns = resolve_variants(store, variants)
    memory = parse_memory(genotype_memory, "genotype_memory")
    donors = _planned_donors(loader, donor_id_key, obs)
    return _attach(loader, store, columns, memory, donor_id_key, key, donors)


def _attach(
    loader: annbatch.Loader[Any, Any],
    store: GenotypeStore,
    columns: Any,
    memory: int,
    donor_id_key: str,
    key: str,
    donors: tuple[NDArray[np.int64], NDArray[np.object_]] | None,
) -> Iterator[dict[str, Any]]:
    pool = BufferPool()
    conveyor = Conveyor(epoch=0)
    try:
        lane = None
        if donors is not None and (sampler := _replica(loader)) is not None:
            codes, ids = donors
            table = DonorTable(
                store, columns, _rows_of(store, ids), memory=memory, encoder=make_encoder(store, columns)
            )

            def requests() -> Iterator[DonorRequest]:
                drawn = complete_requests(copy.deepcopy(sampler), loader.n_obs, np.random.default_rng(0))
                return donor_requests(drawn, codes)

            windows = plan_windows(requests(), table, requests, "batch", lambda: conveyor.stopped)
            planned = stream_genotypes(windows, table, pool, "batch")
            ahead = table.batches_ahead(_BATCHES_AHEAD, sampler.batch_size)
            lane = conveyor.lane("genotypes", planned, capacity=ahead)
        for batch in loader:
            texts = _batch_donors(batch["obs"], donor_id_key)
            if lane is None:
                unique, donor_idx = np.unique(texts, return_inverse=True)
                features: Any = store.read(_rows_of(store, unique), columns)
            else:
                genotypes = next(lane, None)
                unique = np.empty(0, dtype=object) if genotypes is None else ids[genotypes.donors]
                donor_idx = np.empty(0, dtype=np.int64) if genotypes is None else genotypes.donor_idx
                if genotypes is None or donor_idx.size != texts.size or not (unique[donor_idx] == texts).all():
                    raise RuntimeError(
                        "The cells of a batch are not of the donors that were planned for it, so their genotypes would "
                        "be those of others. Was the loader's sampler used elsewhere during this pass, or does it draw "
                        "from global random state?"
                    )
                features = genotypes.features
            as_output = torch.from_numpy if isinstance(batch["X"], torch.Tensor) else np.asarray
            extra = {key: as_output(features), "unique_donors": unique, "donor_idx": as_output(donor_idx)}
            yield {**batch, **extra}
    finally:
        conveyor.stop()


def _planned_donors(
    loader: annbatch.Loader[Any, Any], donor_id_key: str, obs: pd.DataFrame | None
) -> tuple[NDArray[np.int64], NDArray[np.object_]] | None:
    """Donor code of every row and the donors' ids; `None` where the loader does not tell."""
    # annbatch has no public way to ask for the obs of all rows. If this is gone or changed in a later version, we read
    # rows after their batch; what it says is compared with each batch in any case.
    frames = [obs] if obs is not None else getattr(loader, "_obs", None) or []
    if not all(isinstance(frame, pd.DataFrame) for frame in frames) or sum(map(len, frames)) != loader.n_obs:
        if obs is not None:
            raise ValueError(f"obs must have one row for each of the {loader.n_obs:,} cells, got {len(obs):,}.")
        return None
    for frame in frames:
        if donor_id_key not in frame:
            raise _no_column(donor_id_key, frame)
    text = np.concatenate([as_text(frame[donor_id_key], f"obs[{donor_id_key!r}]") for frame in frames])
    codes, ids = pd.factorize(text, sort=True)
    return codes.astype(np.int64), np.asarray(ids, dtype=object)


def _replica(loader: annbatch.Loader[Any, Any]) -> Sampler | None:
    """A copy of the loader's sampler in its present state; `None` where its order cannot be known ahead."""
    sampler = loader.batch_sampler
    try:
        probe, copied = copy.deepcopy(sampler), copy.deepcopy(sampler)
    except TypeError:
        return None
    if type(sampler).sample is Sampler.sample and sampler.shuffle is not False:
        # without splits, annbatch draws them from numpy's global state
        first = next(iter(probe._sample(loader.n_obs)), None)
        if first is not None and "splits" not in first:
            return None
    return copied


def _batch_donors(obs: pd.DataFrame | None, donor_id_key: str) -> NDArray[np.object_]:
    if obs is None or donor_id_key not in obs:
        raise _no_column(donor_id_key, obs)
    return as_text(obs[donor_id_key], f"obs[{donor_id_key!r}]")


def _rows_of(store: GenotypeStore, ids: NDArray[np.object_]) -> NDArray[np.int64]:
    row_of = {donor: row for row, donor in enumerate(store.ids)}
    missing = [donor for donor in ids if donor not in row_of]
    if missing:
        raise ValueError(
            f"Every donor of the cells needs a row in G, but {len(missing):,} have none: {shorten(missing)}. "
            f"G has {shorten(store.ids)}."
        )
    return np.asarray([row_of[donor] for donor in ids], dtype=np.int64)


def _no_column(donor_id_key: str, obs: pd.DataFrame | None) -> KeyError:
    columns = "none" if obs is None else shorten(obs.columns, 12)
    return KeyError(
        f"The donor column must be in the loader's obs, but {donor_id_key!r} is not; its columns are {columns}. "
        "Name it with donor_id_key=…"
    )
