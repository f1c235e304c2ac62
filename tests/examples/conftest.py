"""What examples register in this process goes with the test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    from rlflow.trainer.ppo import core_algos

    yield
    if core_algos.ADV_ESTIMATOR_REGISTRY.pop("group_median", None) is not None:
        # The module would not register again as long as it counts as imported.
        for name in [name for name in sys.modules if name.startswith("rlflow_user_group_median_")]:
            del sys.modules[name]
