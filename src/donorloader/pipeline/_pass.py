"""One pass over the batches: the iterator that a training loop holds."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._conveyor import Conveyor
    from ._join import Joiner

__all__ = ["Pass", "PassRecord", "join_lanes"]


@dataclass
class PassRecord:
    """What is known of a pass when its iterator is gone.

    Attributes
    ----------
    epoch
        Its epoch.
    skipped
        Batches of the epoch that were delivered before the pass, which is the rest of a resumed one.
    delivered
        Batches that were taken; those that are read ahead do not count.
    begun
        Whether a batch was asked for.
    finished
        Whether it came to its end: all batches were taken.
    elsewhere
        Whether worker processes run it, in an order that a pass here has not.
    """

    epoch: int
    skipped: int = 0
    delivered: int = 0
    begun: bool = False
    finished: bool = False
    elsewhere: bool = False


class Pass:
    """Iterator over the batches of one epoch, which ends its lanes when it ends, fails, or is let go of.

    Parameters
    ----------
    conveyor
        The lanes of the pass.
    batches
        The joined batches.
    skipped
        Batches of the epoch that were delivered before.
    """

    def __init__(self, conveyor: Conveyor, batches: Iterator[dict[str, Any]], *, skipped: int = 0):
        self._conveyor = conveyor
        self._lock = threading.Lock()
        self.record = PassRecord(conveyor.epoch, skipped)
        self._batches = batches
        self._cut_short = False
        self._once_read: Callable[[], None] | None = None
        self._finalizer = weakref.finalize(self, conveyor.stop)
        self._finalizer.atexit = False  # the conveyor sees to the exit itself, in the right order

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            with self._lock:  # threads that share a pass take turns
                self.record.begun = True
                if self._conveyor.has_ended("cells"):
                    self._all_read()
                batch = next(self._batches)
                self.record.delivered += 1
                return batch
        except StopIteration:
            if not self._conveyor.stopped:
                self.record.finished = True
            self.close()
            if self.record.finished:
                self._all_read()
            if self._cut_short and not self.record.finished:
                raise RuntimeError(
                    f"The loader was closed in the middle of a pass: {self.record.delivered:,} batches of epoch "
                    f"{self.record.epoch} were delivered, and the others will not come. Close it after the loop."
                ) from None
            raise
        except BaseException:  # also KeyboardInterrupt: whatever ends the loop ends the lanes
            self.close()
            raise

    def once_read(self, do: Callable[[], None]) -> None:
        """Have something done when all cells have been read, by the loop's thread as it asks for another batch."""
        self._once_read = do

    def _all_read(self) -> None:
        do, self._once_read = self._once_read, None
        if do is not None:
            do()

    def close(self) -> None:
        """End the pass and its threads; harmless if it has ended."""
        self._finalizer()

    def cut_short(self) -> None:
        """End the pass, and let whoever asks it for another batch know that it was not complete."""
        self._cut_short = True
        self.close()

    @property
    def seconds(self) -> dict[str, dict[str, float]]:
        """Per lane, the time spent at work, blocked by a full queue, and waited for by its reader. Unit: seconds."""
        return self._conveyor.seconds


def join_lanes(
    cells: Iterator[Any],
    genotypes: Iterator[Any],
    joiner: Joiner,
    assemble: Callable[[Any, Any], dict[str, Any]],
    *,
    check: bool,
) -> Iterator[dict[str, Any]]:
    """Pair the lanes batch by batch, prove each pair, and make a batch of it.

    Raises
    ------
    RuntimeError
        If one lane ends before the other, or a pair does not belong together.
    """
    while True:
        cell_batch, donor_batch = next(cells, None), next(genotypes, None)
        if cell_batch is None and donor_batch is None:
            return
        if cell_batch is None or donor_batch is None:
            ended = "cells" if cell_batch is None else "genotypes"
            raise RuntimeError(
                f"Cells and genotypes do not belong together: the {ended} ended before the other lane did. The sampler "
                "gave the two a different number of batches."
            )
        if check:
            joiner.check(cell_batch, donor_batch)
        yield assemble(cell_batch, donor_batch)
        del cell_batch, donor_batch  # or they stay alive while the next pair is waited for
