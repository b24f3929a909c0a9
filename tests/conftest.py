"""Shared by all tests: data made once per session, hypothesis profiles, and warnings of others that we cannot mend."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

from _data import Store

# Building a loader costs milliseconds and threads start late on a busy machine: examples are few, and not timed.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
# Shrinking repeats a failure many times over; the setting that failed is printed either way.
settings.register_profile(
    "default", max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate], **COMMON
)
settings.register_profile("deep", max_examples=1500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Warnings that other packages give about themselves; those that reach a user through us stay errors."""
    for line in (
        "ignore:The '(future.infer_string|mode.chained_assignment)' option:DeprecationWarning",  # anndata, of pandas 3
        "ignore:Consolidated metadata:UserWarning",  # annbatch and anndata write it
        r"ignore:os\.fork\(\) was called:RuntimeWarning",  # jax, where another test has used it
        "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # lightning, of torch 2.9
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Cells and genotypes that encode their own row, column and donor."""
    return Store(tmp_path_factory.mktemp("self_identifying"))
