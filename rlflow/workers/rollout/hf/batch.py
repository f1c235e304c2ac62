"""Requests and the running batch: who is in which slot, in plain arrays.

Invariants
    - Slots `0..n-1` are taken, in this order of `requests`; `remove` closes the gaps (see `kv_cache`).
    - `length[slot]` tokens of a sequence are in the cache; `last_token[slot]` is the next one to be fed, at position
      `length[slot]`. So a new sequence enters with its prompt but for the last token, and equal prompts need one
      prefill whatever their sampling.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from rlflow.workers.rollout.base import SamplingParams
from rlflow.workers.rollout.hf.kv_cache import SlotKVCache
from rlflow.workers.rollout.hf.sampling import CompiledSettings, RowSettings


@dataclass
class Generation:
    """Result of one request: tokens, their log-probs (fp32), why it ended, and the weight version that made them.

    `version` is None for a request that was aborted before the engine had usable weights.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    version: int | None


@dataclass(eq=False)
class Request:
    """One sequence to be continued.

    `deadline` is in `time.monotonic` seconds; `session` and `turn` (number of its request) matter to `Rounds`.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_ids: frozenset[int]
    deadline: float
    timeout_s: float
    session: str = ""
    turn: int = 0
    future: Future[Generation] = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    slot: int = -1

    def __post_init__(self) -> None:
        # A running future cannot be cancelled from outside, so its result can always be set.
        self.future.set_running_or_notify_cancel()
        self.prefix_key = np.asarray(self.prompt_ids[:-1], dtype=np.int64).tobytes()

    @property
    def prefix_length(self) -> int:
        """Tokens that are prefilled: all of the prompt but its last one."""
        return len(self.prompt_ids) - 1

    def append(self, token: int, log_prob: float) -> str | None:
        """Add a token; returns why the sequence ends with it, or None."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        if token in self.stop_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.max_tokens else None


class Batch:
    """The running sequences."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.slots, self._vocab_size, self._device = slots, vocab_size, device
        self.requests: list[Request] = []
        self.length = np.zeros(slots, dtype=np.int64)
        self.last_token = np.zeros(slots, dtype=np.int64)
        self._settings = RowSettings(slots)
        self._compiled: CompiledSettings | None = None
        self._by_prefix: dict[bytes, list[Request]] = {}

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def settings(self) -> CompiledSettings:
        """Sampling settings of the running slots; built again only after the batch changed."""
        if self._compiled is None:
            self._compiled = self._settings.compile(len(self), self._vocab_size, self._device)
        return self._compiled

    def holder(self, prefix_key: bytes) -> Request | None:
        """A running request whose slot begins with that prefix."""
        holders = self._by_prefix.get(prefix_key)
        return holders[0] if holders else None

    def add(self, request: Request) -> None:
        """Give the request the next slot."""
        slot = request.slot = len(self.requests)
        assert slot < self.slots, "admission must leave a slot"
        self.requests.append(request)
        self._by_prefix.setdefault(request.prefix_key, []).append(request)
        self.length[slot] = request.prefix_length
        self.last_token[slot] = request.prompt_ids[-1]
        p = request.params
        self._settings.put(slot, request.seed, p.temperature, p.top_k, p.top_p, p.repetition_penalty)
        self._compiled = None

    def remove(self, leaving: list[Request], cache: SlotKVCache | None) -> None:
        """Free the slots of these requests, from the last to the first: so the last one left is always staying."""
        for request in sorted(leaving, key=lambda r: -r.slot):
            holders = self._by_prefix[request.prefix_key]
            holders.remove(request)
            if not holders:
                del self._by_prefix[request.prefix_key]
            last = self.requests.pop()
            if last is not request:
                self._move(last, request.slot, cache)
            request.slot = -1
        self._compiled = None

    def _move(self, request: Request, target: int, cache: SlotKVCache | None) -> None:
        source = request.slot
        assert cache is not None, "a running sequence has a cache"
        cache.move(source, target, int(self.length[source]))
        self._settings.move(source, target)
        self.length[target], self.last_token[target] = self.length[source], self.last_token[source]
        self.requests[target] = request
        request.slot = target

    def advance(self, tokens: list[int], log_probs: list[float]) -> list[tuple[Request, str]]:
        """Append the next token of each slot; returns the requests that end with it, and why."""
        n = len(self)
        self.length[:n] += 1
        self.last_token[:n] = tokens
        ended = []
        for request, token, log_prob in zip(self.requests, tokens, log_probs, strict=True):
            reason = request.append(token, log_prob)
            if reason is not None:
                ended.append((request, reason))
        return ended
