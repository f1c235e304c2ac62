"""A tiny model on disk and engines that serve it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import rollout_tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory) -> str:
    return rollout_tiny.save_model(tmp_path_factory.mktemp("rollout-model"))


@pytest.fixture(scope="session")
def plain(model_path):
    return rollout_tiny.plain_model(model_path)


@pytest.fixture
def make_engine(model_path):
    """make_engine(slots=8, version=0, path=..., **rollout overrides) -> a running HFEngine."""
    from rlflow.workers.rollout.hf.engine import HFEngine
    from rlflow.workers.rollout.hf.limits import EngineLimits
    from rlflow.workers.rollout.hf.model import load_model

    engines = []

    def make(
        slots: int = 8,
        version: int | None = 0,
        path: str = model_path,
        max_model_len: int = 64,
        admission=None,
        **rollout,
    ):
        node = rollout_tiny.config(path, **rollout).actor_rollout_ref
        model = load_model(node.model, node.rollout, torch.device("cpu"))
        limits = EngineLimits(max_model_len, slots, 32, 32, prefill_tokens=64)
        engine = HFEngine(model, limits, version=version, admission=admission)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()
