"""How genotypes are handed out: dosages, counts, presence, standardized or one-hot, and what missing calls become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ._frequencies import frequencies
from ._rows import count_columns
from ._unpacking import gather_packed, unpack

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from ._rows import Columns
    from ._store import GenotypeStore

__all__ = ["Encoder", "Encoding", "MissingCalls", "make_encoder"]

Encoding = Literal["dosage", "count", "presence", "standardized", "onehot"]
MissingCalls = Literal["nan", "mean", "zero", "error"]

#: Type of each encoding, what missing calls become unless that is chosen, and what may be chosen.
_KINDS: dict[str | None, tuple[str, str | None, tuple[str, ...]]] = {
    "dosage": ("float32", "nan", ("nan", "mean", "zero", "error")),
    "count": ("int8", None, ("zero", "error")),
    "presence": ("float32", "nan", ("nan", "zero", "error")),
    "standardized": ("float32", "zero", ("nan", "mean", "zero", "error")),
    "onehot": ("int8", "zero", ("zero", "error")),
}


@dataclass(frozen=True)
class Encoder:
    """Turns stored genotypes of some donors into what a batch brings.

    Attributes
    ----------
    encoding
        `None`: as they are stored.
    missing
        What missing calls become; `None`: as they are stored.
    dtype
        Type of what it gives.
    n_variants
        Columns of what it gives; one-hot has (n_variants, 3).
    twice_freq, scale
        (n_variants,) float64 mean and standard deviation of a call; empty where neither the encoding nor the missing
        calls need it.
    name
        Names of variants by position among the chosen ones, for messages.
    """

    encoding: Encoding | None
    missing: MissingCalls | None
    dtype: np.dtype[Any]
    n_variants: int
    twice_freq: NDArray[np.float64]
    scale: NDArray[np.float64]
    name: Callable[[int], str]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one donor's row."""
        return (self.n_variants, 3) if self.encoding == "onehot" else (self.n_variants,)

    def from_packed(
        self, packed: NDArray[np.uint8], rows: NDArray[np.int64], columns: Columns, out: NDArray[Any]
    ) -> NDArray[np.int64] | None:
        """Write rows of packed calls into `out`; the first missing call as (row, column) if there may be none."""
        if self.encoding == "onehot":
            calls = unpack(packed, columns, rows)
            np.equal(calls[:, :, None], np.arange(3, dtype=np.int8), out=out.view(bool))
            return _first(calls < 0) if self.missing == "error" else None
        gather_packed(packed, rows, columns, self.values, out)
        if self.missing != "error":
            return None
        return _first(np.isnan(out) if self.dtype.kind == "f" else out < 0)

    def from_values(self, block: NDArray[Any], out: NDArray[Any]) -> NDArray[np.int64] | None:
        """Write rows of plain values into `out`; the first missing call as (row, column) if there may be none."""
        missing = np.isnan(block) if block.dtype.kind == "f" else block < 0
        found = _first(missing) if self.missing == "error" else None
        if self.encoding in ("count", "presence", "onehot"):
            self._check_whole(block, missing)
        match self.encoding:
            case None:
                out[...] = block
            case "dosage":
                out[...] = block
            case "count":
                out[...] = np.where(missing, -1, block)
            case "presence":
                np.greater(block, 0, out=out, casting="unsafe")
            case "standardized":
                np.subtract(block, self.twice_freq, out=out, casting="unsafe")
                np.divide(out, self.scale, out=out, casting="unsafe")
            case "onehot":
                np.equal(block[:, :, None], np.arange(3), out=out.view(bool))
        if missing.any() and self.encoding != "onehot":
            self._fill(out, missing)
        return found

    @cached_property
    def values(self) -> NDArray[Any]:
        """What the codes 0, 1, 2 and missing become: (4,), or (4, n_variants) where that differs by variant."""
        values: NDArray[Any]
        if self.encoding == "presence":
            values = np.array([0, 1, 1, np.nan])
        elif self.encoding == "standardized":
            calls = np.array([0.0, 1.0, 2.0, np.nan])[:, None]
            values = (calls - self.twice_freq) / self.scale
        else:
            values = np.array([0, 1, 2, np.nan if self.encoding == "dosage" else -1])
        if self.missing == "mean" and self.encoding == "dosage":
            values = np.repeat(values[:, None], self.n_variants, axis=1)
            values[3] = self.twice_freq
        elif self.missing in ("zero", "mean"):
            values[3] = 0
        return values.astype(self.dtype)

    def _fill(self, out: NDArray[Any], missing: NDArray[np.bool_]) -> None:
        if self.missing in ("nan", "error") and self.dtype.kind == "f":
            out[missing] = np.nan
        elif self.missing == "mean" and self.encoding == "dosage":
            out[missing] = np.broadcast_to(self.twice_freq, out.shape)[missing]
        elif self.missing in ("zero", "mean"):
            out[missing] = 0

    def _check_whole(self, block: NDArray[Any], missing: NDArray[np.bool_]) -> None:
        there = block[~missing]
        if (wrong := there[(there != np.rint(there)) | (there > 2)]).size:
            raise ValueError(
                f"genotype_encoding={self.encoding!r} is for hard calls of 0, 1 or 2, but a genotype is {wrong[0]}. "
                "Use 'dosage' or 'standardized', or leave the encoding out."
            )


def make_encoder(
    store: GenotypeStore,
    columns: Columns,
    encoding: Encoding | None = None,
    missing: MissingCalls | None = None,
    *,
    absent_donors: bool = False,
) -> Encoder:
    """The encoder of a store's chosen variants.

    Parameters
    ----------
    store, columns
        The genotypes, and the chosen variants.
    encoding, missing
        As for :class:`donorloader.DonorLoader`. Default: values as they are stored.
    absent_donors
        Whether donors may have no genotypes, and so rows of NaN.

    Raises
    ------
    ValueError
        If there is no such encoding, or it cannot give what is asked for.
    """
    if encoding is not None and encoding not in get_args(Encoding):
        choices = ", ".join(map(repr, get_args(Encoding)))
        raise ValueError(f"genotype_encoding must be one of {choices}, or None for values as stored, got {encoding!r}.")
    if missing is not None and missing not in get_args(MissingCalls):
        choices = ", ".join(map(repr, get_args(MissingCalls)))
        raise ValueError(f"missing_calls must be one of {choices}, or None, got {missing!r}.")
    dtype = store.dtype
    if encoding is None:
        as_float = dtype.kind == "f" or absent_donors
        given = dtype if dtype.kind == "f" or not absent_donors else np.dtype(np.float32)
        possible: tuple[str, ...] = ("nan", "zero", "error") if as_float else ("zero", "error")
    else:
        name_of_type, default, possible = _KINDS[encoding]
        given, missing = np.dtype(name_of_type), missing or default  # type: ignore[assignment] # a key of the table
    if missing is not None and missing not in possible:
        raise ValueError(
            f"missing_calls={missing!r} cannot be had with genotype_encoding={encoding!r} of {given}: choose one of "
            f"{', '.join(map(repr, possible))}, or another encoding, such as 'dosage'."
        )
    if absent_donors and given.kind != "f":
        raise ValueError(
            f"missing_donors='nan' gives rows of NaN, which genotype_encoding={encoding!r} of {given} cannot hold. Use "
            "'dosage', 'presence' or 'standardized', or missing_donors='drop'."
        )
    twice_freq = scale = np.empty(0)
    if encoding == "standardized" or (encoding == "dosage" and missing == "mean"):
        p = frequencies(store, columns)
        twice_freq = np.nan_to_num(2 * p)  # a variant that nobody has a call of: there is nothing to scale
        deviation = np.sqrt(np.nan_to_num(2 * p * (1 - p)).clip(min=0))
        # all calls are alike, so that all are their mean, 0; elsewhere the division is as written in the docs
        scale = np.where(deviation > 0, deviation, np.inf)

    def name(position: int) -> str:
        return str(store.names(columns)[position])

    return Encoder(encoding, missing, given, count_columns(columns), twice_freq, scale, name)


def _first(found: NDArray[np.bool_]) -> NDArray[np.int64] | None:
    return np.argwhere(found)[0] if found.any() else None
