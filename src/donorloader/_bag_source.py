"""Bags as both front doors see them: cells, genotypes, which cells make a bag, and what is told of it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from donorloader._donor_columns import BagColumn, bag_codes, bag_column
from donorloader._tables import Tables, open_tables
from donorloader.samplers import BagSampler, ShardBagSampler, replay, request_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from donorloader._choose import Donors
    from donorloader._options import GenotypeOptions
    from donorloader.genotypes import GenotypeBatch
    from donorloader.samplers import Share

__all__ = ["MAX_CELLS", "BagSource", "window_budget"]

# Cells of a bag at the most, unless a user says otherwise.
MAX_CELLS = 2000

# Parts that `cell_memory` is cut into. Sparse: the window that is split into batches, the next one being read, the
# batches of both queues, the one at hand. Dense: two windows, and two parts for each of three queues, one of them
# sparse.
_PARTS, _DENSE_PARTS = 5, 8

# What a pass takes besides: the order of the cells, decoders, what the allocator keeps. Measured. Unit: bytes.
_BESIDES = 64 << 20


class BagSource:
    """The tables, cut into bags.

    Parameters
    ----------
    cells, genotypes, donor_key, donors, cells_query, genotype_options
        As for :func:`open_tables`.
    bag_by, labels, donor_covariates, donor_table
        As for :class:`donorloader.BagLoader`; of labels and covariates only the names are checked here.

    Attributes
    ----------
    tables
        Cells and genotypes.
    codes
        (n_cells,) int64 bag of each cell, -1 for cells that are not in use.
    ids
        (n_bags,) id of each bag: of its donor, or a tuple.
    donors
        (n_bags,) int64 donor code of each bag.
    labels, covariates
        Values per bag, once :meth:`describe` has looked them up.
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any,
        *,
        bag_by: Sequence[str] | None,
        labels: str | None,
        donor_covariates: Sequence[str],
        donor_table: pd.DataFrame | None,
        donor_key: str | None,
        donors: Donors,
        cells_query: str | None,
        genotype_options: GenotypeOptions,
    ):
        for name, value in (("bag_by", bag_by), ("donor_covariates", donor_covariates)):
            if isinstance(value, str):
                raise TypeError(f"{name} must be a list of names, got the text {value!r}; use [{value!r}].")
        if labels is not None and not isinstance(labels, str):
            raise TypeError(f"labels must be the name of one column, got {labels!r}.")
        self.tables: Tables = open_tables(
            cells,
            genotypes,
            donor_key=donor_key,
            donors=donors,
            cells_query=cells_query,
            genotype_options=genotype_options,
            bags=True,
        )
        self._donor_table = donor_table
        self._labels, self._covariates = labels, tuple(donor_covariates)
        self.labels: BagColumn | None = None
        self.covariates: dict[str, BagColumn] = {}
        with self.tables.closed_on_error():
            self.codes, ids, self.donors = bag_codes(self.tables, None if bag_by is None else list(bag_by))
            self.ids: NDArray[np.object_] = np.empty(len(ids), dtype=object)
            self.ids[:] = ids

    def describe(self, drawn: NDArray[np.int64]) -> None:
        """Look up the labels and covariates of the bags that can be drawn; the others need none.

        Raises
        ------
        KeyError, TypeError, ValueError
            As :func:`bag_column` does.
        """
        self.labels = None if self._labels is None else self.column(self._labels, drawn)
        self.covariates = {name: self.column(name, drawn) for name in self._covariates}

    def column(self, name: str, drawn: NDArray[np.int64]) -> BagColumn:
        """A column with one value for each of the bags that can be drawn."""
        return bag_column(name, self.tables, self._donor_table, self.codes, self.ids, self.donors, drawn)

    def notice_if_scattered(self, sampler: BagSampler) -> None:
        """Warn, with a figure, where reading by bag is slow because a donor's cells do not lie together."""
        source, match = self.tables.source, self.tables.match
        bounds = np.cumsum([dataset.n_obs for dataset in source.datasets])[:-1]
        starts = np.union1d(np.flatnonzero(np.diff(match.codes, prepend=-1)), bounds)
        runs = int((match.codes[starts] >= 0).sum())
        if runs <= match.ids.size * (bounds.size + 1):
            return  # a run of cells per donor and dataset
        request = next(replay(sampler, match.codes.size, seed=0, epoch=0))
        rows = request_rows(request["requests"])[np.concatenate(request["splits"])]
        times = source.decoded_cells(rows) / rows.size
        if times < 2:
            return
        warnings.warn(
            f"Bags are read fastest where a donor's cells lie together, and here they do not: {times:.1f} times as "
            "many cells are decoded as used, in many small pieces, which can take 40 times as long (measured on "
            "200,000 cells of 1,000 donors). `donorloader prepare` writes a grouped collection, which the bags of a "
            f"study are read from; annbatch writes one with add_adatas(…, groupby={self.tables.donor_key!r}).",
            UserWarning,
            stacklevel=3,
        )

    def sampler(
        self,
        *,
        max_cells: int | None,
        min_cells: int | None,
        small_bags: Literal["keep", "drop", "resample"],
        exact_cells: int | None,
        share: Share | None = None,
        resumed: tuple[int, int] | None = None,
        **options: Any,
    ) -> BagSampler:
        """A sampler of these bags, or of a rank's share of them; `options` are its others."""
        if exact_cells is not None and max_cells not in (None, MAX_CELLS):
            raise ValueError(f"exact_cells={exact_cells!r} is also the limit: leave max_cells={max_cells!r} out.")
        made = BagSampler if share is None else partial(ShardBagSampler, share=share, resumed=resumed)
        return made(
            self.codes,
            max_cells=None if exact_cells is not None else max_cells,
            min_cells=min_cells,
            small_bags=small_bags,
            exact_cells=exact_cells,
            rng=np.random.default_rng(0),  # every replica gets the generator of its epoch in place of this one
            **options,
        )

    @property
    def label_names(self) -> NDArray[np.object_] | None:
        """What the codes of the labels stand for; `None` without labels, or where they are numbers."""
        return None if self.labels is None else self.labels.categories

    @property
    def covariate_names(self) -> dict[str, NDArray[np.object_] | None]:
        """What the codes of each covariate stand for; `None` where they are numbers."""
        return {name: column.categories for name, column in self.covariates.items()}

    def fields(self, bags: NDArray[np.int64]) -> dict[str, Any]:
        """What is told of some bags: ids, labels, covariates."""
        return {
            "donors": self.ids[bags],
            "labels": None if self.labels is None else self.labels.values[bags],
            "donor_covariates": {name: column.values[bags] for name, column in self.covariates.items()} or None,
        }

    def add_fields(self, batch: dict[str, Any], genotypes: GenotypeBatch) -> None:
        """Make a batch of cells one of bags."""
        sizes = np.bincount(genotypes.donor_idx, minlength=genotypes.donors.size)
        batch["offsets"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if genotypes.bags is not None:  # always so, as the sampler is one of bags
            batch.update(self.fields(genotypes.bags))
        del batch["unique_donors"]


def window_budget(memory: int, cell_bytes: float, *, dense: bool) -> tuple[int, int]:
    """Cells that may be read at once, and bytes that batches in a queue may take, within a budget for cells.

    Parameters
    ----------
    memory
        The budget. Unit: bytes.
    cell_bytes
        What a cell takes as it is read. Unit: bytes.
    dense
        Whether batches are made dense.
    """
    memory = max(memory - _BESIDES, memory // 4)
    part = memory // (_DENSE_PARTS if dense else _PARTS)
    return max(1, int(part / cell_bytes)), memory // 4 if dense else part
