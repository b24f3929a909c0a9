"""How soon a thread that waits for Python's lock gets it, while lanes run."""

from __future__ import annotations

import sys
import threading

__all__ = ["QuickSwitching"]

# Python lets a thread run for 5 ms before another one may ask for its turn, and zarr's thread has long stretches of
# Python code: the loop, ready for its next batch, would wait for as long several times per step. Unit: seconds.
_SECONDS = 1e-4

_lock = threading.RLock()
_users = 0
_before = 0.0


class QuickSwitching:
    """Shortens Python's switch interval from :meth:`begin` until the last one's :meth:`end`.

    A shorter interval that the user has set is left alone, and so is one that is set meanwhile.
    """

    def __init__(self) -> None:
        self._begun = False

    def begin(self) -> None:
        """Shorten the interval."""
        global _users, _before
        with _lock:
            if self._begun:
                return
            self._begun = True
            _users += 1
            if _users == 1:
                _before = sys.getswitchinterval()
                if _before > _SECONDS:
                    sys.setswitchinterval(_SECONDS)

    def end(self) -> None:
        """Set back the interval; harmless if it was set back before."""
        global _users
        with _lock:  # reentrant, as a garbage collection may run this inside of `begin`
            if not self._begun:
                return
            self._begun = False
            _users -= 1
            if _users == 0 and abs(sys.getswitchinterval() - _SECONDS) < _SECONDS / 10:
                sys.setswitchinterval(_before)
