"""Lanes: threads that each run an iterator ahead of its reader, through a bounded queue."""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from ._slices import take_long_turns
from ._switching import QuickSwitching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["Conveyor"]

_JOIN_SECONDS = 10.0  # a lane that is inside a read ends after it; far longer than a read takes


_NOTE = "donorloader: "


class _Stopped(Exception):
    """Tells a lane that its pass is over."""


class Conveyor:
    """The lanes of one pass, and what they share: one failure, one end.

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
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._queues: list[_LaneQueue] = []
        self._sources: list[Any] = []
        self._ended: set[str] = set()
        self._switching, self._running = QuickSwitching(), 0
        self.seconds: dict[str, dict[str, float]] = {}
        # Runs before zarr ends its event loop at exit, which was registered earlier; a lane that waits for that
        # loop would never end. Daemon threads, because Python waits for others before it runs any of this.
        atexit.register(self.stop)

    def lane[T](
        self,
        name: str,
        items: Iterable[T],
        *,
        capacity: int,
        batches: Callable[[T], int] = lambda _: 1,
        room: int | None = None,
        size: Callable[[T], int] = lambda _: 0,
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
        room, size
            What the items that wait may take together, and what one takes; one larger than `room` waits alone.

        Returns
        -------
        The same items, in order. Errors raised by `items` surface here as themselves, with a note.
        """
        self.seconds[name] = {"work": 0.0, "blocked": 0.0, "waited_for": 0.0}
        if not self._threaded:
            return self._inline(name, items, batches)
        with self._lock:
            self._running += 1
            self._switching.begin()
        queue = _LaneQueue(capacity, room)
        self._queues.append(queue)
        thread = threading.Thread(
            target=self._run, args=(name, items, queue, batches, size), name=f"donorloader-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return _Taken(self, queue, self.seconds[name])

    def stop(self) -> None:
        """End all lanes and wait for their threads. Safe to call at any time, from any thread, more than once."""
        self._stopping.set()
        for queue in self._queues:
            queue.wake(drop=True)
        # a garbage collection may run this on a lane, which must not wait for its siblings: one may wait for it
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(_JOIN_SECONDS)
        for source in self._sources:
            _close(source)
        self._sources.clear()
        self._failure = None
        self._switching.end()
        atexit.unregister(self.stop)

    def has_ended(self, name: str) -> bool:
        """Whether a lane has made all of its items; some may wait to be taken."""
        return name in self._ended

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

    def look_up(self) -> bool:
        """Whether the pass goes on, for who reads a lane; an error if a lane failed."""
        failure = self._failure  # another thread may forget it meanwhile, as it stops the pass
        if failure is None and not self.stopped:
            return True
        if threading.current_thread() in self._threads:
            raise _Stopped
        if failure is not None:
            raise failure
        return False

    def _run[T](
        self,
        name: str,
        items: Iterable[T],
        queue: _LaneQueue,
        batches: Callable[[T], int],
        size: Callable[[T], int],
    ) -> None:
        done, seconds, iterator = 0, self.seconds[name], iter(items)
        try:
            take_long_turns()
            while True:
                start = time.perf_counter()
                item: T | _Mark = next(iterator, _END)
                finished = time.perf_counter()
                seconds["work"] += finished - start
                if item is _END:
                    self._ended.add(name)
                    queue.put(item, 0)
                    return
                done += batches(item)  # type: ignore[arg-type]
                while not queue.put(item, size(item)):  # type: ignore[arg-type]
                    if self.stopped:
                        return
                seconds["blocked"] += time.perf_counter() - finished
                del item  # or this frame keeps the batch alive while the next one is made
        except _Stopped:
            pass
        except BaseException as error:  # whatever it is, the reader must learn of it
            self._note(error, name, done)
            with self._lock:
                if self._failure is None:
                    self._failure = error
            for each in self._queues:
                each.wake()
        finally:
            _close(iterator)
            with self._lock:
                self._running -= 1
                if not self._running:  # a loop may hold on to a pass whose lanes have long ended
                    self._switching.end()

    def _note(self, error: BaseException, name: str, batch: int) -> None:
        if any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            return  # raised in a lane that this one reads without a thread
        error.add_note(f"{_NOTE}raised in lane {name!r}, at batch {batch} of epoch {self.epoch}")


class _Taken:
    """What a lane made, one by one. Not a generator: that would hold on to an item until the next one is asked for."""

    def __init__(self, conveyor: Conveyor, queue: _LaneQueue, seconds: dict[str, float]):
        self._conveyor, self._queue, self._seconds = conveyor, queue, seconds
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self._ended:
            self._ended = True  # whatever comes, but for an item
            if not self._conveyor.look_up():
                break
            start = time.perf_counter()
            item = self._queue.get()
            self._seconds["waited_for"] += time.perf_counter() - start
            self._ended = item is _END
            if item is not _WAKE and item is not _END:
                return item
        raise StopIteration


class _LaneQueue:
    """Bounded queue between one lane and its one reader.

    Made of two :class:`queue.SimpleQueue`, one for the items and one for what the reader takes out: these are in C,
    take an item that is there without giving up the interpreter's lock, and may be put to inside of a finalizer. A
    condition variable costs the loop several milliseconds at a time, while other threads run Python code.
    """

    def __init__(self, capacity: int, room: int | None):
        self._capacity, self._room = max(1, capacity), room
        self._items: SimpleQueue[tuple[Any, int]] = SimpleQueue()
        self._taken: SimpleQueue[int] = SimpleQueue()
        self._count = self._held = 0  # the lane alone keeps count

    def put(self, item: Any, size: int) -> bool:
        """Wait for room and add an item; `False` if :meth:`wake` was called meanwhile, and the item is not in."""
        while self._full(size) or not self._taken.empty():
            taken = self._taken.get()
            if taken < 0:
                return False
            self._count -= 1
            self._held -= taken
        self._items.put((item, size))
        self._count += 1
        self._held += size
        return True

    def _full(self, size: int) -> bool:
        if self._count >= self._capacity:
            return True
        return self._room is not None and self._count > 0 and self._held + size > self._room

    def get(self) -> Any:
        """Wait for the next item and take it out; `_WAKE` if :meth:`wake` was called."""
        item, size = self._items.get()
        if item is not _WAKE:
            self._taken.put(size)
        return item

    def wake(self, *, drop: bool = False) -> None:
        """Let both sides look up, whatever they wait for; with `drop`, let go of the items too."""
        if drop:
            with suppress(Empty):
                while True:
                    self._items.get_nowait()
        self._items.put((_WAKE, 0))
        self._taken.put(-1)


class _Mark:
    """Stands for no item in a queue."""


_END, _WAKE = _Mark(), _Mark()


def _close(iterator: Any) -> None:
    if (close := getattr(iterator, "close", None)) is not None:
        with suppress(ValueError):  # a generator that another thread is running; it ends by itself
            close()
