"""Lanes on their own: bounds of the queues, and how soon Python and Linux switch threads while they run."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from _faults import lanes, wait_until
from donorloader.pipeline import Conveyor, _slices

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def conveyor() -> Iterator[Conveyor]:
    made = Conveyor(epoch=0)
    yield made
    made.stop()


class Source:
    """Yields numbers, and tells how many it was asked for."""

    def __init__(self, *items: int) -> None:
        self.items, self.made = items, 0

    def __iter__(self) -> Iterator[int]:
        for item in self.items:
            self.made += 1
            yield item


def settled(source: Source) -> int:
    """Number of items made once the lane waits."""
    made = -1
    while made != source.made:
        made = source.made
        time.sleep(0.1)
    return made


class TestBounds:
    @pytest.mark.parametrize("capacity", [1, 3])
    def test_number_of_items(self, conveyor: Conveyor, capacity: int) -> None:
        """The queue's, and the one in the lane's hand."""
        source = Source(*range(20))
        items = conveyor.lane("numbers", source, capacity=capacity)
        assert settled(source) == capacity + 1
        assert next(items) == 0
        assert settled(source) == capacity + 2
        assert list(items) == list(range(1, 20))

    def test_size_of_items(self, conveyor: Conveyor) -> None:
        """As many as there is room for; one that is larger waits alone."""
        source = Source(4, 4, 4, 50, 1, 1)
        items = conveyor.lane("sizes", source, capacity=10, room=10, size=lambda n: n)
        assert settled(source) == 3
        assert next(items) == 4
        assert settled(source) == 4
        assert [next(items), next(items)] == [4, 4]
        assert settled(source) == 5, "the large one is in, and nothing beside it"
        assert list(items) == [50, 1, 1]


class TestSwitching:
    def test_is_quick_while_lanes_run(self) -> None:
        before = sys.getswitchinterval()
        one, two = Conveyor(epoch=0), Conveyor(epoch=0)
        first, second = (c.lane("numbers", range(3), capacity=1) for c in (one, two))
        assert sys.getswitchinterval() < before
        assert list(first) == [0, 1, 2]
        one.stop()
        assert sys.getswitchinterval() < before, "the other one waits for room"
        assert list(second) == [0, 1, 2]
        two.stop()
        two.stop()
        assert sys.getswitchinterval() == pytest.approx(before)

    def test_ends_with_the_last_lane(self) -> None:
        """Also where a loop holds on to an iterator that it took all items of, and never asked for more."""
        before = sys.getswitchinterval()
        conveyor = Conveyor(epoch=0)
        items = conveyor.lane("numbers", range(2), capacity=5)
        assert [next(items), next(items)] == [0, 1]
        assert wait_until(lambda: sys.getswitchinterval() == pytest.approx(before))
        conveyor.stop()

    def test_leaves_a_users_setting_alone(self) -> None:
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(2e-5)
            conveyor = Conveyor(epoch=0)
            conveyor.lane("numbers", range(3), capacity=1)
            assert sys.getswitchinterval() == pytest.approx(2e-5)
            sys.setswitchinterval(3e-3)  # set meanwhile
            conveyor.stop()
            assert sys.getswitchinterval() == pytest.approx(3e-3)
        finally:
            sys.setswitchinterval(before)

    def test_without_threads_nothing_changes(self) -> None:
        before = sys.getswitchinterval()
        conveyor = Conveyor(epoch=0, threads=False)
        assert list(conveyor.lane("numbers", range(3), capacity=1)) == [0, 1, 2]
        assert sys.getswitchinterval() == before
        conveyor.stop()


def test_stop_while_the_reader_waits(conveyor: Conveyor) -> None:
    """A reader on a thread of its own is let go at once."""
    never = threading.Event()

    def wait() -> Iterator[int]:
        never.wait(10)
        yield 1

    items = conveyor.lane("waiting", wait(), capacity=1)
    got: list[list[int]] = []
    reader = threading.Thread(target=lambda: got.append(list(items)))
    reader.start()
    time.sleep(0.1)
    stopper = threading.Thread(target=conveyor.stop)
    stopper.start()
    assert wait_until(lambda: got == [[]])
    never.set()
    for thread in (reader, stopper):
        thread.join()
    assert wait_until(lambda: not lanes())


def test_lanes_take_long_turns_and_leave_the_loop_alone() -> None:
    """Linux's turns are longer on lanes, and on the threads they start; nothing else of their scheduling changes."""
    calls = _slices._system_calls()
    if calls is None:
        pytest.skip("only Linux has turns that can be asked for")

    def now() -> tuple[int, int, int]:
        attributes = _slices._Attributes()
        assert calls is not None
        assert calls[1](0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) == 0
        return attributes.policy, attributes.nice, attributes.runtime

    def lane() -> Iterator[tuple[Any, Any]]:
        with ThreadPoolExecutor(1) as team:
            yield now(), team.submit(now).result()

    before = now()
    conveyor = Conveyor(epoch=0)
    [(on_lane, of_lane)] = list(conveyor.lane("cells", lane(), capacity=1))
    conveyor.stop()
    assert now() == before
    assert on_lane == of_lane
    assert on_lane[:2] == before[:2]
    if before[2]:  # Linux since 6.12
        assert on_lane[2] == _slices._TURN > before[2]


def test_a_lane_does_not_hold_what_its_reader_let_go_of(conveyor: Conveyor) -> None:
    """A batch that the loop is done with is gone before the next one is asked for."""

    class Item:
        pass

    batches = conveyor.lane("cells", (Item() for _ in range(3)), capacity=1)
    item = next(batches)
    seen = weakref.ref(item)
    del item
    gc.collect()
    assert seen() is None
    assert len(list(batches)) == 2
    assert list(batches) == []  # and it stays at its end
