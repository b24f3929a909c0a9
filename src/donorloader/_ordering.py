"""The order of a loader's epochs: its sampler on this rank, on any other, and resumed anywhere."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from donorloader.samplers import Share, choose_shards

if TYPE_CHECKING:
    from annbatch.abc import Sampler

    from donorloader._ranks import Ranks

__all__ = ["MakeSampler", "Ordering"]

_log = logging.getLogger("donorloader")


class MakeSampler(Protocol):
    """Makes a loader's sampler."""

    def __call__(
        self, share: Share | None, *, unit: int | None = None, resumed: tuple[int, int] | None = None
    ) -> Sampler:
        """The sampler of a share; the ordinary one for `None`.

        Parameters
        ----------
        share
            Which rank of how many.
        unit
            Cells, or bags, a batch, in place of the loader's.
        resumed
            An epoch, and how many cells, or bags, of its global order were delivered before.
        """


class Ordering:
    """The order of all epochs, as one rank sees it.

    One rank of one has the ordinary order, unless canonical shards are asked for.

    Parameters
    ----------
    ranks
        Which rank this is.
    make
        Makes samplers.
    what
        ``"cells"`` or ``"bags"``: the units of the global order.
    total
        Units of an epoch.
    unit
        Units a batch.
    drop_last
        Whether batches that are not full are left out.
    most
        Canonical shards at the most, where the user leaves their number open.
    elastic
        Whether other numbers of ranks can take over; a sampler of the user's is dealt to a fixed number.

    Raises
    ------
    ValueError
        If a rank would have nothing to do, or the ranks do not divide the shards.

    Attributes
    ----------
    n_shards
        Canonical shards; `None` in the ordinary order.
    """

    def __init__(
        self,
        ranks: Ranks,
        make: MakeSampler,
        *,
        what: str,
        total: int,
        unit: int,
        drop_last: bool = False,
        most: int = 64,
        elastic: bool = True,
    ):
        self.ranks = ranks
        self._options: dict[str, Any] = {
            "what": what,
            "total": total,
            "unit": unit,
            "drop_last": drop_last,
            "most": most,
        }
        self._make, self._total, self._unit, self._drop_last = make, total, unit, drop_last
        self._what, self._elastic = what, elastic
        self._resumed: tuple[int, int] | None = None
        self.n_shards: int | None = None
        if not elastic and ranks.n_shards not in (None, ranks.world_size):
            raise ValueError(
                "num_canonical_shards is of the loader's own order; what a batch_sampler draws is dealt to "
                f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}. Leave it out."
            )
        if ranks.world_size > 1 or ranks.n_shards is not None:
            if total < ranks.world_size:
                raise ValueError(
                    f"Every rank needs some of the {what}, but there are {total:,} {what} for {ranks.world_size:,} "
                    f"ranks ({ranks.source}). Use fewer ranks."
                )
            self.n_shards = choose_shards(ranks.world_size, most, ranks.n_shards) if elastic else ranks.world_size
        if drop_last and total // ranks.world_size < unit:
            among = f" on each of {ranks.world_size:,} ranks ({ranks.source})" if ranks.world_size > 1 else ""
            raise ValueError(
                f"drop_last=True leaves out a batch that is not full, and would leave none{among}: {total:,} {what} "
                f"are in use, and a batch has {unit:,}. Use drop_last=False, or a smaller batch."
            )
        if ranks.world_size > 1:
            rest = self._left_out(what) if elastic else self._left_out_when_dealt()
            rest = f"; {rest} are left out of each epoch" * bool(rest)
            told = f"{ranks.rank} of {ranks.world_size} ({ranks.source})"
            _log.info("Rank %s takes its share of every epoch%s.", told, rest)

    @property
    def sampler(self) -> Sampler:
        """The sampler of this rank."""
        return self._make(None if self.n_shards is None else self._share(self.n_shards), resumed=self._resumed)

    @property
    def resumed(self) -> tuple[int, int] | None:
        """The epoch that is not whole, and how much of it was delivered by another number of ranks."""
        return self._resumed

    @property
    def taken_over(self) -> tuple[int | None, tuple[int, int] | None]:
        """What a loaded state has changed, for a copy in another process: canonical shards, and what is resumed."""
        return self.n_shards, self._resumed

    @taken_over.setter
    def taken_over(self, taken: tuple[int | None, tuple[int, int] | None]) -> None:
        self.n_shards, self._resumed = taken

    def for_worker(self, worker: int, num_workers: int) -> Ordering:
        """The order of a worker process of this rank: that of a rank among all workers of all ranks."""
        ranks = self.ranks
        share = replace(
            ranks,
            rank=ranks.rank * num_workers + worker,
            world_size=ranks.world_size * num_workers,
            source=f"{num_workers} workers a rank",
        )
        return Ordering(share, self._make, **self._options)

    def whole(self, n_shards: int | None) -> Sampler:
        """The sampler that tells the global order of so many shards, the same on every rank."""
        if n_shards is None or not self._elastic:
            return self._make(None)
        return self._make(Share(0, 1, n_shards, "drop"), unit=1)

    def position(self, epoch: int, batches: int, n_batches: int) -> int | None:
        """Units of the global order that all ranks have delivered; `None` where batches alone tell.

        Parameters
        ----------
        epoch, batches
            Batches of an epoch that this rank, and so every other, has delivered.
        n_batches
            Those that it has in all.
        """
        if not self.counts_units(self.n_shards):
            return None
        begin = self._resumed[1] if self._resumed is not None and self._resumed[0] == epoch else 0
        delivered = begin + batches * self._unit * self.ranks.world_size
        return self._total if batches and batches >= n_batches else min(delivered, self._total)

    def counts_units(self, n_shards: int | None) -> bool:
        """Whether the place in an order of so many shards is told in units, and not in batches of one rank."""
        return n_shards is not None and self._elastic

    def check(self, n_shards: int | None, world_size: int) -> None:
        """Check that this rank can take over an order of so many shards.

        Raises
        ------
        ValueError
            If not; the message says how many ranks could.
        """
        if n_shards == self.n_shards and (self._elastic or world_size == self.ranks.world_size):
            return
        if not self._elastic:
            raise ValueError(
                f"What a batch_sampler draws was dealt to {world_size} rank{'s' * (world_size > 1)}, and is resumed on "
                f"as many, not on {self.ranks.world_size}."
            )
        if n_shards is None:
            raise ValueError(
                "The state was saved on one rank, in an order of its own, and is resumed on one rank without "
                "num_canonical_shards. To go on with several, begin with num_canonical_shards."
            )
        if self.ranks.n_shards not in (None, n_shards):
            raise ValueError(
                f"num_canonical_shards is {n_shards} in the state, and {self.ranks.n_shards} here: give {n_shards}, or "
                "leave it out."
            )
        choose_shards(self.ranks.world_size, n_shards, n_shards)

    def resume(self, n_shards: int | None, epoch: int, position: int) -> int:
        """Go on in an order of so many shards, after a position of an epoch; returns batches to leave out."""
        if n_shards is not None and position > self._total:
            raise ValueError(f"The state is damaged: it is at {position:,} of {self._total:,} {self._what}.")
        self.n_shards, self._resumed = n_shards, None
        batches, within = divmod(position, self._unit * self.ranks.world_size)
        if not within:
            return batches
        self._resumed = epoch, position
        if rest := self._left_out(f"{self._what} that are left", position):
            _log.info("Epoch %d is resumed on %d ranks; %s are left out of it.", epoch, self.ranks.world_size, rest)
        return 0

    def begin_anew(self) -> bool:
        """Let every epoch be whole; returns whether one was not."""
        was, self._resumed = self._resumed, None
        return was is not None

    def settings(self) -> dict[str, Any]:
        """What a state says of it."""
        return {"world_size": self.ranks.world_size, "num_canonical_shards": self.n_shards}

    def _left_out(self, what: str, begin: int = 0) -> str:
        """How many units from `begin` on no rank takes, as each has as many batches; nothing if all are taken."""
        dropped = self._share(self.n_shards).dropped(self._total, self._unit, begin, drop_last=self._drop_last)
        return f"{dropped:,} of {self._total - begin:,} {what}" if dropped else ""

    def _left_out_when_dealt(self) -> str:
        batches = self._make(None).n_batches(self._total)
        dropped = batches % self.ranks.world_size if self.ranks.uneven == "drop" else 0
        return f"{dropped:,} of {batches:,} batches" if dropped else ""

    def _share(self, n_shards: int | None) -> Share:
        return Share(self.ranks.rank, self.ranks.world_size, n_shards or 1, self.ranks.uneven)
