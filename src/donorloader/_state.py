"""Where a pass is, and of which data and settings: what a checkpoint keeps of a loader."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from annbatch.abc import Sampler

from donorloader._ids import shorten
from donorloader.samplers import Share, replay, request_rows

if TYPE_CHECKING:
    from donorloader._tables import Tables

__all__ = ["STATE_VERSION", "check_format", "check_same", "fingerprint"]

#: Version of the format; to be raised with every change of what a field means.
STATE_VERSION = 1

# Its numbers, and the least that they can be; some may be absent.
_LEAST = {"seed": 0, "epoch": 0, "batches": 0, "world_size": 1, "position": 0, "num_canonical_shards": 1}
_COUNTS_OR_NONE = ("position", "num_canonical_shards")


def fingerprint(kind: str, tables: Tables, sampler: Sampler, seed: int) -> dict[str, Any]:
    """What decides which batches come in which order, field by field: numbers and texts, large ones as digests.

    Values of ``X`` and of the genotypes are not read for it, and how batches are handed over (`device`, `densify`,
    `prefetch`, …) does not count.

    Parameters
    ----------
    kind
        Name of the loader's class.
    tables
        Cells and genotypes.
    sampler
        Order of the cells or bags.
    seed
        Seed of all passes.
    """
    source, match, table = tables.source, tables.match, tables.table
    fields: dict[str, Any] = {
        "loader": kind,
        "cells": source.n_obs,
        "datasets": _digest(np.array([dataset.n_obs for dataset in source.datasets])),
        "genes": _digest(source.var_names),
        "cells in use": _digest(match.codes >= 0),
        "donors": _digest(match.ids, match.codes),
        "variants": None if table is None else _digest(table.store.names(table.columns)),
    }
    if table is not None:
        encoder = table.encoder
        fields |= {"genotype_encoding": encoder.encoding, "missing_calls": encoder.missing, "dtype": encoder.dtype.name}
    _describe(sampler, "", fields)
    # the same settings may order otherwise in another version of annbatch or numpy
    first = next(replay(sampler, source.n_obs, seed=seed, epoch=0), None)
    fields["order"] = None if first is None else _digest(request_rows(first["requests"]), *first["splits"])
    return fields


def check_format(state: Any) -> None:
    """Check that something is a state, and of this format.

    Raises
    ------
    TypeError, ValueError
        If it is not; the message says what it is.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise TypeError(f"A state is the dict that state_dict() gives, got {shorten([state])}.")
    version = state["version"]
    if version != STATE_VERSION:
        newer = isinstance(version, int) and version > STATE_VERSION
        remedy = "Update donorloader" if newer else "Load it with the version of donorloader that wrote it"
        raise ValueError(
            f"This donorloader reads states of format version {STATE_VERSION}, but this one is of version {version!r}. "
            f"{remedy}, or start the epoch anew with set_epoch()."
        )
    if missing := [name for name in _LEAST if name not in state]:
        raise ValueError(f"The state is damaged: it lacks {shorten(missing)}.")
    for name, least in _LEAST.items():
        value = state[name]
        if value is None and name in _COUNTS_OR_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"The state is damaged: {name!r} must be an integer of at least {least}, got {value!r}.")
    if not isinstance(state.get("of"), Mapping):
        raise ValueError("The state is damaged: 'of' must say of which data and settings it is.")


def check_same(state: Mapping[str, Any], expected: Mapping[str, Any], seed: int) -> None:
    """Check that a state is of the data and settings at hand.

    Parameters
    ----------
    state
        In this format.
    expected
        The :func:`fingerprint` of the loader.
    seed
        Its seed.

    Raises
    ------
    ValueError
        If it is of other data or settings; the message names the fields.
    """
    saved = state["of"]
    pairs = {name: (saved.get(name), expected.get(name)) for name in [*expected, *(saved.keys() - expected.keys())]}
    pairs["seed"] = state["seed"], seed
    differing = [f"{name} ({_told(a)} there, {_told(b)} here)" for name, (a, b) in pairs.items() if a != b]
    if differing == [f"order ({_told(saved.get('order'))} there, {_told(expected['order'])} here)"]:
        raise ValueError(
            "The state was saved where the same settings give another order of cells: versions of annbatch, numpy or "
            "donorloader differ. Resume with those that it was saved with, or start the epoch anew with set_epoch()."
        )
    if differing:
        differing = [name for name in differing if not name.startswith("order ")]
        raise ValueError(
            f"A state resumes only the data and settings that it was saved with, but these differ: "
            f"{', '.join(differing)}. Make the loader as it was made then, or start the epoch anew with set_epoch()."
        )


def _describe(value: Any, name: str, fields: dict[str, Any]) -> None:
    """Add the settings of a sampler, and of those it wraps, to `fields`; generators start anew each pass, so not they.

    A setting has the name of its attribute.
    """
    prefix = f"{name}." if name else ""
    if isinstance(value, Sampler):
        fields[f"{prefix}sampler"] = type(value).__name__
        for key, part in sorted(vars(value).items()):
            _describe(part, prefix + key.lstrip("_"), fields)
    elif isinstance(value, Mapping | Share):
        for key, part in (value if isinstance(value, Mapping) else value._asdict()).items():
            _describe(part, f"{prefix}{key}", fields)
    elif value is None or isinstance(value, bool | str):
        fields[name] = value
    elif isinstance(value, int | np.integer):
        fields[name] = int(value)
    elif isinstance(value, float | np.floating):
        fields[name] = float(value)
    elif isinstance(value, slice):
        fields[name] = [value.start, value.stop, value.step]
    elif isinstance(value, list | tuple) or hasattr(value, "__array__"):
        array = np.asarray(value)
        fields[name] = _digest(array if array.dtype != object else np.array([str(part) for part in value], object))


def _digest(*arrays: Any) -> str:
    """A short text that two sets of arrays share only if they are equal; texts count as texts."""
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(f"{np.shape(array)}".encode())
        if array.dtype.kind in "OUT":
            digest.update("\0".join(map(str, array)).encode())
        else:
            small = array.astype(np.int64, copy=False) if array.dtype.kind in "iu" else array
            digest.update(np.ascontiguousarray(small).data)
    return digest.hexdigest()


def _told(value: Any) -> str:
    return "absent" if value is None else repr(value)
