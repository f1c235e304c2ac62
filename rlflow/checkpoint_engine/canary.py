"""A prompt whose log-probs the server must give as the actor does: proof that an engine computes with what was sent.

Needed where the parameters cannot be read back (an engine that repacks them), because a receipt can then only speak of
the bytes that arrived. The actor computes in its own type and the server in another one, so the comparison has a
tolerance: it finds a layer that was not replaced, exchanged or garbled, not the change of one optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.utils.errors import WeightSyncError
from rlflow.utils.ray_utils import ray_await

LENGTH = 48
# Mean absolute difference, nats: 16-bit weights against the actor's master weights; fp32 weights in another kernel.
# Right weights in bf16 give 0.05 to 0.08, the faults it is for 0.76 and more (measured: docs/weight_sync.md).
_TOLERANCE_16_BIT, _TOLERANCE_FP32 = 0.25, 0.01


@dataclass(frozen=True)
class Canary:
    """Tokens, and the actor's log-prob of each but the first (temperature 1)."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def canary_tokens(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Always the same for a vocabulary: a walk by a step that shares no factor with its size, so tokens differ."""
    step = next(s for s in range(max(1, int(vocab_size * 0.618)), 2 * vocab_size) if math.gcd(s, vocab_size) == 1)
    return [(1 + i * step) % vocab_size for i in range(length)]


def default_tolerance(dtype: str) -> float:
    """By `rollout.dtype`."""
    return _TOLERANCE_FP32 if dtype in ("float32", "fp32") else _TOLERANCE_16_BIT


async def check_canary(
    canary: Canary, server: Any, *, replica_rank: int, version: int, tolerance: float, timeout_s: float
) -> float:
    """Ask a server and compare; returns the mean absolute difference in nats.

    Raises:
        WeightSyncError: it is over the tolerance, or not a number; the update is withdrawn on the server.
    """
    who = f"Rollout replica {replica_rank}"
    call = server.prompt_log_probs.remote(list(canary.token_ids))
    got = await ray_await(call, what=f"the canary of rollout replica {replica_rank}", timeout_s=timeout_s)
    error = canary_error(canary.log_probs, got)
    if error <= tolerance:
        return error
    await ray_await(server.abandon_update.remote(), what=f"{who} to give up its weights", timeout_s=timeout_s)
    worst = max(range(len(got)), key=lambda i: abs(got[i] - canary.log_probs[i])) if got else 0
    raise WeightSyncError(
        f"{who} does not compute with the weights of version {version}: the log-probs of the canary prompt differ "
        f"from the actor's by {error:.4g} nats on average, more than {tolerance:g} "
        f"(rollout.checkpoint_engine.canary_tolerance), most at position {worst + 1}. The tensors arrived, but the "
        "engine did not put all of them into use; or actor and rollout are not built from the same config.",
        phase="verify",
        replicas=(replica_rank,),
    )


def canary_error(wanted: Sequence[float], got: Sequence[float]) -> float:
    """Mean absolute difference in nats; infinite when they cannot be compared."""
    if len(wanted) != len(got) or not got:
        return math.inf
    error = sum(abs(a - b) for a, b in zip(wanted, got, strict=True)) / len(got)
    return error if math.isfinite(error) else math.inf
