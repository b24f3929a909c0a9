"""HOW the two sides overlap: lanes, join, device copy, timing. Knows neither genes nor variants."""

from ._conveyor import Conveyor
from ._device import DeviceCopier
from ._jax import jax_converter
from ._join import Joiner
from ._pass import Pass, PassRecord, join_lanes
from ._progress import Progress
from ._tensors import silence_csr_warning, to_torch

__all__ = [
    "Conveyor",
    "DeviceCopier",
    "Joiner",
    "Pass",
    "PassRecord",
    "Progress",
    "jax_converter",
    "join_lanes",
    "silence_csr_warning",
    "to_torch",
]
