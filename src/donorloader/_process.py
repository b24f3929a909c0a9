"""What of a loader can be sent to another process, and in which process it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from donorloader.genotypes import GenotypeStore
from donorloader.study import Study

if TYPE_CHECKING:
    from collections.abc import Mapping

    from donorloader._ranks import Ranks

__all__ = ["Process", "sendable"]


class Process:
    """The process that it was made in."""

    def __init__(self) -> None:
        self._id = os.getpid()

    def check(self, what: str) -> None:
        """Raise in a process that was forked from it."""
        if os.getpid() != self._id:
            raise RuntimeError(
                f"A {what} cannot be read in a forked process, where its threads and zarr's are missing. Start workers "
                "by 'spawn', or use num_workers=0, which is fastest."
            )


def sendable(arguments: Mapping[str, Any], what: str, ranks: Ranks) -> dict[str, Any]:
    """Options of a loader, to make it anew in another process.

    Parameters
    ----------
    arguments
        The options.
    what
        The loader's class, for messages.
    ranks
        Which rank this process is; another process may not be told.

    Raises
    ------
    TypeError
        If an option is an object that lives in this process.
    """
    for name in ("cells", "genotypes"):
        value = arguments[name]
        if isinstance(value, GenotypeStore) and value.path is not None:
            continue
        if value is not None and not isinstance(value, str | Path | Study):
            raise TypeError(
                f"A {what} is sent to another process by the paths that it was made from, but its {name} are a "
                f"{type(value).__name__} in memory. Use num_workers=0, or write them to disk and give the path."
            )
    for name in ("batch_sampler", "device"):
        if arguments.get(name) is not None:
            raise TypeError(
                f"A {what} with {name}={arguments[name]!r} cannot be sent to another process: use num_workers=0."
            )
    return {**arguments, "rank": ranks.rank, "world_size": ranks.world_size}
