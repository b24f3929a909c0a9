"""Run the benchmarks: `python -m benchmarks.run [--full] [--only ROW] [--update-readme] [--check]`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import bags, cells, dense, genotypes, livi, memory, plot, preparing, report, sweep, wide
from benchmarks.data import FULL, QUICK, prepare, use_zarrs

ROWS = {
    "joined": cells.joined,
    "step": cells.step,
    "wide": wide.wide,
    "gather": genotypes.gather,
    "cache": genotypes.cache,
    "dense": dense.dense,
    "livi": livi.livi,
    "bags": bags.bags,
    "dense_bags": bags.dense_bags,
    "sweep": sweep.sweep,
    "memory": memory.memory,
    "prepare": preparing.prepare,
    "huge": genotypes.huge,
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    full: Annotated[bool, typer.Option("--full", help="200,000 cells instead of 100,000, and every point.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Only these rows: {', '.join(ROWS)}.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Passes over each stream.")] = 5,
    update_readme: Annotated[bool, typer.Option("--update-readme", help="Rewrite the README's table.")] = False,
    check: Annotated[bool, typer.Option("--check", help="End with exit code 1 if a bar is missed.")] = False,
) -> None:
    """Measure donorloader against annbatch alone and against the naive loops."""
    if unknown := set(only or ()) - set(ROWS):
        raise typer.BadParameter(f"no row is called {', '.join(sorted(unknown))}; the rows are {', '.join(ROWS)}")
    use_zarrs()
    console = Console(width=None if sys.stdout.isatty() else 200)
    size = FULL if full else QUICK
    facts = report.machine()
    data = prepare(size)
    neighbours = report.Neighbours()
    results = []
    for name in only or ROWS:
        began = time.perf_counter()
        for result in ROWS[name](data, rounds):
            results.append(result)
            stream, against, *_, ratio, spread, bar, met = report.cells(result)
            console.print(f"{stream} [dim]/[/] {against}: [bold]{ratio}[/] ({spread}) {bar} {met}", highlight=False)
        console.print(f"[dim]{name}: {time.perf_counter() - began:.0f} s[/]")

    facts["cores_used_by_others"] = neighbours.cores()
    console.print(report.terminal_table(results))
    console.print(f"other processes kept {facts['cores_used_by_others']:g} of {facts['cores']} cores busy meanwhile")
    part = "".join(f"-{name}" for name in only or ())
    path = report.RESULTS / f"latest-{size.name}{part}.json"
    report.write_json(path, size, facts, results)
    plot.plot(results, path.with_suffix(".png"))
    console.print(f"wrote {path} and {path.with_suffix('.png').name}")
    if update_readme:
        report.update_readme(report.markdown(size, facts, results))
        console.print("rewrote the table in README.md")
    if check and any(result.met is False for result in results):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
