"""What the demos share: options checked, a folder to work in, headings."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console


def check_options(out: Path | None, epochs: int, seed: int, picture: Path) -> None:
    """Refuse options that would fail later, before anything is done."""
    for name, value, least in (("epochs", epochs, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number from {least}, got {value!r}.")
    if picture.suffix.lower() != ".png":
        raise ValueError(f"The picture is a PNG, but its path {str(picture)!r} does not end in .png. Name it so.")
    if not picture.absolute().parent.is_dir():
        raise FileNotFoundError(f"The folder of the picture {str(picture)!r} does not exist. Make it first.")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{str(out)!r} exists and is not an empty folder. Name another one, or empty it.")
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError("The demo draws with matplotlib: pip install 'donorloader[demo]'")


@contextmanager
def work_folder(out: Path | None) -> Iterator[Path]:
    """The folder asked for, made where it is missing, or a temporary one that is removed at the end."""
    if out is None:
        with tempfile.TemporaryDirectory(prefix="donorloader-demo-") as folder:
            yield Path(folder)
    else:
        out.mkdir(parents=True, exist_ok=True)
        yield out


def names(files: Sequence[Path]) -> str:
    """First and last name of some files, for a line of text."""
    return f"{files[0].name} … {files[-1].name}" if len(files) > 1 else files[0].name


def print_step(console: Console, number: int, title: str, what: str) -> None:
    """Print the heading of a step."""
    console.print(f"\n[bold cyan]{number}  {title}[/]  [dim]{what}[/]")
