"""The zarrs codec pipeline for local zarr stores: several times faster than zarr's own, but local only."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import zarr
from zarr.storage import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["complete_pipeline", "local_pipeline", "open_group"]

_ZARRS = "zarrs.ZarrsCodecPipeline"
_DEFAULT = "zarr.core.codec_pipeline.BatchedCodecPipeline"
_lock = threading.RLock()
_was_used = False  # whether zarr had been used, by whomever, when this process last began to fork
_forked = False  # whether this process was forked from one in which it had


@contextmanager
def local_pipeline(*nodes: Any) -> Iterator[None]:
    """Bind arrays that are opened inside to the zarrs pipeline, if all the given nodes are on local disk.

    zarr takes the pipeline from its global configuration when an array is opened, and zarrs cannot read remote
    stores, so the setting must not outlast the opening. A pipeline that the user has chosen is left alone.

    Parameters
    ----------
    nodes
        zarr groups or arrays that tell where the data lies.
    """
    _refuse_fork()
    if not all(isinstance(node.store, LocalStore) for node in nodes):
        yield
        return
    with _lock:  # two overlapping contexts would restore each other's setting
        if zarr.config.get("codec_pipeline.path") != _DEFAULT:
            yield
            return
        with zarr.config.set({"codec_pipeline.path": _ZARRS}):
            yield


@contextmanager
def complete_pipeline() -> Iterator[None]:
    """Bind arrays that are made inside to zarr's own pipeline, whatever is chosen elsewhere.

    zarrs leaves out chunks of zeros, also where an array says that empty chunks are to be written. What is known to be
    whole by its files has to be written by zarr.
    """
    with _lock, zarr.config.set({"codec_pipeline.path": _DEFAULT}):
        yield


def _refuse_fork() -> None:
    """Raise in a process that was forked after zarr was used: it may wait for threads that it does not have."""
    if _forked:
        raise RuntimeError(
            "Stores cannot be read in a process that was forked after zarr was used, as zarr's threads do not survive "
            "a fork. Start processes by 'spawn', or use num_workers=0, which is fastest."
        )


def _before_fork() -> None:
    """See whether zarr's thread runs: after the fork, nothing tells any more that it did."""
    global _was_used
    _was_used = _was_used or any(thread.name == "zarr_io" for thread in threading.enumerate())


def _after_fork() -> None:
    global _forked
    _forked = _was_used


# By then it is too late to ask, so this cannot wait until a store is opened: others use zarr as well.
os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def open_group(path: str) -> zarr.Group:
    """Open a zarr group for reading.

    Raises
    ------
    FileNotFoundError
        If nothing lies at the path, or what lies there is not a zarr group.
    """
    _refuse_fork()
    try:
        return zarr.open_group(path, mode="r")
    except (FileNotFoundError, zarr.errors.ContainsArrayError, zarr.errors.GroupNotFoundError) as error:
        raise FileNotFoundError(
            f"Expected a zarr store, but {path!r} is not one or does not exist. "
            "Prepare raw files with donorloader.prepare(...) or `donorloader prepare`."
        ) from error
