"""What leaves a trainer rank whose policy is an adapter: that adapter, or weights it was merged into."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rlflow.config import HFModelConfig, RolloutConfig
from rlflow.config.model import LoraOptions
from rlflow.workers.rollout.capabilities import CAPABILITIES
from rlflow.workers.weight_export import WeightExport


class Exports:
    """Stands for a training engine; notes what is asked for."""

    def __init__(self) -> None:
        self.asked: list[bool | None] = []

    def get_per_tensor_param(self, base_sync_done: bool | None = None) -> tuple[Any, dict[str, Any] | None]:
        self.asked.append(base_sync_done)
        return iter([("weight", torch.ones(2))]), {"r": 4} if base_sync_done else None


def asked(engine: str, *, merge: bool) -> list[bool | None]:
    """`base_sync_done` of the exports of two syncs; None: merged weights."""
    rollout = RolloutConfig(name=engine, load_format="dummy")
    export = WeightExport(rollout, HFModelConfig(lora_rank=4, lora=LoraOptions(merge=merge)), 0, 1)
    exports: Any = Exports()
    for version in (1, 2):
        asyncio.run(export.send(exports, version, None, None))
    return exports.asked


@pytest.mark.parametrize("engine", sorted(CAPABILITIES))
def test_an_adapter_goes_by_itself_to_engines_that_serve_adapters(engine: str) -> None:
    base_once = [False, True, True]
    assert asked(engine, merge=False) == (base_once if CAPABILITIES[engine].lora_adapters else [None, None])
    assert asked(engine, merge=True) == [None, None]


def test_which_engines_serve_adapters() -> None:
    assert {name for name, row in CAPABILITIES.items() if row.lora_adapters} == {"hf"}
