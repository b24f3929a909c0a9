"""The front door for bags: one donor's cells at a time, for multiple-instance learning."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from donorloader._donor_columns import bag_codes, bag_column
from donorloader._engine import Engine
from donorloader._options import ReadOptions, parse_memory
from donorloader._stream_loader import StreamLoader, check_seed
from donorloader._tables import open_tables
from donorloader.samplers import WINDOW_CELLS, BagSampler, replay, request_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas as pd
    import torch
    from numpy.typing import NDArray

    from donorloader._tables import Tables
    from donorloader.genotypes import GenotypeBatch

__all__ = ["BagLoader"]

# Parts that `cell_memory` is cut into. Sparse: the window that is split into batches, the next one being read, the
# batches of both queues, the one at hand. Dense: four windows, and half of it for two queues of dense batches.
_PARTS, _DENSE_PARTS = 5, 8


class BagLoader(StreamLoader):
    """Stream bags: all cells of a donor, or a sample of them, donor by donor, with its label and genotypes.

    Every donor comes once a pass, in an order that depends on (seed, epoch) alone. Reading, joining, checks and the
    copy to a device are those of :class:`DonorLoader`.

    Parameters
    ----------
    cells, genotypes, donor_key
        As for :class:`DonorLoader`. Of a study, the collection that is grouped by donor is read, where it has one. Any
        collection works, but bags are read fastest where a donor's cells lie together.
    bag_by
        Columns of ``obs`` whose combinations make bags, for bags finer than donors, such as
        ``["donor_id", "cell_type"]``; a bag's id is then a tuple. Default: the donor column alone.
    bags_per_batch
        Bags a batch.
    max_cells
        Cells of a bag at the most; of a larger bag, another random subset each epoch. `None`: no limit.
    min_cells, small_bags
        What to do with bags of fewer than `min_cells` cells: ``"keep"``, ``"drop"``, or ``"resample"`` their cells with
        replacement up to `min_cells`.
    exact_cells
        Every bag has just so many cells; smaller ones are resampled, or left out with ``small_bags="drop"``.
    labels
        Column with the label of each bag: of `donor_table`, of the genotypes' ``obs``, or of the cells' ``obs`` where
        it is constant in each bag. Categories become codes, and :attr:`label_names` what they stand for.
    donor_covariates
        Columns to yield as numbers, from the same places.
    donor_table
        Table of donors, with ids as index.
    balance
        Column by which to balance: donors are drawn with replacement, each of its values as often.
    donor_weights
        Weight of each donor by id, to draw donors with replacement; those it does not name have weight 0.
    n_bags
        Bags a pass, where they are drawn with replacement. Default: as many as there are.
    shuffle
        Whether bags, and the cells in them, come in random order.
    cell_memory
        Memory for cells that are read ahead, whatever the sizes of bags; bounds `window_cells`. A batch that alone is
        larger, such as a bag of hundreds of thousands of cells, comes on top, and is read in parts. In bytes or as
        text.
    window_cells
        Cells that are read at once. Default: 16,384, or as many as `cell_memory` allows.
    obs_columns, variants, donors, cells_query, missing_donors, genotype_layer, genotype_memory, to, device, densify, \
prefetch, preload_to_gpu, check, seed
        As for :class:`DonorLoader`.

    Notes
    -----
    A batch is a dict:

    ``X``
        (n_cells, n_genes) the cells of all its bags, bag after bag, as :class:`DonorLoader` gives them.
    ``index``
        (n_cells,) int64, the row of each cell in the collection.
    ``obs``
        DataFrame of `obs_columns`, indexed by ``index``, or `None`.
    ``offsets``
        (n_bags + 1,) int64: bag i is ``X[offsets[i]:offsets[i + 1]]``.
    ``donors``
        (n_bags,) ids of the bags: of their donors, or tuples with `bag_by`.
    ``donor_idx``
        (n_cells,) int64, the bag of each cell.
    ``donor_features``
        (n_bags, n_variants) one row of genotypes per bag; `None` without genotypes.
    ``labels``
        (n_bags,) int64 codes or float32 values; `None` without `labels`.
    ``donor_covariates``
        Dict with an (n_bags,) array per column; `None` without.
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any = None,
        *,
        donor_key: str | None = None,
        bag_by: Sequence[str] | None = None,
        bags_per_batch: int = 8,
        max_cells: int | None = 2000,
        min_cells: int | None = None,
        small_bags: Literal["keep", "drop", "resample"] = "keep",
        exact_cells: int | None = None,
        labels: str | None = None,
        donor_covariates: Sequence[str] = (),
        donor_table: pd.DataFrame | None = None,
        balance: str | None = None,
        donor_weights: Mapping[Any, float] | None = None,
        n_bags: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        cell_memory: int | str = "512MB",
        window_cells: int | None = None,
        obs_columns: Sequence[str] = (),
        variants: Any = None,
        donors: Iterable[Any] | None = None,
        cells_query: str | None = None,
        missing_donors: Literal["error", "drop", "nan"] = "error",
        genotype_layer: str | None = None,
        genotype_memory: int | str = "1GB",
        to: Literal["torch", "numpy"] = "torch",
        device: str | torch.device | None = None,
        densify: bool = False,
        prefetch: int | None = None,
        preload_to_gpu: bool = False,
        check: bool = True,
    ):
        options = ReadOptions.checked(
            obs_columns=obs_columns,
            donor_rows="batch",
            missing_donors=missing_donors,
            genotype_memory=genotype_memory,
            to=to,
            device=device,
            densify=densify,
            prefetch=prefetch,
            preload_to_gpu=preload_to_gpu,
            check=check,
        )
        seed = check_seed(seed)
        if balance is not None and donor_weights is not None:
            raise ValueError("balance and donor_weights both decide how often a donor is drawn: give one.")
        tables = open_tables(
            cells,
            genotypes,
            donor_key=donor_key,
            donors=donors,
            cells_query=cells_query,
            variants=variants,
            missing_donors=missing_donors,
            genotype_layer=genotype_layer,
            genotype_memory=options.genotype_memory,
            bags=True,
        )
        codes, ids, bag_donors = bag_codes(tables, None if bag_by is None else list(bag_by))
        self._ids = np.empty(len(ids), dtype=object)
        self._ids[:] = ids

        def column(name: str) -> Any:
            return bag_column(name, tables, donor_table, codes, ids, bag_donors)

        self._labels = None if labels is None else column(labels)
        self._covariates = {name: column(name) for name in donor_covariates}
        weights = None
        if balance is not None:
            weights = _balanced(column(balance).values)
        elif donor_weights is not None:
            by_id = {str(donor): float(weight) for donor, weight in donor_weights.items()}
            weights = np.array([by_id.get(donor, 0.0) for donor in tables.match.ids[bag_donors]])
        cell_bytes = tables.source.cell_bytes
        room = parse_memory(cell_memory, "cell_memory")
        part = room // (_DENSE_PARTS if densify else _PARTS)
        if window_cells is None:
            window_cells = max(1, min(WINDOW_CELLS, int(part / cell_bytes)))
        sampler = BagSampler(
            codes,
            bags_per_batch=bags_per_batch,
            max_cells=None if exact_cells is not None else max_cells,
            min_cells=min_cells,
            small_bags=small_bags,
            exact_cells=exact_cells,
            weights=weights,
            n_bags=n_bags,
            shuffle=shuffle,
            window_cells=window_cells,
            rng=np.random.default_rng(0),
        )
        _notice_scattered_cells(tables, sampler)
        engine = Engine(
            tables,
            sampler,
            seed=seed,
            window_cells=window_cells,
            options=options,
            room=part if not densify else room // 4,
            add_fields=self._add_fields,
        )
        super().__init__(tables, engine)

    @property
    def label_names(self) -> NDArray[np.object_] | None:
        """What the codes of ``labels`` stand for; `None` without labels, or where they are numbers."""
        return None if self._labels is None else self._labels.categories

    def _add_fields(self, batch: dict[str, Any], genotypes: GenotypeBatch) -> None:
        bags = genotypes.bags
        batch["donors"] = self._ids[bags]
        sizes = np.bincount(genotypes.donor_idx, minlength=genotypes.donors.size)
        batch["offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        batch["labels"] = None if self._labels is None else self._labels.values[bags]
        batch["donor_covariates"] = {k: c.values[bags] for k, c in self._covariates.items()} or None
        del batch["unique_donors"]


def _notice_scattered_cells(tables: Tables, sampler: BagSampler) -> None:
    """Tell, with a figure, where reading by bag is slow because a donor's cells do not lie together."""
    codes = tables.match.codes
    bounds = np.cumsum([dataset.n_obs for dataset in tables.source.datasets])[:-1]
    starts = np.union1d(np.flatnonzero(np.diff(codes)) + 1, bounds)
    if starts.size < (tables.match.ids.size + 1) * (bounds.size + 1):
        return  # a run of cells per donor and dataset, or few more
    request = next(replay(sampler, codes.size, seed=0, epoch=0))
    rows = request_rows(request["requests"])[np.concatenate(request["splits"])]
    times = tables.source.decoded_cells(rows) / rows.size
    if times < 2:
        return
    warnings.warn(
        f"Bags are read fastest where a donor's cells lie together, and here they do not: {times:.1f} times the cells "
        "of a bag are decoded to read it, and loading takes about as much longer. `donorloader prepare` writes a "
        "grouped collection, which the bags of a study are read from; with annbatch alone it is "
        f"DatasetCollection(...).add_adatas(..., groupby={tables.donor_key!r}).",
        UserWarning,
        stacklevel=3,
    )


def _balanced(values: NDArray[Any]) -> NDArray[np.float64]:
    """Weights that give each distinct value the same chance."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse]
