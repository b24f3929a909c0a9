"""Lanes: threads that each run an iterator ahead of its reader, through a bounded queue."""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Conveyor"]

_JOIN_SECONDS = 10.0  # a lane that is inside a read ends after it; far longer than a read takes


_NOTE = "donorloader: "


class _Stopped(Exception):
    """Tells a lane that its pass is over."""


class Conveyor:
    """The lanes of one pass, and what they share: one lock, one failure, one end.

    A failure on any lane reaches the reader at its next step, whatever it waits for. Lanes hold no reference to the
    loader or to the pass, so these can be collected while lanes run; their finalizers call :meth:`stop`.

    Parameters
    ----------
    epoch
        The epoch, for messages.
    threads
        Whether lanes run on threads. Without, a lane is its iterator, run by its reader.
    """

    def __init__(self, epoch: int, *, threads: bool = True):
        self.epoch = epoch
        self._threaded = threads
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sources: list[Any] = []
        self.seconds: dict[str, dict[str, float]] = {}
        # Runs before zarr ends its event loop at exit, which was registered earlier; a lane that waits for that
        # loop would never end. Daemon threads, because Python waits for others before it runs any of this.
        atexit.register(self.stop)

    def lane[T](
        self, name: str, items: Iterable[T], *, capacity: int, batches: Callable[[T], int] = lambda _: 1
    ) -> Iterator[T]:
        """Run an iterable ahead on a thread of its own.

        Parameters
        ----------
        name
            Of the lane, in thread names, notes of errors and timings.
        items
            What to run; it is iterated, and closed, on the lane's thread.
        capacity
            Items that may wait for the reader. Unit: items.
        batches
            Number of batches in an item, to say at which one a lane failed.

        Returns
        -------
        The same items, in order. Errors raised by `items` surface here as themselves, with a note.
        """
        self.seconds[name] = {"work": 0.0, "blocked": 0.0, "waited_for": 0.0}
        if not self._threaded:
            return self._inline(name, items, batches)
        queue: deque[T | _End] = deque()
        thread = threading.Thread(
            target=self._run, args=(name, items, queue, capacity, batches), name=f"donorloader-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return self._take(name, queue)

    def stop(self) -> None:
        """End all lanes and wait for their threads. Safe to call at any time, from any thread, more than once."""
        with self._changed:
            self._stopping.set()
            self._changed.notify_all()
        # a garbage collection may run this on a lane, which must not wait for its siblings: it may hold the lock
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
        for source in self._sources:
            _close(source)
        self._sources.clear()
        self._failure = None
        atexit.unregister(self.stop)

    @property
    def stopped(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping.is_set()

    def _inline[T](self, name: str, items: Iterable[T], batches: Callable[[T], int]) -> Iterator[T]:
        iterator = iter(items)
        self._sources.append(iterator)
        done, seconds = 0, self.seconds[name]
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                self._note(error, name, done)
                raise
            finally:
                seconds["work"] += time.perf_counter() - start
            done += batches(item)
            yield item
            del item

    def _run[T](
        self, name: str, items: Iterable[T], queue: deque[T | _End], capacity: int, batches: Callable[[T], int]
    ) -> None:
        done, seconds, iterator = 0, self.seconds[name], iter(items)
        try:
            while True:
                start = time.perf_counter()
                item: T | _End = next(iterator, _END)
                seconds["work"] += time.perf_counter() - start
                start = time.perf_counter()
                with self._changed:
                    self._changed.wait_for(lambda: len(queue) < capacity or self.stopped)
                    seconds["blocked"] += time.perf_counter() - start
                    if self.stopped:
                        return
                    queue.append(item)
                    self._changed.notify_all()
                if isinstance(item, _End):
                    return
                done += batches(item)
                del item  # or this frame keeps the batch alive while the next one is made
        except _Stopped:
            pass
        except BaseException as error:  # whatever it is, the reader must learn of it
            self._note(error, name, done)
            with self._changed:
                if self._failure is None:
                    self._failure = error
                self._changed.notify_all()
        finally:
            _close(iterator)

    def _take[T](self, name: str, queue: deque[T | _End]) -> Iterator[T]:
        on_lane = self._threads
        while True:
            start = time.perf_counter()
            with self._changed:
                self._changed.wait_for(lambda: queue or self._failure is not None or self.stopped)
                self.seconds[name]["waited_for"] += time.perf_counter() - start
                if threading.current_thread() in on_lane:
                    if self._failure is not None or self.stopped:
                        raise _Stopped
                elif self._failure is not None:
                    raise self._failure
                elif self.stopped:
                    return
                item = queue.popleft()
                self._changed.notify_all()
            if isinstance(item, _End):
                return
            yield item
            del item

    def _note(self, error: BaseException, name: str, batch: int) -> None:
        if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return  # raised in a lane that this one reads without a thread
        error.add_note(f"{_NOTE}raised in lane {name!r}, at batch {batch} of epoch {self.epoch}")


class _End:
    """Marks the end of a lane's items in its queue."""


_END = _End()


def _close(iterator: Any) -> None:
    if (close := getattr(iterator, "close", None)) is not None:
        with suppress(ValueError):  # a generator that another thread is running; it ends by itself
            close()
