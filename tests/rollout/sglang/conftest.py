"""The tiny model of the rollout tests, and a bare SGLang engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import rollout_tiny as tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("sglang-model"))


@pytest.fixture
def sglang_server(model_path, ray_cluster):
    """start(**rollout overrides) -> a server of the test's own; see `sglang_probe`."""
    from sglang_probe import start_server, stop_server

    actors = []

    def start(**rollout):
        actors.append(start_server(model_path, **rollout))
        return actors[-1]

    yield start
    for actor in actors:
        stop_server(actor)
