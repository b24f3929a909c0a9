"""How soon the training loop runs when its step is over, while lanes keep all cores busy."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["take_long_turns"]

# A thread that wakes may take the core of one whose turn is longer, and waits for the end of its turn else. Linux's own
# turns are of 1.4 to 3 ms, which many loops would wait several times per step. Unit: nanoseconds.
_TURN = 10_000_000

# C's library has no function for these two before glibc 2.41. Numbers of Linux's own table, by machine.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


class _Attributes(ctypes.Structure):
    """Linux's ``struct sched_attr``, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_long_turns() -> None:
    """Ask Linux for longer turns of this thread, and of those that it starts, where it has the usual policy.

    This changes how often it is interrupted, not which part of a core's time it gets. Linux does so since version 6.12
    (sched(7), sched_setattr(2)); where it does not, or is not allowed to, nothing changes.
    """
    calls = _system_calls()
    if calls is None:
        return
    change, read = calls
    attributes = _Attributes()
    if read(0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) or attributes.policy != os.SCHED_OTHER:
        return
    attributes.size = ctypes.sizeof(attributes)
    attributes.runtime = _TURN
    change(0, ctypes.byref(attributes), 0)


@cache
def _system_calls() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What sets and what reads the attributes of a thread, each 0 if it succeeds; `None` where there are no such."""
    numbers = _CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or numbers is None:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    setting, reading = (ctypes.c_long(number) for number in numbers)
    return lambda *arguments: call(setting, *arguments), lambda *arguments: call(reading, *arguments)
