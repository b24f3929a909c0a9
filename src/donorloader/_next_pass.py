"""The pass that comes next, begun while the one before it comes to its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from donorloader._engine import Engine, Transform
    from donorloader.pipeline import Pass

    type _Wanted = tuple[int, int, Transform | None]

__all__ = ["NextPass"]


class NextPass:
    """Begins passes: when they are asked for, or before.

    One that was begun before waits, with as many batches ready as any. It is handed out if it is the one that is asked
    for, and ended if it is not.

    Parameters
    ----------
    engine
        Runs passes.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._waiting: tuple[object, Pass, threading.Event] | None = None

    def begin(self, epoch: int, skip: int, transform: Transform | None) -> None:
        """Begin a pass that is likely to be asked for, unless it waits already."""
        key = self._key(epoch, skip, transform)
        if self._waiting is not None and self._waiting[0] == key:
            return
        self.drop()
        called = threading.Event()
        self._waiting = key, self._engine.start(epoch, skip=skip, transform=transform, called=called), called

    def take(self, epoch: int, skip: int, transform: Transform | None) -> Pass:
        """The pass that is asked for, over what `transform` makes of each batch."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            key, pass_, called = waiting
            if key == self._key(epoch, skip, transform):
                called.set()
                return pass_
            pass_.close()
        return self._engine.start(epoch, skip=skip, transform=transform)

    def drop(self) -> None:
        """End the pass that waits, if one does."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting[1].close()

    def _key(self, *wanted: object) -> object:
        return (*wanted, self._engine.sampler)  # which is not changed, but replaced
