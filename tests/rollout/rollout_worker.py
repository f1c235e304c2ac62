"""A trainer process as the rollout room sees it: weights that change, and a sender. No training."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import torch

from rlflow.checkpoint_engine.base import build_engine, build_sender
from rlflow.checkpoint_engine.canary import Canary, canary_tokens
from rlflow.checkpoint_engine.tally import Tally
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.single_controller.base import Dispatch, Worker, register
from rlflow.utils.errors import WeightSyncError


class FeedWorker(Worker):
    def __init__(self, path: str, rollout_config: Any) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.sender = build_sender(rollout_config, self.rank, self.world_size)
        self.types = WireTypes.from_config(rollout_config)
        self.engine: Any = None
        if rollout_config.checkpoint_engine.backend != "naive":
            self.engine = build_engine(rollout_config, is_master=self.rank == 0)
        self.server: Any = None
        self.fault: tuple[str, str] | None = None
        self.victim = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def bind_rollout(self, handles: list[Any]) -> None:
        self.server = handles[self.rank]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int, fault: tuple[str, str] | None = None, victim: int = 0) -> None:
        """Move all weights; `fault` = (what, parameter) of the next syncs; `victim`: process that gets the signal."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            param.data.add_(torch.randn(param.shape, generator=generator) * 0.05)
        self.fault, self.victim = fault, victim

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(
        self, global_steps: int, mode: str = "auto", ranks: list[int] | None = None, base_sync: bool | None = None
    ) -> Any:
        try:
            if mode in ("auto", "naive"):
                server = self.server if ranks is None or self.rank in ranks else None
                return await self.sender.send(self._export(), server, global_steps)
            tally = Tally(self.types.cast(self._export()))
            metrics = await self.engine.send_weights(tally, global_steps)
        except WeightSyncError as error:
            return error
        return None if self.rank else replace(tally.receipt(global_steps, "trainer"), metrics=metrics or {})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> Any:
        return getattr(self.engine, method)(**kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def canary(self) -> Any:
        tokens = torch.tensor([canary_tokens(self.model.config.vocab_size)])
        with torch.no_grad():
            table = torch.log_softmax(self.model(tokens).logits[0, :-1].float(), dim=-1)
        return Canary(tuple(tokens[0].tolist()), tuple(table.gather(1, tokens[0, 1:, None])[:, 0].tolist())), "float32"

    def _export(self):
        what, where = self.fault or ("", "")
        for name, param in self.model.named_parameters():
            if (what, where) == ("drop", name):
                continue
            if (what, where) == ("raise", name):
                raise RuntimeError("gathering failed")
            if (what, where) == ("rename", name):
                name = "model.somebody.else"
            if what in ("SIGKILL", "SIGSTOP") and where == name and self.rank == 0:
                os.kill(self.victim, getattr(signal, what))
            yield name, param.detach()
            if (what, where) == ("double", name):
                yield name, param.detach()
