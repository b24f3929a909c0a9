"""WHICH rows, in what order: pure functions of (data, settings, seed, epoch). No I/O, no threads."""

from ._bag import BagRequest, BagSampler, read_requests
from ._donor import DonorRequest, DonorSampler, donor_requests
from ._epoch import EpochSampler, RequestPlan
from ._geometry import WINDOW_CELLS, Geometry, choose_geometry
from ._replay import pass_generator, replay, replica
from ._resume import ResumedRequest, delivered_batches, skip_batches
from ._rows import complete_requests, request_rows
from ._subset import SubsetSampler

__all__ = [
    "WINDOW_CELLS",
    "BagRequest",
    "BagSampler",
    "DonorRequest",
    "DonorSampler",
    "EpochSampler",
    "Geometry",
    "RequestPlan",
    "ResumedRequest",
    "SubsetSampler",
    "choose_geometry",
    "complete_requests",
    "delivered_batches",
    "donor_requests",
    "pass_generator",
    "read_requests",
    "replay",
    "replica",
    "request_rows",
    "skip_batches",
]
