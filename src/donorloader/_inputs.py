"""What a user prepares a study from: recognised, checked against each other, opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad

from donorloader._ids import as_text, duplicates, shorten
from donorloader.cells import is_donor_data
from donorloader.cells._raw import open_raw_cells, open_stored
from donorloader.study import is_study

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from donorloader._panel import Panel
    from donorloader.cells._raw import RawCells

__all__ = ["describe_sources", "list_sources", "open_cell_sources", "read_donor_map", "refuse_nested"]


def list_sources(cells: Any, genotypes: Any) -> tuple[list[Any], Any]:
    """The sources of cells as a list, and the genotypes: those of a DonorData, if that is where the cells are.

    Raises
    ------
    FileNotFoundError
        If a path does not exist.
    ValueError
        If there is no source, one comes twice, or a DonorData comes with other cells or genotypes.
    """
    sources = list(cells) if isinstance(cells, list | tuple) else [cells]
    sources = [Path(source) if isinstance(source, str) else source for source in sources]
    if not sources:
        raise ValueError("Cells are needed: give one source or more.")
    keys = [str(source.resolve()) if isinstance(source, Path) else f"object {id(source)}" for source in sources]
    if repeated := [str(sources[i]) for i, key in enumerate(keys) if key in keys[:i]]:
        raise ValueError(
            f"Each source of cells may come once, but {shorten(repeated)} comes again: its cells would double."
        )
    donor_data = [source for source in sources if _is_donor_data(source)]
    if not donor_data:
        return sources, Path(genotypes) if isinstance(genotypes, str) else genotypes
    if len(sources) > 1:
        raise ValueError("A DonorData is a study of its own and cannot be mixed with other cells: give it alone.")
    if genotypes is not None:
        raise ValueError(
            "A DonorData brings its own genotypes: leave genotypes out, or give its cells (C) as an AnnData."
        )
    return sources, donor_data[0]


def refuse_nested(out: Path, sources: Sequence[Any]) -> None:
    """Refuse an output that is a source, lies in one, or has one in it: writing it would change the source."""
    target = out.resolve()
    for source in sources:
        if not isinstance(source, Path):
            continue
        path = source.resolve()
        if path == target or path in target.parents or target in path.parents:
            raise ValueError(f"out must lie apart from the sources, but {str(out)!r} and {str(source)!r} overlap.")


def open_cell_sources(
    sources: Sequence[Any], *, layer: str | None, donor_key: str | None, columns: Sequence[str] | None
) -> list[RawCells]:
    """Open all sources of cells; `columns` are those of obs to keep beside the donor column, `None` for all."""
    return [
        open_raw_cells(source, layer=layer, donor_key=donor_key, columns=columns, number=i)
        for i, source in enumerate(sources)
    ]


def read_donor_map(donor_map: str | PathLike[str] | Mapping[Any, Any] | None) -> dict[str, str]:
    """New ids of donors by their ids in the cells, as text.

    A table has two tab-separated columns, the id in the cells and the new id. Empty lines, lines that start with `#`,
    and a first line that reads `old` and `new` are skipped.

    Raises
    ------
    FileNotFoundError
        If the table does not exist.
    ValueError
        If a line has not two columns, an id is empty, or one is renamed twice.
    """
    if donor_map is None or (isinstance(donor_map, Mapping) and not donor_map):
        return {}
    if isinstance(donor_map, Mapping):
        old, new = as_text(list(donor_map), "the donor map"), as_text(list(donor_map.values()), "the donor map")
        where = "The donor map"
    else:
        path = Path(donor_map)
        if not path.is_file():
            raise FileNotFoundError(f"The donor map {str(path)!r} does not exist.")
        where = f"The donor map {str(path)!r}"
        pairs = []
        for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
            fields = [text.strip() for text in line.split("\t")]
            if (
                not line.strip()
                or line.startswith("#")
                or (number == 1 and [f.lower() for f in fields] == ["old", "new"])
            ):
                continue
            if len(fields) != 2 or not all(fields):
                raise ValueError(
                    f"{where} needs two tab-separated columns, the id in the cells and the new id, but line {number} "
                    f"is {line!r}."
                )
            pairs.append(fields)
        if not pairs:
            raise ValueError(f"{where} names no donor. Leave it out, or write two tab-separated columns.")
        old, new = as_text([p[0] for p in pairs], where), as_text([p[1] for p in pairs], where)
    if repeated := duplicates(old):
        raise ValueError(f"{where} may rename an id once, but {shorten(repeated)} have more than one line.")
    return dict(zip(old, new, strict=True))


def describe_sources(cells: Sequence[RawCells], genotypes: Any, panel: Panel | None) -> dict[str, Any]:
    """The sources for `study.json`: where, how large, how many."""
    described: dict[str, Any] = {
        "cells": [
            {"name": c.name, **_on_disk(c.path), "cells": c.X.shape[0], "genes": c.X.shape[1], "dtype": c.X.dtype.name}
            for c in cells
        ],
        "genotypes": None,
    }
    if panel is not None:
        rows = panel.source
        path = genotypes if isinstance(genotypes, Path) else None
        name = type(genotypes).__name__ if path is None else str(path)
        described["genotypes"] = {
            "name": name,
            **_on_disk(path),
            "donors": len(rows.ids),
            "variants": rows.n_variants,
            "dtype": rows.dtype.name,
        }
    return described


def _is_donor_data(source: Any) -> bool:
    if isinstance(source, Path):
        if is_study(source):
            raise ValueError(f"{str(source)!r} is a study already: load it, or prepare its sources again.")
        with open_stored(source) as root:
            return bool(root.attrs.get("encoding-type") == "donordata")
    return not isinstance(source, ad.AnnData) and is_donor_data(source)


def _on_disk(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {"path": None, "bytes": None}
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {"path": str(path.resolve()), "bytes": sum(file.stat().st_size for file in files)}
