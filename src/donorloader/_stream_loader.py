"""What the front doors share: passes and epochs, names, timings, closing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    import scipy.sparse as sp
    from numpy.typing import NDArray

    from donorloader._engine import Engine
    from donorloader._tables import Tables
    from donorloader.genotypes import ReadCounts
    from donorloader.pipeline import PassRecord

__all__ = ["StreamLoader", "check_epoch", "check_seed"]


def check_seed(seed: Any) -> int:
    """A seed, or an error that says what one is."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}.")
    return int(seed)


def check_epoch(epoch: Any) -> int:
    """An epoch, or an error that says what one is."""
    if isinstance(epoch, bool) or not isinstance(epoch, int | np.integer) or epoch < 0:
        raise ValueError(f"epoch must be an integer of at least 0, got {epoch!r}.")
    return int(epoch)


class StreamLoader(IterableDataset[dict[str, Any]]):
    """Base of the loaders: every ``iter()`` begins a pass of the next epoch.

    Subclasses make the tables and the engine, and pass them on.
    """

    def __init__(self, tables: Tables, engine: Engine):
        super().__init__()
        self._tables, self._engine = tables, engine
        self._epoch, self._next_epoch = 0, 0
        self._closed = False
        self._last: PassRecord | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a new pass: the next epoch."""
        if self._closed:
            raise ValueError("This loader is closed. Make a new one to iterate again.")
        if get_worker_info() is not None:
            raise RuntimeError(
                f"{type(self).__name__} has threads of its own and cannot run in the workers of a DataLoader, where "
                "each would yield everything again. Use num_workers=0."
            )
        self._epoch = self._next_epoch
        self._next_epoch += 1
        pass_ = self._engine.start(self._epoch)
        self._last = pass_.record
        return pass_

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be sent to another process: it would run its threads and read all cells there again."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, as a DataLoader does to send it to workers. It reads ahead on "
            "threads of its own: use num_workers=0."
        )

    def __len__(self) -> int:
        """Number of batches of a pass."""
        return self._engine.n_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the passes after it count on from there."""
        self._epoch = self._next_epoch = check_epoch(epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the pass that was begun last; before any, of the one to come."""
        return self._epoch

    @property
    def n_obs(self) -> int:
        """Number of cells in use, after `donors`, `cells_query` and ``missing_donors="drop"``."""
        return int((self._tables.match.codes >= 0).sum())

    @property
    def donors(self) -> NDArray[np.object_]:
        """(n_donors,) ids of the donors in use, sorted as text."""
        return self._tables.match.ids

    @property
    def var_names(self) -> NDArray[np.object_]:
        """(n_genes,) names of the columns of ``X``."""
        return self._tables.source.var_names

    @property
    def variant_names(self) -> NDArray[np.object_] | None:
        """(n_variants,) names of the columns of ``donor_features``; `None` without genotypes."""
        table = self._tables.table
        return None if table is None else table.store.names(table.columns)

    @property
    def cis_mask(self) -> sp.csr_array | None:
        """(n_genes, n_variants) int8, 1 for variants near the gene; `None` without ``variants=cis_window(...)``."""
        return None if self._tables.cis is None else self._tables.cis.mask

    @property
    def cis_slices(self) -> dict[str, slice] | None:
        """Columns of ``donor_features`` near each gene; `None` unless ``variants=cis_window(...)``."""
        return None if self._tables.cis is None else self._tables.cis.slices

    @property
    def genotype_reads(self) -> ReadCounts | None:
        """Rows of genotypes that were needed and read so far, over all passes; `None` without genotypes."""
        table = self._tables.table
        return None if table is None else table.counts

    def timings(self) -> pd.DataFrame:
        """Where the time of the last pass went, per lane. Unit: seconds.

        ``work``: making its items. ``blocked``: waiting for room, i.e. for a slower reader. ``waited_for``: time that
        its reader waited for it. Of ``join`` the reader is the loop, of ``cells`` and ``genotypes`` it is the join:
        where the loop waits, the one of these that is waited for is slow.
        """
        return pd.DataFrame.from_dict(self._engine.seconds, orient="index", columns=["work", "blocked", "waited_for"])

    def close(self) -> None:
        """End all passes and their threads, and close the files that this loader opened. Safe to call again."""
        self._closed = True
        self._engine.close()
        self._tables.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        table = self._tables.table
        cells = f"{self.n_obs:,} cells × {self.var_names.size:,} genes"
        variants = "" if table is None else f" × {table.n_variants:,} variants"
        return f"{type(self).__name__}({cells}, {self.donors.size:,} donors{variants}, {len(self):,} batches)"
