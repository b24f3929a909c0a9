"""Bags by number or donor: a map-style dataset for torch's own DataLoader."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset

from donorloader._bag_source import MAX_CELLS, BagSource, window_budget
from donorloader._buffers import BufferPool
from donorloader._choose import as_donors
from donorloader._ids import shorten
from donorloader._options import GenotypeOptions, ReadOptions, parse_memory
from donorloader._stream_loader import check_epoch, check_seed
from donorloader.cells import RowReader, stack_tensors, to_dense
from donorloader.genotypes import GenotypeBatch
from donorloader.pipeline import Joiner, silence_csr_warning, to_torch
from donorloader.samplers import WINDOW_CELLS, pass_generator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from donorloader._choose import Donors
    from donorloader.genotypes import Encoding, MissingCalls

__all__ = ["BagDataset", "collate_bags"]


class BagDataset(Dataset[dict[str, Any]]):
    """One bag per item, by number or by id, for :class:`torch.utils.data.DataLoader`.

    :class:`BagLoader` streams faster, as it reads many bags at once and ahead. This is for code that needs items at
    random, or a sampler of its own. Use ``collate_fn=collate_bags``, which gives the batches of :class:`BagLoader`.

    Parameters
    ----------
    cells, genotypes, donor_key, bag_by, max_cells, min_cells, small_bags, exact_cells, labels, donor_covariates, \
donor_table, obs_columns, variants, donors, cells_query, missing_donors, genotype_layer, genotype_encoding, \
missing_calls, genotype_memory, densify, \
check, seed, cell_memory
        As for :class:`BagLoader`. Which cells stand for a large bag depends on seed, epoch and bag alone.

    Notes
    -----
    An item is a dict: ``X`` (n_cells, n_genes), ``index`` (n_cells,), ``obs``, ``donor`` the bag's id,
    ``donor_features`` (n_variants,) or `None`, ``label`` and ``donor_covariates``, numbers or `None`.

    Workers (``num_workers``) must be started by spawn, ``multiprocessing_context="spawn"``: zarr's threads do not
    survive a fork. Each worker opens the stores again, an open :class:`GenotypeStore` by its path too, and keeps
    genotype rows of its own within `genotype_memory`.
    """

    def __init__(
        self,
        cells: Any,
        genotypes: Any = None,
        *,
        donor_key: str | None = None,
        bag_by: Sequence[str] | None = None,
        max_cells: int | None = MAX_CELLS,
        min_cells: int | None = None,
        small_bags: Literal["keep", "drop", "resample"] = "keep",
        exact_cells: int | None = None,
        labels: str | None = None,
        donor_covariates: Sequence[str] = (),
        donor_table: pd.DataFrame | None = None,
        seed: int = 0,
        obs_columns: Sequence[str] = (),
        variants: Any = None,
        donors: Donors = None,
        cells_query: str | None = None,
        missing_donors: Literal["error", "drop", "nan"] = "error",
        genotype_layer: str | None = None,
        genotype_encoding: Encoding | None = None,
        missing_calls: MissingCalls | None = None,
        genotype_memory: int | str = "auto",
        cell_memory: int | str = "512MB",
        densify: bool = False,
        check: bool = True,
    ):
        donors = as_donors(donors)
        donor_covariates = donor_covariates if isinstance(donor_covariates, str) else list(donor_covariates)
        self._arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # workers that live on see it change
        self._open()
        self._source.notice_if_scattered(self._sampler)

    def _open(self) -> None:
        options = self._arguments
        self._read = ReadOptions.checked(
            **{name: options[name] for name in ("obs_columns", "densify", "check")},
            donor_rows="batch",
            to="torch",
            device=None,
            prefetch=0,
            preload_to_gpu=False,
            genotypes_on_device=False,
        )
        self._seed = check_seed(options["seed"])
        cell_memory = parse_memory(options["cell_memory"], "cell_memory")
        names = ["cells", "genotypes", "bag_by", "labels", "donor_covariates", "donor_table", "donor_key", "donors"]
        names += ["cells_query"]
        chosen = GenotypeOptions.checked(**{field.name: options[field.name] for field in fields(GenotypeOptions)})
        self._source = source = BagSource(**{name: options[name] for name in names}, genotype_options=chosen)
        tables, columns = source.tables, self._read.obs_columns
        most, _ = window_budget(cell_memory, tables.source.cell_bytes, dense=options["densify"])
        window_cells = min(WINDOW_CELLS, most)
        sizes = {name: options[name] for name in ("max_cells", "min_cells", "small_bags", "exact_cells")}
        with tables.closed_on_error():
            self._sampler = source.sampler(bags_per_batch=1, window_cells=window_cells, **sizes)
            source.describe(self._sampler.bags)
        self._reader = RowReader(tables.source, window_cells=window_cells)
        self._joiner = Joiner(tables.match.codes, tables.match.ids, None if tables.store is None else tables.store.ids)
        self._obs = tables.source.obs(columns) if columns else None
        self._number = {self._id_of(bag): number for number, bag in enumerate(self._sampler.bags)}
        self._pool = BufferPool(keep=2)
        self._process, self._closed = os.getpid(), False
        silence_csr_warning()

    def __getstate__(self) -> dict[str, Any]:
        """What a worker needs to open the same bags."""
        return {"arguments": self._arguments, "epoch": self._epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the stores anew, in this process."""
        self._arguments, self._epoch = state["arguments"], state["epoch"]
        self._open()

    def __len__(self) -> int:
        """Number of bags."""
        return int(self._sampler.bags.size)

    @property
    def donors(self) -> NDArray[np.object_]:
        """(n_bags,) id of each bag, by number."""
        return self._source.ids[self._sampler.bags]

    @property
    def label_names(self) -> NDArray[np.object_] | None:
        """What the codes of the labels stand for; `None` without labels, or where they are numbers."""
        return self._source.label_names

    @property
    def covariate_names(self) -> dict[str, NDArray[np.object_] | None]:
        """What the codes of each of the covariates stand for; `None` where they are numbers."""
        return self._source.covariate_names

    @property
    def epoch(self) -> int:
        """With the seed, decides which cells stand for a large bag."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, also for workers that run."""
        self._epoch.fill_(check_epoch(epoch))

    def __getitem__(self, key: Any) -> dict[str, Any]:
        """A bag, by number, or by id: the donor's as text, or a tuple where `bag_by` makes finer bags.

        Raises
        ------
        IndexError, KeyError
            If there is no such bag.
        RuntimeError
            In a process that was forked.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "A BagDataset cannot be read in a forked process, where zarr's threads are missing. Start workers with "
                "DataLoader(..., multiprocessing_context='spawn')."
            )
        if self._closed:
            raise ValueError("This dataset is closed. Make a new one to read bags.")
        number = self._find(key)
        bag = int(self._sampler.bags[number])
        rows = self._sampler.draw_cells(bag, pass_generator(self._seed, self.epoch, stream=bag))
        cells = self._reader.read(rows)
        donor = self._source.donors[bag : bag + 1]
        table = self._source.tables.table
        genotypes = GenotypeBatch(
            donors=donor,
            rows=None if table is None else table.rows[donor],
            features=None if table is None else table.rows_now(donor, self._pool),
            donor_idx=np.zeros(rows.size, dtype=np.int64),
            bags=np.array([bag]),
        )
        if self._read.check:
            if not np.array_equal(cells.index, rows):
                raise RuntimeError(f"Bag {self._id_of(bag)!r} was asked for, but other cells were read.")
            self._joiner.check(cells, genotypes)
        fields = self._source.fields(np.array([bag]))
        covariates = fields["donor_covariates"]
        return {
            "X": to_torch(to_dense(cells.X, self._pool) if self._read.densify else cells.X),
            "index": torch.from_numpy(cells.index),
            "obs": None if self._obs is None else self._obs.take(cells.index),
            "donor": fields["donors"][0],
            "donor_features": None if genotypes.features is None else torch.from_numpy(genotypes.features[0]),
            "label": None if fields["labels"] is None else fields["labels"][0],
            "donor_covariates": None if covariates is None else {name: v[0] for name, v in covariates.items()},
        }

    def close(self) -> None:
        """Close the files that this dataset opened."""
        self._closed = True
        self._source.tables.close()

    def _id_of(self, bag: int) -> Any:
        return self._source.ids[bag]

    def _find(self, key: Any) -> int:
        if isinstance(key, int | np.integer) and not isinstance(key, bool):
            if not -len(self) <= key < len(self):
                raise IndexError(f"There are {len(self):,} bags, numbered from 0, got {key}.")
            return int(key) % len(self)
        if key not in self._number:
            raise KeyError(f"There is no bag {key!r}. Bags are {shorten(list(self._number))}.")
        return self._number[key]

    def __repr__(self) -> str:
        source = self._source.tables.source
        return f"BagDataset({len(self):,} bags, {source.var_names.size:,} genes)"


def collate_bags(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Items of a :class:`BagDataset` as a batch of :class:`BagLoader`.

    Parameters
    ----------
    items
        At least one.
    """
    if not items:
        raise ValueError("A batch needs at least one bag, but there are no items.")
    first = items[0]
    sizes = np.array([item["index"].numel() for item in items])

    def stack(name: str) -> torch.Tensor | None:
        return None if first[name] is None else torch.as_tensor(np.array([item[name] for item in items]))

    covariates = first["donor_covariates"]
    donors = np.empty(len(items), dtype=object)
    donors[:] = [item["donor"] for item in items]
    return {
        "X": stack_tensors([item["X"] for item in items]),
        "index": torch.cat([item["index"] for item in items]),
        "obs": None if first["obs"] is None else pd.concat([item["obs"] for item in items]),
        "donor_idx": torch.from_numpy(np.repeat(np.arange(len(items)), sizes)),
        "donor_features": None
        if first["donor_features"] is None
        else torch.stack([item["donor_features"] for item in items]),
        "donors": donors,
        "offsets": torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        "labels": stack("label"),
        "donor_covariates": None
        if covariates is None
        else {k: torch.as_tensor(np.array([item["donor_covariates"][k] for item in items])) for k in covariates},
    }
