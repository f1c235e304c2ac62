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
from rlflow.config.critic import FSDPCriticConfig
from rlflow.config.data import DataConfig
from rlflow.config.model import HFModelConfig
from rlflow.config.reward import RewardConfig
from rlflow.config.rollout import RolloutConfig
from rlflow.config.trainer import TrainerConfig
from rlflow.config.worker import FSDPActorConfig, RefConfig

TYPED_NODES: dict[str, type] = {
    "actor_rollout_ref.actor": FSDPActorConfig,
    "actor_rollout_ref.model": HFModelConfig,
    "actor_rollout_ref.ref": RefConfig,
    "actor_rollout_ref.rollout": RolloutConfig,
    "algorithm": AlgoConfig,
    "critic": FSDPCriticConfig,
    "data": DataConfig,
    "reward": RewardConfig,
    "trainer": TrainerConfig,
}


def default_of(key: str) -> typing.Any:
    """The default of a key of the typed nodes, given as a dotted path; None for a key that is none of theirs."""
    root = next((node for node in TYPED_NODES if key.startswith(f"{node}.")), None)
    if root is None:
        return None
    names = key[len(root) + 1 :].split(".")
    return functools.reduce(lambda node, name: getattr(node, name, None), names, TYPED_NODES[root]())


def hint_of(key: str) -> typing.Any:
    """The type of a key of the typed nodes; None for a key that no dataclass describes."""
    root = next((node for node in TYPED_NODES if key.startswith(f"{node}.") or key == node), None)
    if root is None:
        return None
    hint: typing.Any = TYPED_NODES[root]
    for name in key[len(root) + 1 :].split(".") if key != root else ():
        kind = next((one for one in _alternatives(hint) if dataclasses.is_dataclass(one)), None)
        hint = typing.get_type_hints(kind).get(name) if kind is not None else None
        if hint is None:
            return None
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
