"""Which pass comes next, and how far the latest one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._pass import PassRecord

__all__ = ["Progress"]


class Progress:
    """Counts passes: each is of the next epoch, unless an epoch is chosen or a position in one is loaded."""

    def __init__(self) -> None:
        self._next = 0
        self._record: PassRecord | None = None  # of the latest pass, if no other was chosen since
        self._loaded: tuple[int, int] | None = None

    @property
    def epoch(self) -> int:
        """Epoch of the latest pass; where none was begun since the start, or since another was chosen, of the next."""
        return self.position[0] if self._record is None else self._record.epoch

    @property
    def position(self) -> tuple[int, int]:
        """Epoch, and its batches that were delivered: where a copy would have to go on."""
        record = self._record
        if record is None:
            return self._loaded or (self._next, 0)
        if record.elsewhere and record.begun and not record.finished:
            raise ValueError(
                "In the middle of a pass that workers run, a loader has no state, as they deliver batches in an order "
                "of their own. Save it at the end of an epoch, or use num_workers=0."
            )
        return (record.epoch + 1, 0) if record.finished else (record.epoch, record.skipped + record.delivered)

    def choose(self, epoch: int) -> bool:
        """Let the next pass be that of an epoch: the rest of it, if that is what was loaded, else all of it.

        Returns whether it is all of it.
        """
        if (loaded := self._pending()) is not None and loaded[0] == epoch:
            return False
        self._next, self._record, self._loaded = epoch, None, None
        return True

    def load(self, epoch: int, batches: int) -> None:
        """Let the next pass be what an epoch has left after so many batches."""
        self._record, self._loaded = None, (epoch, batches)

    def next_pass(self) -> tuple[int, int]:
        """Epoch of the next pass, and its batches to leave out."""
        return self._pending() or (self._next, 0)

    def begin(self, record: PassRecord) -> None:
        """Take note that a pass was begun."""
        self._record, self._next = record, record.epoch + 1

    def _pending(self) -> tuple[int, int] | None:
        """The loaded position, until a batch is asked for: a framework may begin a pass and let go of it untouched."""
        if self._record is not None and self._record.begun:
            self._loaded = None
        return self._loaded
