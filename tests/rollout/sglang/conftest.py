"""The tiny model of the rollout tests, and a bare SGLang engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import rollout_tiny as tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("sglang-model"))
