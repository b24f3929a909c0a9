"""The rest of a pass: load requests without the batches that were delivered before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NotRequired, cast

from annbatch.types import LoadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ResumedRequest", "delivered_batches", "skip_batches"]


class ResumedRequest(LoadRequest):
    """A load request of which some batches were delivered before.

    Attributes
    ----------
    delivered
        How many of its batches, from the first on, are not to come again. They stay in `splits`, as the window's
        donors are those of all its batches.
    """

    delivered: NotRequired[int]


def delivered_batches(request: LoadRequest) -> int:
    """How many batches of a load request were delivered before."""
    return int(cast("dict[str, Any]", request).get("delivered", 0))


def skip_batches(requests: Iterable[LoadRequest], batches: int) -> Iterator[LoadRequest]:
    """What is left of a pass after its first `batches` batches.

    Requests that were delivered in full are left out, so that nothing of them is read; of one that was delivered in
    part, :class:`ResumedRequest` says how far. A batch that takes several requests is left out with all of them.

    Parameters
    ----------
    requests
        Complete load requests of the whole pass.
    batches
        Batches that were delivered.

    Raises
    ------
    ValueError
        If the pass has fewer batches.
    """
    left, missing = batches, 0  # batches to leave out; cells of the one at hand that its next parts hold
    for request in requests:
        splits = request["splits"]
        if not left or not splits:
            yield request
            continue
        whole = cast("dict[str, Any]", request).get("part_of")
        if whole is not None:
            missing = (missing or whole) - len(splits[0])
            left -= missing == 0
        elif len(splits) <= left:
            left -= len(splits)
        else:
            yield cast("LoadRequest", {**request, "delivered": left})
            left = 0
    if left:
        raise ValueError(f"A pass cannot be resumed after batch {batches:,}: it has only {batches - left:,} batches.")
