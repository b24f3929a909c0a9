"""The front door for bags: one donor's cells at a time, for multiple-instance learning."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from donorloader._bag_source import MAX_CELLS, BagSource, window_budget
from donorloader._bag_weights import bag_weights
from donorloader._choose import as_donors
from donorloader._engine import Engine
from donorloader._options import LEAST_SHARDS, GenotypeOptions, ReadOptions, parse_memory
from donorloader._ordering import Ordering
from donorloader._ranks import find_ranks
from donorloader._stream_loader import StreamLoader, check_seed
from donorloader.samplers import WINDOW_CELLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import pandas as pd
    import torch
    from annbatch.abc import Sampler
    from numpy.typing import NDArray

    from donorloader._choose import Donors
    from donorloader.genotypes import Encoding, MissingCalls
    from donorloader.pipeline import PassRecord
    from donorloader.samplers import Share

__all__ = ["BagLoader"]


class BagLoader(StreamLoader):
    """Stream bags: all cells of a donor, or a sample of them, donor by donor, with its label and genotypes.

    Every donor comes once a pass, in an order that depends on (seed, epoch) alone. Reading, joining, checks and the
    copy to a device are those of :class:`DonorLoader`.

    Parameters
    ----------
    cells, genotypes, donor_key
        As for :class:`DonorLoader`. Of a study, the collection that is grouped by donor is read, where it has one. Any
        collection works, but bags are read fastest where a donor's cells lie together: where they do not, a warning
        gives the figure, once for each loader that is made, not for its passes nor its copies in other processes.
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
        it is constant in each bag. Categories become codes, and :attr:`label_names` what they stand for. Bags that are
        never drawn, being too small or of weight 0, need none.
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
    obs_columns, variants, donors, cells_query, missing_donors, genotype_layer, genotype_encoding, missing_calls, \
genotype_memory, to, device, densify, genotypes_on_device, \
prefetch, read_next_epoch, preload_to_gpu, check, seed
        As for :class:`DonorLoader`.
    rank, world_size, num_canonical_shards, uneven
        As for :class:`DonorLoader`; what ranks share is bags, such that each has about as many cells (in random order;
        without `shuffle`, bags keep theirs). Fewer bags than ranks are an error.

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
        Dict with (n_bags,) values per column, as ``labels`` are; `None` without.
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any = None,
        *,
        donor_key: str | None = None,
        bag_by: Sequence[str] | None = None,
        bags_per_batch: int = 8,
        max_cells: int | None = MAX_CELLS,
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
        donors: Donors = None,
        cells_query: str | None = None,
        missing_donors: Literal["error", "drop", "nan"] = "error",
        genotype_layer: str | None = None,
        genotype_encoding: Encoding | None = None,
        missing_calls: MissingCalls | None = None,
        genotype_memory: int | str = "auto",
        to: Literal["torch", "numpy", "jax"] = "torch",
        device: str | torch.device | None = None,
        densify: bool = False,
        prefetch: int | None = None,
        read_next_epoch: bool = False,
        preload_to_gpu: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        num_canonical_shards: int | None = None,
        uneven: Literal["drop", "pad"] = "drop",
        genotypes_on_device: bool | None = None,
        check: bool = True,
    ):
        donors = as_donors(donors)
        self._arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        options = ReadOptions.checked(
            obs_columns=obs_columns,
            donor_rows="batch",
            to=to,
            device=device,
            densify=densify,
            prefetch=prefetch,
            read_next_epoch=read_next_epoch,
            preload_to_gpu=preload_to_gpu,
            genotypes_on_device=genotypes_on_device,
            check=check,
        )
        chosen = GenotypeOptions.checked(
            variants=variants,
            missing_donors=missing_donors,
            genotype_layer=genotype_layer,
            genotype_encoding=genotype_encoding,
            missing_calls=missing_calls,
            genotype_memory=genotype_memory,
        )
        seed = check_seed(seed)
        ranks = find_ranks(rank, world_size, num_canonical_shards, uneven)
        if balance is not None and donor_weights is not None:
            raise ValueError("balance and donor_weights both decide how often a donor is drawn: give one.")
        self._source = source = BagSource(
            cells,
            genotypes,
            bag_by=bag_by,
            labels=labels,
            donor_covariates=donor_covariates,
            donor_table=donor_table,
            donor_key=donor_key,
            donors=donors,
            cells_query=cells_query,
            genotype_options=chosen,
        )
        tables = source.tables
        budget = parse_memory(cell_memory, "cell_memory")
        most, room = window_budget(budget, tables.source.cell_bytes, dense=densify)
        window_cells = min(WINDOW_CELLS, most) if window_cells is None else window_cells
        make = partial(
            source.sampler,
            bags_per_batch=bags_per_batch,
            max_cells=max_cells,
            min_cells=min_cells,
            small_bags=small_bags,
            exact_cells=exact_cells,
            shuffle=shuffle,
            window_cells=window_cells,
        )
        with tables.closed_on_error():
            drawn, weights = make().bags, None
            if balance is not None or donor_weights is not None:
                weights = bag_weights(source, drawn, balance, donor_weights)
                drawn = drawn[weights[drawn] > 0]
            source.describe(drawn)
            make = partial(make, weights=weights, n_bags=n_bags)
            ordinary = make()

            def share_of(
                share: Share | None, *, unit: int | None = None, resumed: tuple[int, int] | None = None
            ) -> Sampler:
                return make(share=share, resumed=resumed, bags_per_batch=bags_per_batch if unit is None else unit)

            if not self._is_copy:
                source.notice_if_scattered(ordinary)
            ordering = Ordering(
                ranks,
                share_of,
                what="bags",
                total=ordinary.n_draws,
                unit=bags_per_batch,
                most=max(LEAST_SHARDS, ordinary.n_draws // 8),
            )
            engine = Engine(
                tables,
                ordering.sampler,
                seed=seed,
                window_cells=window_cells,
                options=options,
                room=room,
                add_fields=source.add_fields,
            )
        super().__init__(tables, engine, ordering)

    @property
    def label_names(self) -> NDArray[np.object_] | None:
        """What the codes of ``labels`` stand for; `None` without labels, or where they are numbers."""
        return self._source.label_names

    @property
    def covariate_names(self) -> dict[str, NDArray[np.object_] | None]:
        """What the codes of each of the ``donor_covariates`` stand for; `None` where they are numbers."""
        return self._source.covariate_names

    def bag_ids(self, epoch: int | None = None) -> list[NDArray[np.object_]]:
        """Ids of the bags of every batch of a pass, as ``donors`` gives them; no cell is read.

        Parameters
        ----------
        epoch
            The pass, whole. Default: the one that was begun last, which must have come to its end; of a resumed one,
            the batches that it had left.

        Raises
        ------
        RuntimeError
            If no pass was begun, or the last one was cut short: it is not the one whose results are at hand.
        """
        skip = 0
        if epoch is None:
            if self._last is None or self._last.elsewhere or not self._all_taken(self._last):
                raise RuntimeError(
                    "The last pass of this loader has not come to its end here, so its bags are not those of your "
                    "results. Keep the batches, or their `donors`, beside the results, or name the epoch."
                )
            epoch, skip = self._last.epoch, self._last.skipped
        requests = self._engine.plan(epoch, skip=skip)
        return [self._source.ids[bags] for request in requests for bags in request["bags"] or []]

    def _all_taken(self, record: PassRecord) -> bool:
        """Whether a pass gave all its batches; a loop that counts them, as Lightning's, does not ask for its end."""
        return record.finished or (not self._ordering.resumed and record.skipped + record.delivered >= len(self))
