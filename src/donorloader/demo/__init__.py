"""`donorloader demo`: a simulated study from raw files to recovered cis effects, in under a minute."""

from ._run import DemoResult, run_demo
from ._simulate import StudySettings

__all__ = ["DemoResult", "StudySettings", "run_demo"]
