"""`donorloader demo`: simulated studies from raw files to recovered effects, or to the disease of unseen donors."""

from ._bags_run import BAGS_EPOCHS, BAGS_PICTURE, BagResult, run_bags_demo
from ._bags_simulate import BagSettings
from ._run import EPOCHS, PICTURE, DemoResult, run_demo
from ._simulate import StudySettings

__all__ = [
    "BAGS_EPOCHS",
    "BAGS_PICTURE",
    "EPOCHS",
    "PICTURE",
    "BagResult",
    "BagSettings",
    "DemoResult",
    "StudySettings",
    "run_bags_demo",
    "run_demo",
]
