"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["check_out", "staged_folder"]

# How long to go on removing a folder that is written to, and the pause between two tries. Unit: seconds.
_REMOVE_SECONDS, _REMOVE_PAUSE = 10.0, 0.05


def check_out(out: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> None:
    """Refuse an output folder that must not be written.

    Parameters
    ----------
    out
        The folder to make.
    overwrite
        Whether it may replace one that exists.
    is_ours
        Whether an existing folder is of the kind that is to be made. Nothing else is ever replaced.

    Raises
    ------
    FileExistsError
        If `out` exists and may not be replaced. (An empty folder may.)
    FileNotFoundError
        If its parent does not exist.
    """
    if not out.parent.is_dir():
        raise FileNotFoundError(f"{str(out)!r} cannot be made: the folder {str(out.parent)!r} does not exist.")
    if not os.path.lexists(out) or (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        return
    if not is_ours(out) or out.is_symlink():
        raise FileExistsError(
            f"{str(out)!r} exists and is not a study, so it is never overwritten. Choose another path."
        )
    if not overwrite:
        raise FileExistsError(f"{str(out)!r} exists. Choose another path, or give overwrite=True (--overwrite).")


@contextmanager
def staged_folder(out: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Build a folder under a hidden name beside `out`, and rename it to `out` when the block ends well.

    Until then `out` is as it was; if the block raises, what it built is removed. A process that is killed leaves its
    hidden folder behind, and the next one that stages the same `out` removes it.

    Parameters
    ----------
    out, overwrite, is_ours
        As for :func:`check_out`.

    Yields
    ------
    The folder to build in, which exists and is empty.
    """
    out = out.absolute()  # so that it has a name and a parent, "." too
    _clean_up_after_killed(out)
    check_out(out, overwrite=overwrite, is_ours=is_ours)
    partial, lock = _make_partial(out)
    try:
        yield partial
        check_out(out, overwrite=overwrite, is_ours=is_ours)  # it may have appeared meanwhile
        _swap(partial, out)
    except BaseException:
        _remove(partial)
        raise
    finally:
        os.close(lock)


def _partial_prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _replaced(out: Path) -> Path:
    return out.with_name(f".{out.name}.replaced")


def _make_partial(out: Path) -> tuple[Path, int]:
    """A new folder beside `out`, and a lock on it that ends with this process, however it ends."""
    partial = out.with_name(f"{_partial_prefix(out)}{os.getpid()}-{secrets.token_hex(4)}")
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    _try_lock(lock)
    return partial, lock


def _swap(partial: Path, out: Path) -> None:
    """Put `partial` in the place of `out`; the old content goes only when the new is there."""
    if not out.exists() or not any(out.iterdir()):
        partial.rename(out)
        return
    old = _replaced(out)
    out.rename(old)
    try:
        partial.rename(out)
    except BaseException:
        old.rename(out)
        raise
    _remove(old)


def _clean_up_after_killed(out: Path) -> None:
    old = _replaced(out)
    if old.is_dir():  # killed in `_swap`: between its two renames, or while removing the old content
        shutil.rmtree(old) if out.exists() else old.rename(out)
    for leftover in [p for p in out.parent.iterdir() if p.name.startswith(_partial_prefix(out))]:
        lock = os.open(leftover, os.O_RDONLY)
        try:
            if _try_lock(lock):
                _remove(leftover)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder that threads may still write to.

    A write that fails in one of zarr's threads leaves the others at work for a moment: a file that they add while the
    folder is emptied keeps it from being removed, and zarr makes folders that are not there. So it is removed until it
    stays away. What resists for longer stays hidden, for the next one that stages here.
    """
    end = time.monotonic() + _REMOVE_SECONDS
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_REMOVE_PAUSE)


def _try_lock(descriptor: int) -> bool:
    """Take an exclusive lock; False if a living process holds it, or the file system cannot lock."""
    if sys.platform == "win32":  # leftovers of killed processes are left to the user there
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
