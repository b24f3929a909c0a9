"""A prepared study on disk: one folder with the cells, the genotypes and a description of both."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from os import PathLike

__all__ = ["STUDY_FILE", "STUDY_FORMAT", "STUDY_VERSION", "Study", "is_study", "open_study"]

STUDY_FORMAT = "donorloader-study"
STUDY_VERSION = 1
STUDY_FILE = "study.json"


@dataclass(frozen=True)
class Study:
    """A prepared study, as :func:`donorloader.prepare` writes it and :func:`donorloader.open_study` opens it.

    Attributes
    ----------
    path
        The study's folder.
    donor_key
        Column of the cells' ``obs`` with the donor of each cell.
    cells
        Path of the annbatch collection of the cells.
    genotypes
        Path of the donors × variants store, or `None` in a study of cells alone.
    bags
        Path of the collection of the same cells grouped by donor, or `None` in a study without.
    meta
        All of ``study.json``: sources, settings, versions, report.
    """

    path: Path
    donor_key: str
    cells: Path
    genotypes: Path | None
    bags: Path | None
    meta: dict[str, Any] = field(repr=False)


def is_study(path: str | PathLike[str]) -> bool:
    """Whether a folder holds a finished study, i.e. has a ``study.json``."""
    return (Path(path) / STUDY_FILE).is_file()


def open_study(path: str | PathLike[str]) -> Study:
    """Open a study folder that :func:`donorloader.prepare` wrote.

    Parameters
    ----------
    path
        The folder with ``study.json``.

    Raises
    ------
    FileNotFoundError
        If the folder, its ``study.json`` or a store that it names does not exist. A ``prepare`` that was stopped
        half-way leaves no ``study.json``.
    ValueError
        If ``study.json`` is not of a study, or of a version that this release does not read.
    """
    folder = Path(path)
    file = folder / STUDY_FILE
    if not file.is_file():
        what = "does not exist" if not folder.exists() else f"has no {STUDY_FILE}"
        raise FileNotFoundError(
            f"A study is a folder with a {STUDY_FILE}, but {str(folder)!r} {what}. "
            "Make one with donorloader.prepare(...) or `donorloader prepare`."
        )
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{str(file)!r} is not valid JSON ({error}). Prepare the study again.") from error
    if not isinstance(meta, dict) or meta.get("format") != STUDY_FORMAT:
        raise ValueError(f"{str(file)!r} does not describe a {STUDY_FORMAT}. Prepare the study again.")
    if meta.get("version") != STUDY_VERSION:
        raise ValueError(
            f"{str(file)!r} has version {meta.get('version')!r}; this release of donorloader reads version "
            f"{STUDY_VERSION}. Use the release that wrote it, or prepare the study again."
        )
    missing = [key for key in ("donor_key", "cells") if not isinstance(meta.get(key), str)]
    if missing:
        raise ValueError(f"{str(file)!r} lacks {missing}. Prepare the study again.")
    cells = folder / meta["cells"]
    genotypes = None if meta.get("genotypes") is None else folder / meta["genotypes"]
    bags = None if meta.get("bags") is None else folder / meta["bags"]
    for store in (cells, genotypes, bags):
        if store is not None and not store.exists():
            raise FileNotFoundError(f"{str(file)!r} names the store {str(store)!r}, which does not exist.")
    return Study(folder, meta["donor_key"], cells, genotypes, bags, meta)
