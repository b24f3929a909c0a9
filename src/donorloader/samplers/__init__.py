"""WHICH rows, in what order: pure functions of (data, settings, seed, epoch). No I/O, no threads."""

from ._bag import BagRequest, BagSampler, read_requests
from ._deal import DealSampler
from ._donor import DonorRequest, DonorSampler, donor_requests
from ._epoch import EpochSampler, RequestPlan
from ._geometry import WINDOW_CELLS, Geometry, choose_geometry
from ._replay import pass_generator, replay, replica
from ._resume import ResumedRequest, delivered_batches, skip_batches
from ._rows import complete_requests, request_rows
from ._shard import ShardSampler
from ._shard_bags import ShardBagSampler
from ._share import Share, choose_shards
from ._subset import SubsetSampler

__all__ = [
    "WINDOW_CELLS",
    "BagRequest",
    "BagSampler",
    "DealSampler",
    "DonorRequest",
    "DonorSampler",
    "EpochSampler",
    "Geometry",
    "RequestPlan",
    "ResumedRequest",
    "ShardBagSampler",
    "ShardSampler",
    "Share",
    "SubsetSampler",
    "choose_geometry",
    "choose_shards",
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
