"""The tiny model and the helpers of the rollout tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

import rollout_tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    return rollout_tiny.save_model(tmp_path_factory.mktemp("sync-model"))
