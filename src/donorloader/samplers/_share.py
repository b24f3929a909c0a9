"""What one rank takes of a global order that is the same on any number of ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Share", "choose_shards"]

# As many ranks as most runs have, and numbers that divide it.
_SHARDS = 64


class Share(NamedTuple):
    """The share of one rank.

    The global order is a sequence of units, cells or bags. From `begin` on, rank r of W takes units ``begin + r``,
    ``begin + r + W``, … of it and cuts them into batches, so that the batches of all ranks at one step are the next
    stretch of the global order, whatever W is.

    Attributes
    ----------
    rank, world_size
        Which of how many.
    n_shards
        Numbers of ranks that divide it can take over from each other: a chunk of cells belongs to one of so many
        canonical shards, and a shard to one rank.
    uneven
        Where the units do not give all ranks the same number of batches: ``"drop"`` the last ones, at most
        ``world_size - 1``, or ``"pad"``, repeating a unit on the ranks that lack one: the last of their places in the
        order, which for the rest of a resumed epoch may have been delivered before.
    """

    rank: int
    world_size: int
    n_shards: int
    uneven: Literal["drop", "pad"]

    def take(self, total: int, unit: int, begin: int = 0, *, drop_last: bool = False) -> tuple[int, int]:
        """How many units this rank takes of the order from `begin` on, and how many it repeats.

        Parameters
        ----------
        total
            Units of the global order.
        unit
            Units a batch.
        begin
            Units that were delivered before.
        drop_last
            Whether to leave out a last batch that is not full.
        """
        each, extra = divmod(max(0, total - begin), self.world_size)
        if drop_last:
            return each // unit * unit, 0
        if not extra or each % unit:  # another unit makes the last batch longer, and no other
            return each + (self.rank < extra), 0
        if self.uneven == "pad" and (each or begin):  # where none is left for a rank, one that it had before
            return each + (self.rank < extra), int(self.rank >= extra)
        return each, 0

    def n_batches(self, total: int, unit: int, *, drop_last: bool = False) -> int:
        """Batches of a whole epoch, the same number on every rank."""
        return -(-sum(self.take(total, unit, drop_last=drop_last)) // unit)

    def dropped(self, total: int, unit: int, begin: int = 0, *, drop_last: bool = False) -> int:
        """Units of an epoch, from `begin` on, that no rank takes."""
        ranks = (self._replace(rank=r) for r in range(self.world_size))
        return total - begin - sum(rank.take(total, unit, begin, drop_last=drop_last)[0] for rank in ranks)


def choose_shards(world_size: int, most: int, wanted: int | None = None) -> int:
    """Number of canonical shards: the wanted one, else 64, or fewer where a load request has fewer chunks.

    Parameters
    ----------
    world_size
        Number of ranks, which divides it.
    most
        Chunks of a load request: with more shards, a load request is larger.
    wanted
        The user's choice.

    Raises
    ------
    ValueError
        If the number of ranks does not divide the wanted number; the message gives numbers that do.
    """
    if wanted is None:
        shards = 1 << (max(1, min(_SHARDS, most)).bit_length() - 1)
        return -(-shards // world_size) * world_size
    if wanted % world_size:
        divisors = [n for n in range(1, wanted + 1) if wanted % n == 0]
        raise ValueError(
            f"The number of ranks must divide num_canonical_shards, but {world_size} does not divide {wanted}. Run on "
            f"{', '.join(map(str, divisors[:-1]))}{' or ' if divisors[:-1] else ''}{divisors[-1]}."
        )
    return wanted
