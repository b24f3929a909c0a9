"""Whole families to splits, in given fractions, stratum by stratum: pure arithmetic on counts."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from scipy.optimize import Bounds, LinearConstraint, milp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["allot", "check_fractions", "cut_by_hash"]


def check_fractions(fractions: Any) -> dict[str, Fraction]:
    """Fractions by the name of the split, exactly, or an error that says what they must be.

    ``0.1`` means a tenth, not the binary number next to it: 30 donors then have 3 in such a split, never 4.
    """
    if not hasattr(fractions, "items") or not fractions:
        raise TypeError(f"fractions must map names of splits to their shares, got {fractions!r}.")
    exact = {}
    for name, share in fractions.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"Splits are named by text, got {name!r}.")
        if isinstance(share, bool) or not isinstance(share, int | float | Fraction | np.number) or not 0 < share <= 1:
            raise ValueError(f"The share of a split must be above 0 and at most 1, but that of {name!r} is {share!r}.")
        exact[name] = Fraction(float(share)).limit_denominator(1_000_000)
        if not exact[name]:
            raise ValueError(f"The share of a split must be at least a millionth, but that of {name!r} is {share!r}.")
    total = sum(exact.values(), Fraction(0))
    if total > 1 + Fraction(len(exact), 1_000_000):
        raise ValueError(f"The fractions must sum to 1 at the most, got {dict(fractions)} with {float(total):g}.")
    if abs(total - 1) <= Fraction(len(exact), 1_000_000):  # such as 0.333 twice and 0.334, or thirds
        exact = {name: share / total for name, share in exact.items()}
    return exact


def allot(
    strata: NDArray[np.int64], families: NDArray[np.int64], fractions: Mapping[str, Fraction], seed: int
) -> NDArray[np.int64]:
    """Which split each donor goes to.

    Donors without relatives are placed so that every stratum, and the whole, is within one donor of its share in every
    split: such a rounding of a table always exists (Cox, 1987, "A constructive procedure for unbiased controlled
    rounding"), and is found here as a small integer program. Families are placed before them, large ones first, each
    where it leaves counts nearest to their shares.

    Parameters
    ----------
    strata, families
        (n_donors,) codes from 0. The result depends on the order of donors and codes: sort them first.
    fractions
        From :func:`check_fractions`.
    seed
        Decides among the placements that are as good.

    Returns
    -------
    (n_donors,) int64 positions in `fractions`; ``len(fractions)`` for donors of no split.
    """
    shares = list(fractions.values())
    rest = 1 - sum(shares, Fraction(0))
    if rest > 0:
        shares.append(rest)
    rng = np.random.default_rng(np.random.SeedSequence([0x5B117, seed]))
    n_strata = int(strata.max()) + 1
    sizes = np.bincount(strata, minlength=n_strata)
    of_family = np.bincount(families)
    placed = np.zeros((n_strata, len(shares)), dtype=np.int64)
    target = np.array([[float(size * share) for share in shares] for size in sizes.tolist()])

    large = np.flatnonzero(of_family > 1)
    members = np.zeros((of_family.size, n_strata), dtype=np.int64)
    np.add.at(members, (families, strata), 1)
    home = np.full(of_family.size, -1, dtype=np.int64)
    for family in large[np.lexsort((rng.random(large.size), -of_family[large]))]:
        after, before = placed + members[family][:, None] - target, placed - target
        worse = (after**2 - before**2).sum(axis=0) + after.sum(axis=0) ** 2 - before.sum(axis=0) ** 2
        home[family] = np.argmin(worse)
        placed[:, home[family]] += members[family]
    if large.size:
        home_of_large = home[large]
        _exchange(members[large], home_of_large, placed, target)
        home[large] = home_of_large
    split = home[families]

    single = of_family[families] == 1
    n_single = np.bincount(strata[single], minlength=n_strata)
    counts = _round(sizes, n_single, placed, shares, len(fractions), rng)
    for stratum in range(n_strata):
        lone = rng.permutation(np.flatnonzero(single & (strata == stratum)))
        split[lone] = np.repeat(np.arange(len(shares)), counts[stratum])
    return _fill_empty(split, families, members, target, len(fractions)) if large.size else split


def _exchange(
    members: NDArray[np.int64], home: NDArray[np.int64], placed: NDArray[np.int64], target: NDArray[np.float64]
) -> None:
    """Exchange families between splits, or move one, for as long as counts come nearer to their shares.

    Families of the same counts are alike, and a family that moves is exchanged for one of nobody. `home` and `placed`
    are changed in place.
    """
    kinds, kind_of = np.unique(np.vstack([np.zeros_like(members[:1]), members]), axis=0, return_inverse=True)
    kind_of = kind_of.ravel()[1:]
    if len(kinds) > _KINDS:
        return
    vectors = np.hstack([kinds, kinds.sum(axis=1, keepdims=True)]).astype(float)  # the total counts like a stratum
    apart = 2 * ((vectors[:, None] - vectors[None]) ** 2).sum(axis=2)
    n_shares = placed.shape[1]
    for _ in range(_EXCHANGES):
        off = np.vstack([placed - target, (placed - target).sum(axis=0)])
        has = np.array([np.bincount(kind_of[home == k], minlength=len(kinds)) > 0 for k in range(n_shares)])
        has[:, 0] = True  # nobody
        best: tuple[int, int, int, int] | None = None
        least = -1e-9
        for k in range(n_shares):
            for other in range(k + 1, n_shares):
                pull = 2 * vectors @ (off[:, k] - off[:, other])
                change = apart + pull[None] - pull[:, None]
                change[~has[k]] = np.inf
                change[:, ~has[other]] = np.inf
                if change.min() < least:
                    least = float(change.min())
                    best = (k, other, *divmod(int(np.argmin(change)), len(kinds)))
        if best is None:
            return
        k, other, gives, gets = best
        for kind, source, goal in ((gives, k, other), (gets, other, k)):
            if kind:
                home[np.flatnonzero((kind_of == kind) & (home == source))[0]] = goal
                placed[:, source] -= kinds[kind]
                placed[:, goal] += kinds[kind]


def _fill_empty(
    split: NDArray[np.int64],
    families: NDArray[np.int64],
    members: NDArray[np.int64],
    target: NDArray[np.float64],
    n_splits: int,
) -> NDArray[np.int64]:
    """Give each split without a donor a family of a split that has several, where that does least to the shares."""
    home = np.zeros(len(members), dtype=np.int64)
    home[families] = split
    for empty in np.setdiff1d(np.arange(n_splits), home):
        held = np.bincount(home, minlength=target.shape[1])
        movable = np.flatnonzero((held[home] > 1) | (home >= n_splits))
        off = np.stack([members[home == k].sum(axis=0) for k in range(target.shape[1])], axis=1) - target
        costs = []
        for family in movable:
            after = off.copy()
            after[:, home[family]] -= members[family]
            after[:, empty] += members[family]
            costs.append((after**2).sum() + (after.sum(axis=0) ** 2).sum())
        if costs:
            home[movable[int(np.argmin(costs))]] = empty
    return home[families]


# Beyond these, families stay where they were first placed; what is tried at each step is the square of the kinds.
_KINDS, _EXCHANGES = 300, 2000


def _round(
    sizes: NDArray[np.int64],
    n_single: NDArray[np.int64],
    placed: NDArray[np.int64],
    shares: list[Fraction],
    n_splits: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """How many of the single donors of each stratum go to each split: (n_strata, n_shares)."""
    costs = rng.random(placed.shape)
    for need_one in (True, False):
        total = int(sizes.sum())
        low = np.array([[int(size * share) for share in shares] for size in sizes.tolist()]) - placed
        high = np.array([[-int(-size * share // 1) for share in shares] for size in sizes.tolist()]) - placed
        columns_low = np.array([int(total * share) for share in shares])
        columns_high = np.array([-int(-total * share // 1) for share in shares])
        if need_one:  # a split without donors is of no use
            columns_low[:n_splits] = np.maximum(columns_low[:n_splits], 1)
        already = placed.sum(axis=0)
        found = _solve(n_single, low, high, columns_low - already, columns_high - already, costs)
        if found is not None:
            return found
    # families have taken more than the share of a split: what is left goes where most is wanted
    counts = np.zeros_like(placed)
    lacking = np.array([[float(size * share) for share in shares] for size in sizes.tolist()]) - placed
    for stratum in np.argsort(-n_single, kind="stable"):
        for _ in range(n_single[stratum]):
            wanted = lacking[stratum] + lacking.sum(axis=0) / (sizes.size + 1)
            best = int(np.argmax(wanted + 1e-6 * costs[stratum]))
            counts[stratum, best] += 1
            lacking[stratum, best] -= 1
    return counts


def _solve(
    rows: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    columns_low: NDArray[np.int64],
    columns_high: NDArray[np.int64],
    costs: NDArray[np.float64],
) -> NDArray[np.int64] | None:
    """A table of whole numbers with given row sums, and entries and column sums within bounds; `None` if none is."""
    if (high < 0).any() or (columns_high < 0).any():
        return None
    n_strata, n_shares = costs.shape
    sums = sp.vstack(
        [
            sp.kron(sp.eye_array(n_strata), np.ones((1, n_shares))),  # of a stratum
            sp.kron(np.ones((1, n_strata)), sp.eye_array(n_shares)),  # of a split
        ]
    )
    found = milp(
        costs.ravel(),
        integrality=np.ones(costs.size),
        bounds=Bounds(np.maximum(low, 0).ravel(), high.ravel()),
        constraints=LinearConstraint(sums, np.r_[rows, columns_low], np.r_[rows, columns_high]),
    )
    return None if found.x is None else np.rint(found.x).astype(np.int64).reshape(costs.shape)


def cut_by_hash(codes: NDArray[Any], fractions: Mapping[str, Fraction], seed: int) -> NDArray[np.int16]:
    """Which split each cell goes to, donor by donor.

    A cell's place among those of its donor is a hash of (seed, row), so that it can be told again from these alone, in
    any version of numpy.

    Parameters
    ----------
    codes
        (n_cells,) donor of each cell; -1 for cells to leave out.
    fractions, seed
        As for :func:`allot`.

    Returns
    -------
    (n_cells,) int16 positions in `fractions`; ``len(fractions)`` for cells of no split.
    """
    rows = np.arange(codes.size, dtype=np.uint64)
    key = np.zeros(1, dtype=np.uint64)
    while True:  # a seed of more than 64 bits in parts
        key = _mix(key ^ np.uint64(seed & 0xFFFFFFFFFFFFFFFF))
        if not (seed := seed >> 64):
            break
    place = _mix(rows ^ key)
    order = np.lexsort((place, codes))
    sizes = np.bincount(codes[order] + 1)
    starts = np.cumsum(sizes) - sizes
    number = np.arange(codes.size) - np.repeat(starts, sizes)  # of a cell among those of its donor
    # where cuts fall between two cells differs by donor: else small donors would all lack the same split
    shift = (_mix(place[order[np.minimum(starts, codes.size - 1)]]) >> np.uint64(11)) * 2.0**-53
    split = np.zeros(codes.size, dtype=np.int16)
    total = Fraction(0)
    for share in fractions.values():
        total += share
        cut = sizes if total == 1 else np.floor(sizes * float(total) + shift).astype(np.int64)
        split[order] += number >= np.repeat(cut, sizes)
    split[codes < 0] = len(fractions)
    return split


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every bit of the result depends on all of `x`."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
