"""A trainer process as the rollout room sees it: weights that change, and a sender. No training."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from rlflow.checkpoint_engine.base import build_sender
from rlflow.single_controller.base import Dispatch, Worker, register


class FeedWorker(Worker):
    def __init__(self, path: str, rollout_config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.sender = build_sender(rollout_config, self.rank, self.world_size)
        self.server: Any = None
        self.fault: tuple[str, str] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bind_rollout(self, handles: list[Any]) -> None:
        self.server = handles[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int, fault: tuple[str, str] | None = None) -> None:
        """Move all weights; `fault` = (what, parameter) of the next syncs."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            param.data.add_(torch.randn(param.shape, generator=generator) * 0.05)
        self.fault = fault

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def strike(self, pid: int, number: int, name: str) -> None:
        """Send a signal to a process in the middle of the next sync, before the parameter `name` leaves."""
        self.fault = (f"signal {number} {pid}", name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        return await self.sender.send(self._export(), self.server, global_steps)

    def _export(self):
        what, where = self.fault or ("", "")
        for name, param in self.model.named_parameters():
            if what.startswith("signal") and where == name:
                self.fault = None
                _, number, pid = what.split()
                with contextlib.suppress(ProcessLookupError):  # another rank was first
                    os.kill(int(pid), int(number))
            if (what, where) == ("drop", name):
                continue
            if (what, where) == ("raise", name):
                raise RuntimeError("gathering failed")
            if (what, where) == ("rename", name):
                name = "model.somebody.else"
            yield name, param.detach()
            if (what, where) == ("double", name):
                yield name, param.detach()
