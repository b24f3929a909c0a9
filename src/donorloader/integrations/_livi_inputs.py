"""What LIVI's batches rest on, looked up and checked once: donor codes, known cis-eQTLs, missing calls, counts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch

from donorloader._ids import as_text, duplicates, shorten

from ._presence import count_missing, not_a_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from donorloader.genotypes import DonorTable

__all__ = ["check_counts", "cis_matrix", "donor_codes", "look_for_missing", "no_counts"]

_LOG = logging.getLogger("donorloader.livi")

# Read at once: cells of each dataset to look at, and genotypes to count missing calls in.
_LOOKED_AT, _READ_BYTES = 256, 64 << 20

_MEANING = {"absent": "0, the allele absent", "mean": "the share of carriers of their variant"}


def donor_codes(
    donors: NDArray[np.object_], categories: Iterable[Any] | None
) -> tuple[NDArray[np.object_], NDArray[np.int64]]:
    """Donor ids by code of the model, and the model's code by code of the loader."""
    if categories is None:
        return donors, np.arange(donors.size)
    wanted = as_text(list(categories), "donor_categories")
    if repeated := duplicates(wanted):
        raise ValueError(f"donor_categories must name a donor once, but {shorten(repeated)} occur more than once.")
    code_of = pd.Index(wanted, dtype=object).get_indexer(pd.Index(donors, dtype=object))
    if (code_of < 0).any():
        raise ValueError(
            f"Every donor of the loader needs a code, but donor_categories lacks {shorten(donors[code_of < 0])}. A "
            "model with an embedding of each donor cannot take others: choose the loader's donors=…"
        )
    return wanted, code_of.astype(np.int64)


def cis_matrix(known: Any, variants: NDArray[np.object_], genes: NDArray[np.object_]) -> torch.Tensor:
    """(n_variants, n_genes) int64 in the loader's order of variants and genes."""
    if not isinstance(known, pd.DataFrame):
        listed = [] if isinstance(known, str) or sp.issparse(known) else list(known)
        if not listed or any(isinstance(pair, str) or np.shape(pair) != (2,) for pair in listed):
            raise TypeError(
                "known_cis must be a DataFrame of 0 and 1, named variants × genes, or pairs of a variant and a "
                f"gene, got {type(known).__name__}."
            )
        pairs = pd.DataFrame(listed, columns=["variant", "gene"])
        known = pd.crosstab(pairs["variant"], pairs["gene"]).clip(upper=1)
    rows, columns = (pd.Index(axis.astype(str), dtype=object) for axis in (known.index, known.columns))
    for what, axis in (("variants", rows), ("genes", columns)):
        if repeated := duplicates(axis.to_numpy()):
            raise ValueError(f"known_cis must name its {what} once, but {shorten(repeated)} occur more than once.")
    if set(rows) != set(variants):
        absent, more = set(rows) - set(variants), set(variants) - set(rows)
        raise ValueError(
            f"known_cis and the loader must have the same variants, but {len(absent):,} of known_cis are not in the "
            f"loader ({shorten(sorted(absent), 3)}) and {len(more):,} of the loader not in known_cis "
            f"({shorten(sorted(more), 3)}). Make the loader with variants=list(known_cis.index)."
        )
    if unknown := sorted(set(columns) - set(genes)):
        raise ValueError(
            f"The genes of known_cis must be among those of the cells, but {len(unknown):,} are not: "
            f"{shorten(unknown)}."
        )
    values = known.to_numpy()
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"known_cis must hold 0 and 1, but has {values[~np.isin(values, (0, 1))][0]!r}.")
    out = np.zeros((variants.size, genes.size), dtype=np.int64)
    at = pd.Index(variants, dtype=object).get_indexer(rows), pd.Index(genes, dtype=object).get_indexer(columns)
    out[np.ix_(*at)] = values
    return torch.from_numpy(out)


def look_for_missing(
    table: DonorTable, names: NDArray[np.object_], missing: str
) -> tuple[pd.Series, NDArray[np.float32]]:
    """Missing calls per variant, and what they are to become."""
    rows = table.rows[table.rows >= 0]
    no_call, present = np.full(names.size, table.rows.size - rows.size), np.zeros(names.size, dtype=np.int64)
    step = max(1, _READ_BYTES // max(1, names.size * table.store.dtype.itemsize))
    for start in range(0, rows.size, step):
        counts = count_missing(table.store.read(np.sort(rows)[start : start + step], table.columns))
        no_call, present = no_call + counts[0], present + counts[1]
    calls = pd.Series(no_call, index=names, name="missing_calls")
    total, of = int(no_call.sum()), names.size * table.rows.size
    if total:
        told = (
            f"{total:,} of {of:,} genotype calls ({total / of:.2%}) of {table.rows.size:,} donors are missing, in "
            f"{int((no_call > 0).sum()):,} of {names.size:,} variants"
        )
        if missing == "error":
            raise ValueError(
                f"{told}. Say what they count as: missing='absent' (the allele is absent) or missing='mean' (the "
                "variant's share of carriers), or leave these variants or donors out."
            )
        _LOG.warning("%s; they count as %s in GT_cells (missing=%r)", told, _MEANING[missing], missing)
    called = table.rows.size - no_call
    if missing == "mean" and not called.all():
        raise ValueError(
            f"The share of carriers of {shorten(names[called == 0])} is unknown: no donor has a call. Leave these "
            "variants out, or use missing='absent'."
        )
    fill = present / np.maximum(called, 1) if missing == "mean" else np.zeros(names.size)
    return calls, fill.astype(np.float32)


def check_counts(source: Any) -> None:
    """Look at some cells of each dataset, so that data that were normalised are told of before training begins."""
    for dataset in source.datasets:
        some = dataset.X[: min(_LOOKED_AT, dataset.n_obs)]
        values = some.data if hasattr(some, "indptr") else np.asarray(some)
        if (wrong := not_a_count(values)) is not None:
            raise no_counts(dataset.name, wrong)


def no_counts(where: str, value: Any) -> ValueError:
    return ValueError(
        f"LIVI's likelihood is over counts, so X must hold whole numbers from 0, but {where} has {value!r}. Prepare "
        "the study from raw counts: a layer, if X was normalised."
    )
