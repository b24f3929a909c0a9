"""What a run leaves behind: JSON, a table on the terminal, the table in the README."""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.table import Table

import donorloader as dl
from benchmarks.measure import Result
from donorloader._cores import usable_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.data import Size

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"

PACKAGES = ("annbatch", "anndata", "zarr", "zarrs", "torch", "numpy", "scipy", "numba", "h5py")


def machine() -> dict[str, Any]:
    """What the figures depend on, besides the code."""
    return {
        "cores": usable_cores(),
        "cpu": _cpu_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {"donorloader": dl.__version__} | {name: version(name) for name in PACKAGES},
    }


class Neighbours:
    """How busy other processes keep the machine, since this was made: their work makes the figures worth less."""

    def __init__(self) -> None:
        self._began, self._busy, self._mine = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores(self) -> float:
        """Cores that other processes kept busy, on average."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._mine)
        return round(max(0.0, others / (time.perf_counter() - self._began)), 2)


def write_json(path: Path, size: Size, facts: dict[str, Any], results: Sequence[Result]) -> None:
    """Write a run, all figures unrounded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) | {"met": result.met} for result in results]
    path.write_text(json.dumps({"size": asdict(size), "machine": facts, "results": rows}, indent=2) + "\n")


def read_json(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """Read back the machine's facts and the results of a run."""
    run = json.loads(path.read_text())
    return run["machine"], [Result(**{k: v for k, v in row.items() if k != "met"}) for row in run["results"]]


def terminal_table(results: Sequence[Result]) -> Table:
    """All rows, coloured by whether they clear their bar."""
    table = Table("stream", "against", "ours", "theirs", "ratio", "spread", "bar", "met", title="benchmarks")
    for result in results:
        colour = {True: "green", False: "red", None: ""}[result.met]
        table.add_row(*cells(result), style=colour)
    return table


def cells(result: Result) -> list[str]:
    """The fields of a table's row as text."""
    if result.unit == "MB":
        amounts = [f"{result.ours:,.0f} MB", f"{result.theirs:,.0f} MB"]
        number = "{:+,.0f} MB".format
    else:
        amounts = [f"{result.ours / 1e3:,.1f} k {result.of}", f"{result.theirs / 1e3:,.1f} k {result.of}"]
        number = "{:.2f}".format
    bar = "" if result.bar is None else f"{'≤' if result.at_most else '≥'} {result.bar:g}"
    met = {True: "yes", False: "no", None: ""}[result.met]
    spread = f"{number(result.low)} to {number(result.high)}"
    return [result.stream, result.against, *amounts, number(result.value), spread, bar, met]


def summarised(results: Sequence[Result]) -> list[Result]:
    """The rows, with the sweep reduced to its point closest to being slower."""
    sweep = [result for result in results if result.row == "sweep"]
    rest = [result for result in results if result.row != "sweep"]
    return [*rest, *sorted(sweep, key=lambda result: result.value)[:1]]


def markdown(size: Size, facts: dict[str, Any], results: Sequence[Result]) -> str:
    """The table of the README and a sentence about the run."""
    head = ["stream", "against", "ours", "theirs", "ratio", "least to most", "bar", "met"]
    lines = [head, ["---"] * len(head), *(cells(result) for result in summarised(results))]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    points = sum(result.row == "sweep" for result in results)
    last = f" The last row is the worst of {points} in a sweep over variants and cells a batch." if points else ""
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("annbatch", "anndata", "zarr", "torch"))
    return (
        f"{table}\n\n"
        f"{size.cells:,} cells × {size.genes:,} genes, {size.donors:,} donors, int8 genotypes; "
        f"batches of {size.batch_size:,}, windows of {size.chunk_size} × {size.chunks_per_window} cells. "
        f"Ratios of medians over alternating passes in one run, with the least and the most by round.{last} "
        f"{facts['cores']} cores ({facts['cpu']}), {facts['cores_used_by_others']:g} of them busy with other work; "
        f"Python {facts['python']}, {versions}."
    )


def update_readme(text: str, readme: Path = README) -> None:
    """Put a table between the README's two marks.

    Raises
    ------
    ValueError
        If the README lacks the marks.
    """
    content = readme.read_text()
    if START not in content or END not in content:
        raise ValueError(f"{readme.name} needs the lines {START} and {END} to hold the table between them.")
    before, rest = content.split(START, 1)
    _, after = rest.split(END, 1)
    readme.write_text(f"{before}{START}\n{text}\n{END}{after}")


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0)


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
