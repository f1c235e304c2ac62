"""Fit process counts to the machine.

On CPU the defaults (8 processes a node, 8 agent workers, 8 reward workers) would only take each other's cores. They are
lowered to what the machine has, with one notice line; nothing else is changed silently.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf, open_dict


def clamp_to_machine(config: Any, cores: int) -> str | None:
    """Lower process counts of a run on device `cpu` in place; returns the notice, None when nothing changed."""
    if config.trainer.device != "cpu":
        return None
    helpers = max(1, cores // 2)
    limits = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": cores,
        "actor_rollout_ref.rollout.agent.num_workers": helpers,
        "reward.num_workers": helpers,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    if OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False) == "hf":
        limits["actor_rollout_ref.rollout.tensor_model_parallel_size"] = 1
    changed = []
    with open_dict(config):
        for key, limit in limits.items():
            value = OmegaConf.select(config, key)
            # Anything but a number is for the checks to refuse.
            if isinstance(value, int) and value > limit:
                OmegaConf.update(config, key, limit)
                changed.append(f"{key} {value} -> {limit}")
    return f"device cpu, {cores} cores: " + ", ".join(changed) if changed else None
