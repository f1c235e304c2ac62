"""One token for each running request, and the count of what was computed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlflow.workers.rollout.hf.batch import Batch, Request
from rlflow.workers.rollout.hf.kv_cache import DecodeStep, SlotKVCache
from rlflow.workers.rollout.hf.model import ServedModel
from rlflow.workers.rollout.hf.sampling import sample


@dataclass
class EngineCounters:
    """What the engine did since it started; tokens and seconds."""

    prefill_tokens: int = 0
    shared_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


def decode(model: ServedModel, cache: SlotKVCache, batch: Batch, counters: EngineCounters) -> list[tuple[Request, str]]:
    """One decode step; returns the requests that end with it, and why."""
    n, device = len(batch), model.device
    lengths = batch.length[:n].copy()
    settings = batch.settings
    logits = model.decode(
        torch.from_numpy(batch.last_token[:n, None].copy()).to(device),
        torch.from_numpy(lengths[:, None]).to(device),
        DecodeStep(cache, lengths),
    )
    seen = [r.prompt_ids + r.token_ids for r in batch.requests] if settings.penalised else None
    tokens, log_probs = sample(logits, settings, lengths + 1, seen)
    counters.decode_tokens += n
    counters.decode_steps += 1
    return batch.advance(tokens.tolist(), log_probs.tolist())
