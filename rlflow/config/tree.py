"""Which parts of the configuration tree have typed keys, and which take any.

A node with a dataclass knows its keys; a `dict` field in it (`reward_kwargs`, `engine_kwargs`, ...) and a node that no
dataclass describes take whatever is put into them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing

from rlflow.config.algorithm import AlgoConfig
from rlflow.config.base import BaseConfig
from rlflow.config.critic import FSDPCriticConfig
from rlflow.config.data import DataConfig
from rlflow.config.distillation import DistillationConfig
from rlflow.config.job import (
    LegacyFunctionConfig,
    LegacyRewardModelConfig,
    LegacySandboxConfig,
    RayKwargsConfig,
    SkipManagerConfig,
)
from rlflow.config.megatron import McoreActorConfig, McoreCriticConfig, McoreRefConfig
from rlflow.config.model import HFModelConfig
from rlflow.config.profiler import GlobalProfilerConfig
from rlflow.config.reward import RewardConfig
from rlflow.config.rollout import RolloutConfig
from rlflow.config.trainer import TrainerConfig
from rlflow.config.worker import FSDPActorConfig, RefConfig


@dataclasses.dataclass
class ActorRolloutRefConfig(BaseConfig):
    """`actor_rollout_ref`: the policy's parts. `nccl_timeout`: seconds a collective of the worker group may take."""

    hybrid_engine: bool = True
    nccl_timeout: int = 600
    actor: FSDPActorConfig = dataclasses.field(default_factory=FSDPActorConfig)
    model: HFModelConfig = dataclasses.field(default_factory=HFModelConfig)
    ref: RefConfig = dataclasses.field(default_factory=RefConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)


# A node stands before those that hold it.
TYPED_NODES: dict[str, type] = {
    "actor_rollout_ref.actor": FSDPActorConfig,
    "actor_rollout_ref.model": HFModelConfig,
    "actor_rollout_ref.ref": RefConfig,
    "actor_rollout_ref.rollout": RolloutConfig,
    "algorithm": AlgoConfig,
    "actor_rollout_ref": ActorRolloutRefConfig,
    "critic": FSDPCriticConfig,
    "custom_reward_function": LegacyFunctionConfig,
    "data": DataConfig,
    "distillation": DistillationConfig,
    "global_profiler": GlobalProfilerConfig,
    "ray_kwargs": RayKwargsConfig,
    "reward": RewardConfig,
    "reward_model": LegacyRewardModelConfig,
    "sandbox_fusion": LegacySandboxConfig,
    "skip": SkipManagerConfig,
    "trainer": TrainerConfig,
}
# Nodes whose keys depend on the engine, as model_engine=megatron has them.
MEGATRON_NODES: dict[str, type] = {
    "actor_rollout_ref.actor": McoreActorConfig,
    "actor_rollout_ref.ref": McoreRefConfig,
    "critic": McoreCriticConfig,
}


def default_of(key: str) -> typing.Any:
    """The default of a key of the typed nodes, given as a dotted path; None for a key that is none of theirs."""
    root = next((node for node in TYPED_NODES if key.startswith(f"{node}.")), None)
    if root is None:
        return None
    names = key[len(root) + 1 :].split(".")
    return functools.reduce(lambda node, name: getattr(node, name, None), names, TYPED_NODES[root]())


def hint_of(key: str) -> typing.Any:
    """The type of a key of the typed nodes, of any engine; None for a key that no dataclass describes."""
    for nodes in (TYPED_NODES, MEGATRON_NODES):
        root = next((node for node in nodes if f"{key}.".startswith(f"{node}.")), None)
        hint = None if root is None else _hint_below(nodes[root], key[len(root) + 1 :])
        if hint is not None:
            return hint
    return None


def _hint_below(kind: type, path: str) -> typing.Any:
    hint: typing.Any = kind
    for name in path.split(".") if path else ():
        node = next((one for one in _alternatives(hint) if dataclasses.is_dataclass(one)), None)
        hint = typing.get_type_hints(node).get(name) if node is not None else None
    return hint


def closed_node(key: str) -> str | None:
    """The typed node that would have to know `key` and does not; None where the key is known, or anything may be put.

    `key` is a dotted path.
    """
    root = next((node for node in TYPED_NODES if key.startswith(f"{node}.")), None)
    if root is None:
        return None
    node, kind = root, TYPED_NODES[root]
    for name in key[len(root) + 1 :].split("."):
        hints = typing.get_type_hints(kind)
        if name not in hints or typing.get_origin(hints[name]) is typing.ClassVar:
            return node
        child = next((hint for hint in _alternatives(hints[name]) if dataclasses.is_dataclass(hint)), None)
        if child is None:
            return None  # a value, or a dict that takes any key
        node, kind = f"{node}.{name}", typing.cast(type, child)
    return None


def _alternatives(hint: typing.Any) -> tuple[typing.Any, ...]:
    """The types of a union (`Node | None`), else the type itself."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
