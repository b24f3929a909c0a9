"""What the front doors share: passes and epochs, names, timings, closing."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from torch.utils.data import IterableDataset, get_worker_info

from donorloader._next_pass import NextPass
from donorloader._process import Process, sendable
from donorloader._state import STATE_VERSION, check_format, check_same, fingerprint
from donorloader.pipeline import PassRecord, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    import scipy.sparse as sp
    from numpy.typing import NDArray

    from donorloader._engine import Engine, Transform
    from donorloader._ordering import Ordering
    from donorloader._tables import Tables
    from donorloader.genotypes import ReadCounts

__all__ = ["StreamLoader", "check_epoch", "check_seed"]


def _read_on(loader: weakref.ref[StreamLoader], transform: Transform | None) -> None:
    """Begin the next pass of a loader, if there is one who could ask for it."""
    if (this := loader()) is not None and not this._closed:
        this._next.begin(*this._progress.next_pass(), transform)


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

    _arguments: dict[str, Any]
    _is_copy = False  # of a loader in another process, which has told what is to be told

    def __init__(self, tables: Tables, engine: Engine, ordering: Ordering):
        super().__init__()
        self._tables, self._engine, self._ordering = tables, engine, ordering
        self._process, self._shared_out = Process(), False
        self._progress, self._next = Progress(), NextPass(engine)
        self._seconds: dict[str, dict[str, float]] = {}
        self._closed = False
        self._last: PassRecord | None = None
        self._identities: dict[int | None, dict[str, Any]] = {}  # by number of canonical shards

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a new pass: the next epoch."""
        return self.begin()

    def begin(self, transform: Transform | None = None) -> Iterator[dict[str, Any]]:
        """Begin a new pass, as ``iter()`` does, over what `transform` makes of each batch, ahead of the loop.

        For who turns batches into what a model takes, as :class:`LIVIBatches` does.
        """
        if self._closed:
            raise ValueError("This loader is closed. Make a new one to iterate again.")
        if get_worker_info() is not None and not self._shared_out:
            raise RuntimeError(
                f"{type(self).__name__} has threads of its own and cannot run in the workers of a plain DataLoader, "
                "where each would yield everything again. Use num_workers=0, or dataloader(loader, num_workers=…) of "
                "donorloader."
            )
        self._process.check(type(self).__name__)
        epoch, skip = self._progress.next_pass()
        pass_ = self._next.take(epoch, skip, transform)
        if self._engine.reads_next_epoch:
            pass_.once_read(partial(_read_on, weakref.ref(self), transform))
        self._last, self._seconds = pass_.record, pass_.seconds
        self._progress.begin(pass_.record)
        return pass_

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to open the same loader: its options, if they are paths and plain values."""
        arguments = sendable(self._arguments, type(self).__name__, self._ordering.ranks)
        return {"arguments": arguments, "order": self._ordering.taken_over, "next": self._progress.next_pass()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the stores anew, in this process; the next pass is the one that would have been next in the other."""
        self._is_copy = True
        self.__init__(**state["arguments"])  # type: ignore[misc]
        self._ordering.taken_over = state["order"]
        self._engine.set_sampler(self._ordering.sampler)
        self._progress.load(*state["next"])

    def check_workers(self, num_workers: int) -> None:
        """Check that so many workers of a DataLoader can share each epoch."""
        self.__getstate__()
        self._ordering.for_worker(0, num_workers)
        self._begins_whole()

    def worker_batches(self, num_workers: int) -> int:
        """Batches of a pass that so many workers yield together."""
        ordering = self._ordering.for_worker(0, num_workers)
        return num_workers * ordering.sampler.n_batches(self._tables.source.n_obs)

    def begin_elsewhere(self) -> PassRecord:
        """Take note that workers begin a pass; whoever runs it keeps its record."""
        self._last = PassRecord(self._begins_whole(), elsewhere=True)
        self._progress.begin(self._last)
        return self._last

    def _begins_whole(self) -> int:
        """The epoch of the next pass, which must not be the rest of one."""
        epoch, skip = self._progress.next_pass()
        if skip or (self._ordering.resumed is not None and self._ordering.resumed[0] == epoch):
            raise ValueError(
                f"A loader resumes in the middle of an epoch with num_workers=0 only, and epoch {epoch} was loaded in "
                "its middle. Use no workers, or begin an epoch anew: set_epoch()."
            )
        return epoch

    def iterate_share(self, epoch: int, worker: int, num_workers: int) -> Iterator[dict[str, Any]]:
        """In a worker of a DataLoader: its share of an epoch."""
        if not self._shared_out:
            self._ordering = self._ordering.for_worker(worker, num_workers)
            self._engine.set_sampler(self._ordering.sampler)
            self._shared_out = True
        self.set_epoch(epoch)
        return iter(self)

    def __len__(self) -> int:
        """Number of batches of a whole pass, also where the next one is the rest of a resumed epoch."""
        return self._engine.n_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; the passes after it count on from there.

        After :meth:`load_state_dict`, the epoch of the state is resumed as loaded; any other starts at its beginning.
        """
        if self._progress.choose(check_epoch(epoch)) and self._ordering.begin_anew():
            self._engine.set_sampler(self._ordering.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest pass is, for :meth:`load_state_dict` in another process.

        Of the batches, those count that the loop has taken; what is read ahead does not. At the end of a pass, after
        its iterator has said so, this is the beginning of the next epoch. A pass that was broken off stands where it
        was left: its rest is what a resumed loader begins with, unless ``set_epoch`` names another epoch.

        Returns
        -------
        Numbers and texts that JSON can hold: ``version`` of the format, ``seed``, ``epoch``, ``batches`` of the epoch
        that were delivered, and in ``of`` a fingerprint of data and settings. With several ranks or canonical shards,
        ``position`` counts the cells, or bags, that all ranks together have delivered, as each rank has at the same
        step: the states of all ranks are the same.

        Raises
        ------
        ValueError
            In the middle of a pass that workers run: they deliver batches in an order of their own.
        """
        epoch, batches = self._progress.position
        return {
            "version": STATE_VERSION,
            "seed": self._engine.sampler.seed,
            "epoch": epoch,
            "batches": batches,
            "position": self._ordering.position(epoch, batches, len(self)),
            **self._ordering.settings(),
            "of": dict(self._identity(self._ordering.n_shards)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a state was saved: the next pass is the rest of its epoch, bit for bit.

        Passes that run are not touched: call it before ``iter()``. Of load requests whose batches were all delivered,
        neither cells nor genotypes are read. :attr:`epoch` is that of the state from now on, and ``len()`` stays the
        number of batches of a whole epoch. A state of another number of ranks is taken over where this one divides the
        canonical shards of the state: the ranks share what is left.

        Parameters
        ----------
        state_dict
            What :meth:`state_dict` of a loader over the same data, with the same settings, has returned.

        Raises
        ------
        TypeError, ValueError
            If it is no state, is of another format version, was saved with other data or settings, or on a number of
            ranks that this one cannot take over from; the message names what differs.
        """
        check_format(state_dict)
        shards, epoch, batches = (state_dict[name] for name in ("num_canonical_shards", "epoch", "batches"))
        self._ordering.check(shards, state_dict["world_size"])
        check_same(state_dict, self._identity(shards), self._engine.sampler.seed)
        if self._ordering.counts_units(shards) != (state_dict["position"] is not None):
            raise ValueError("The state is damaged: 'position' goes with a number of canonical shards, and only so.")
        if state_dict["position"] is not None:
            batches = self._ordering.resume(shards, epoch, state_dict["position"])
            self._engine.set_sampler(self._ordering.sampler)
        elif batches > len(self):
            raise ValueError(f"The state is damaged: it has {batches:,} batches of an epoch that has {len(self):,}.")
        self._progress.load(epoch, batches)

    def _identity(self, n_shards: int | None) -> dict[str, Any]:
        if n_shards not in self._identities:
            whole, seed = self._ordering.whole(n_shards), self._engine.sampler.seed
            self._identities[n_shards] = fingerprint(type(self).__name__, self._tables, whole, seed)
        return self._identities[n_shards]

    @property
    def epoch(self) -> int:
        """Epoch of the pass that was begun last; before any, and after a choice or a load, of the one to come."""
        return self._progress.epoch

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
        where the loop waits, the one of these that is waited for is slow. Batches for a model of :class:`LIVIBatches`
        are made behind the join, by ``transform``.
        """
        return pd.DataFrame.from_dict(self._seconds, orient="index", columns=["work", "blocked", "waited_for"])

    def close(self) -> None:
        """End all passes and their threads, and close the files that this loader opened. Safe to call again.

        A loop that asks a pass for another batch then gets a `RuntimeError`: it has not seen all of them.
        """
        self._closed = True
        self._next.drop()
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
