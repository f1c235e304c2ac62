"""Which pools of devices a configuration asks for; what a run makes and what a plan shows."""

from __future__ import annotations

from typing import Any

from rlflow.config import HFModelConfig, omega_conf_to_dataclass
from rlflow.config.checks import need_reference_policy
from rlflow.config.reward import need_reward_model

GLOBAL_POOL = "global_pool"
REF_POOL = "ref_pool"
REWARD_POOL = "reward_pool"


def uses_lora(config: Any) -> bool:
    """Whether the policy trains an adapter."""
    return omega_conf_to_dataclass(config.actor_rollout_ref.model, HFModelConfig).uses_lora


def has_reference_model(config: Any) -> bool:
    """Whether a second model is loaded as the reference; a policy that trains an adapter is its own."""
    return need_reference_policy(config) and not uses_lora(config)


def pool_sizes(config: Any) -> dict[str, list[int]]:
    """Name of a pool -> devices on each of its nodes; `GLOBAL_POOL` is always there."""
    ref, model = config.actor_rollout_ref.ref, config.reward.reward_model
    pools = {GLOBAL_POOL: _devices(config.trainer)}
    if has_reference_model(config) and ref.enable_resource_pool:
        pools[REF_POOL] = _devices(ref)
    if need_reward_model(config) and model.enable_resource_pool:
        pools[REWARD_POOL] = _devices(model)
    return pools


def _devices(node: Any) -> list[int]:
    return [int(node.n_gpus_per_node)] * int(node.nnodes)
