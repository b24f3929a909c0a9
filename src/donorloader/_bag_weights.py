"""How often each bag is drawn, where bags are drawn by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from donorloader._ids import duplicates, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from donorloader._bag_source import BagSource

__all__ = ["bag_weights"]


def bag_weights(
    source: BagSource, drawn: NDArray[np.int64], balance: str | None, donor_weights: Mapping[Any, float] | None
) -> NDArray[np.float64]:
    """Weight of each bag; those that are not drawn, being too small, do not count."""
    weights = np.zeros(source.ids.size)
    if balance is not None:
        weights[drawn] = _shares(source.column(balance, drawn).groups[drawn])
    if donor_weights is not None:
        of_donor = _by_id(donor_weights, source.tables.match.ids)
        # the weight is a donor's, however many bags it has
        weights[drawn] = of_donor[source.donors[drawn]] * _shares(source.donors[drawn])
    return weights


def _by_id(weights: Mapping[Any, float], ids: NDArray[np.object_]) -> NDArray[np.float64]:
    """Weights in order of the ids, 0 for those without."""
    if not hasattr(weights, "items"):
        raise TypeError(f"donor_weights must map ids to weights, got {type(weights).__name__}.")
    pairs = [(str(donor), float(weight)) for donor, weight in weights.items()]
    by_id = dict(pairs)
    if repeated := duplicates(np.array([donor for donor, _ in pairs], dtype=object)):
        raise ValueError(f"donor_weights may name a donor once, but {shorten(repeated)} occur more than once.")
    if unknown := sorted(by_id.keys() - set(ids)):
        raise ValueError(
            f"donor_weights names donors that have no cells in use: {shorten(unknown)}. Those in use are "
            f"{shorten(list(ids))}."
        )
    return np.array([by_id.get(donor, 0.0) for donor in ids])


def _shares(groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Weights that give each group the same chance, however many members it has."""
    _, inverse, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return 1.0 / counts[inverse]
