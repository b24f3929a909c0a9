"""Public seams through which tests make the lanes slow, or make them fail. Child processes import this too."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import zarr
from annbatch import DatasetCollection
from zarr.storage import LocalStore, WrapperStore

import donorloader as dl

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class LaneError(Exception):
    """What the tests raise inside of lanes; nothing else does."""


class HookedStore(WrapperStore[LocalStore]):
    """A zarr store that calls a hook with the key of each chunk before it is read, as a slow or failing disk would."""

    def __init__(self, store: LocalStore, hook: Callable[[str], None]) -> None:
        super().__init__(store)
        self.hook = hook

    def _with_store(self, store: LocalStore) -> Self:
        return type(self)(store, self.hook)

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        if "/c/" in key:
            self.hook(key)
        return await self._store.get(key, prototype, byte_range)


def hooked_cells(path: Path | str, hook: Callable[[str], None]) -> DatasetCollection:
    """A collection whose reads of X call a hook."""

    def on_read_of_x(key: str) -> None:
        if "/X/data/" in key or key.startswith("X/data/"):
            hook(key)

    return DatasetCollection(zarr.open_group(HookedStore(LocalStore(path, read_only=True), on_read_of_x), mode="r"))


def hooked_genotypes(source: Any, hook: Callable[[list[str]], None]) -> dl.GenotypeStore:
    """Genotypes whose reads call a hook with the ids that are read."""
    store = dl.open_genotypes(source)
    read = store.read

    def hooked_read(rows: Any, columns: Any) -> Any:
        hook([store.ids[row] for row in rows])
        return read(rows, columns)

    store.read = hooked_read  # type: ignore[method-assign]
    return store


def lanes() -> list[threading.Thread]:
    """Threads that are not of the main program, nor those that zarr, asyncio and tqdm keep for good."""
    kept = ("zarr", "asyncio", "ThreadPoolExecutor", "pytest_timeout", "tqdm_monitor", "MainThread")
    return [t for t in threading.enumerate() if not t.name.startswith(kept)]


def open_files() -> int:
    """Number of file descriptors of this process."""
    return len(os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"))


def wait_until(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Whether a condition comes true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
