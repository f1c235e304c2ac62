"""Where `rollout.full_determinism` cannot keep its promise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.workers.rollout.capabilities import capabilities_of

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

KEY = "actor_rollout_ref.rollout.full_determinism"


def check_determinism(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Nothing when the switch is off."""
    if not c.rollout.full_determinism:
        return
    if not capabilities_of(c.rollout.name).full_determinism:
        problems.append(
            f"{KEY}=true cannot hold with rollout.name={c.rollout.name}: its batches depend on when requests arrive.\n"
            "    try:    actor_rollout_ref.rollout.name=hf"
        )
    if c.trainer.v1.trainer_mode != "sync":
        problems.append(
            f"{KEY}=true cannot hold with trainer.v1.trainer_mode={c.trainer.v1.trainer_mode}: new weights reach the "
            "servers at a time, not at a token.\n    try:    trainer.v1.trainer_mode=sync"
        )
    if manager := c.rollout.agent.agent_loop_manager_class:
        notices.append(
            f"{KEY}=true: {manager} must announce its sessions (LLMServerClient.announce_sessions), or requests are "
            "batched as they arrive"
        )
    if c.trainer.device != "cpu":
        notices.append(
            f"{KEY}=true on {c.trainer.device}: torch is asked for deterministic algorithms, but only runs on a CPU "
            "are tested to repeat bit for bit"
        )
