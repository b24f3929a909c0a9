"""A bar on standard error while something long runs."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(show: bool | None, what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar while the block runs; its callback, which adds to it, may be called from any thread.

    Parameters
    ----------
    show
        Whether to show it; `None`: only on a terminal. Where it is not shown, there is no callback.
    what
        What is done, e.g. `"writing cells"`.
    total
        Where the bar ends.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield None
        return
    # the stream itself, as annbatch's own bars are kept off standard error meanwhile
    console = Console(file=sys.stderr)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda number: bar.advance(task, number)
