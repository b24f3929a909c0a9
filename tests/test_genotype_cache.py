"""The cache of donor rows: as few reads as the order allows, never more rows than it may hold."""

from __future__ import annotations

import gc
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from donorloader.genotypes._cache import NextUse, PassStopped, RowCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

type Trace = Sequence[NDArray[np.int64]]


def reads(trace: Trace, capacity: int, n_codes: int) -> int:
    """Rows that the cache reads; each is checked to be there, and to be its donor's."""
    cache, next_use, total = RowCache(n_codes, capacity, 2, np.int64), NextUse(trace, n_codes), 0
    for donors in trace:
        next_use.pass_over(donors)
        slots, missing = cache.request(donors, next_use)
        cache.values[slots.index[missing]] = donors[missing, None]
        assert np.unique(slots.index).size == donors.size
        np.testing.assert_array_equal(cache.values[slots.index], np.stack([donors, donors], axis=1))
        total += int(missing.sum())
        slots.release()
    assert len(cache.values) == capacity
    return total


def fewest_reads(trace: Trace, capacity: int) -> int:
    """The optimum by trying all: the least cost of every set of rows that may be held after each request."""
    from itertools import combinations

    states: dict[frozenset[int], int] = {frozenset(): 0}
    for donors in trace:
        needed = frozenset(donors.tolist())
        after: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            others = held - needed
            for number in range(min(len(others), capacity - len(needed)) + 1):
                for kept in combinations(sorted(others), number):
                    state = needed | frozenset(kept)
                    paid = cost + len(needed - held)
                    after[state] = min(after.get(state, paid), paid)
        states = after
    return min(states.values())


def belady(trace: Trace, capacity: int) -> int:
    """Farthest in the future by looking through the trace anew for every choice."""
    held: set[int] = set()
    total = 0
    for now, donors in enumerate(trace):
        needed = set(donors.tolist())
        total += len(needed - held)
        others = held - needed

        def next_use(donor: int, now: int = now) -> int:
            return next((t for t in range(now + 1, len(trace)) if donor in trace[t]), len(trace))

        while len(needed) + len(others) > capacity:
            others.remove(max(others, key=lambda donor: (next_use(donor), -donor)))
        held = needed | others
    return total


def least_recently_used(trace: Trace, capacity: int) -> int:
    held: OrderedDict[int, None] = OrderedDict()
    total = 0
    for donors in trace:
        for donor in donors.tolist():
            total += donor not in held
            held[donor] = None
            held.move_to_end(donor)
        while len(held) > capacity:
            held.popitem(last=False)
    return total


def random_trace(seed: int, n_codes: int, n_requests: int, largest: int) -> Trace:
    rng = np.random.default_rng(seed)
    return [
        np.sort(rng.choice(n_codes, size=rng.integers(1, largest + 1), replace=False)).astype(np.int64)
        for _ in range(n_requests)
    ]


@given(seed=st.integers(0, 2**31), n_codes=st.integers(2, 7), n_requests=st.integers(1, 9), extra=st.integers(0, 3))
def test_reads_the_fewest_rows_possible(seed: int, n_codes: int, n_requests: int, extra: int) -> None:
    largest = max(1, n_codes // 2)
    trace = random_trace(seed, n_codes, n_requests, largest)
    capacity = min(n_codes, largest + extra)
    assert reads(trace, capacity, n_codes) == fewest_reads(trace, capacity)


@pytest.mark.parametrize("capacity", [60, 100, 150, 199])
def test_a_trace_of_100_windows(capacity: int, record_property: pytest.RecordProperty) -> None:
    trace = random_trace(11, 200, 100, 60)
    ours, lru = reads(trace, capacity, 200), least_recently_used(trace, capacity)
    record_property("rows read", ours)
    record_property("rows that LRU reads", lru)
    assert ours == belady(trace, capacity)
    assert ours < lru


def test_each_donor_once_a_pass_is_where_lru_is_worst() -> None:
    """Bags: a shuffled round through all donors, again and again, with room for half of them."""
    rng = np.random.default_rng(2)
    rounds = [rng.permutation(40).astype(np.int64).reshape(20, 2) for _ in range(10)]
    trace = [np.sort(pair) for order in rounds for pair in order]
    assert reads(trace, 20, 40) == belady(trace, 20) < 0.75 * least_recently_used(trace, 20)


def test_rows_in_use_are_waited_for() -> None:
    trace = [np.array([0, 1]), np.array([2, 3])]
    cache, next_use = RowCache(4, 2, 1, np.int64), NextUse(trace, 4)
    next_use.pass_over(trace[0])
    first, missing = cache.request(trace[0], next_use)
    cache.values[first.index[missing]] = trace[0][missing, None]
    done: list[NDArray[np.int64]] = []

    def read_second() -> None:
        next_use.pass_over(trace[1])
        second, missing = cache.request(trace[1], next_use)
        cache.values[second.index[missing]] = trace[1][missing, None]
        done.append(second.index)

    thread = threading.Thread(target=read_second)
    thread.start()
    time.sleep(0.1)
    assert not done
    np.testing.assert_array_equal(cache.values[first.index, 0], [0, 1])
    del first  # as a pass that is cut short does with what is in its queues
    gc.collect()
    thread.join(5)
    assert len(done) == 1
    np.testing.assert_array_equal(cache.values[done[0], 0], [2, 3])


def test_a_pass_that_is_over_waits_for_nothing() -> None:
    """Its other requests may lie in a queue that nobody empties."""
    trace = [np.array([0, 1]), np.array([2, 3])]
    cache, next_use = RowCache(4, 2, 1, np.int64), NextUse(trace, 4)
    next_use.pass_over(trace[0])
    first, _ = cache.request(trace[0], next_use)
    over = threading.Event()
    threading.Timer(0.2, over.set).start()
    next_use.pass_over(trace[1])
    with pytest.raises(PassStopped):
        cache.request(trace[1], next_use, over.is_set)
    assert cache.in_use
    first.release()
    assert not cache.in_use


def test_rows_that_could_not_be_read_are_read_again() -> None:
    trace = [np.array([0, 1]), np.array([0, 1])]
    cache, next_use = RowCache(2, 2, 1, np.int64), NextUse(trace, 2)
    next_use.pass_over(trace[0])
    slots, missing = cache.request(trace[0], next_use)
    assert missing.all()
    slots.release()
    cache.forget(trace[0])
    next_use.pass_over(trace[1])
    assert cache.request(trace[1], next_use)[1].all()
