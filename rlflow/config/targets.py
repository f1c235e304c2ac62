"""`_target_` in a configuration: the type that verl's tree names for a node; here it follows from the node's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rlflow.config.tree import hint_of

TARGET = "_target_"
# verl's class -> ours, where they have other names or one of theirs stands for several.
_OURS: dict[str, set[str]] = {
    "FSDPActorConfig": {"FSDPActorConfig", "RefConfig"},
    "McoreActorConfig": {"McoreActorConfig", "McoreRefConfig"},
    "EngineRouterReplayConfig": {"RouterReplayConfig"},
    "QATEngineConfig": {"QATConfig"},
    "RolloutConfig": {"RolloutConfig", "RewardModelRolloutConfig", "TeacherInferenceConfig"},
    "ProfilerConfig": {"ProfilerConfig", "RolloutProfilerConfig", "GlobalProfilerConfig"},
    "NsightToolConfig": {"NsightToolConfig", "GlobalNsightConfig"},
    "NPUToolConfig": {"NPUToolConfig", "RolloutNPUToolConfig"},
    "TorchProfilerToolConfig": {"TorchProfilerToolConfig", "RolloutTorchToolConfig"},
    "TorchMemoryToolConfig": {"TorchMemoryToolConfig", "GlobalTorchMemoryConfig"},
}


def drop_targets(config: Any, problems: list[str]) -> str | None:
    """Take `_target_` out of the typed nodes of a composed tree, in place.

    Args:
        config: the `DictConfig`.
        problems: gets a text for each node that asks for another type than its own.

    Returns:
        A notice that names the nodes; None when there was none.
    """
    from omegaconf import open_dict

    dropped = []
    with open_dict(config):
        for path, node in _with_target(config):
            kind = hint_of(path)
            kinds = getattr(kind, "__args__", (kind,))
            ours = {one.__name__ for one in kinds if isinstance(one, type) and dataclasses.is_dataclass(one)}
            if not ours:
                continue  # a free node: the key is its owner's
            name = str(node.pop(TARGET))
            package, last = name.split(".")[0], name.rpartition(".")[2]
            if package in ("verl", "rlflow") and _OURS.get(last, {last}) & ours:
                dropped.append(path)
            else:
                problems.append(
                    f"{path}.{TARGET}={name}: the type of this node follows from its place ({', '.join(ours)}).\n"
                    "    try:    leave it out; classes of your own are named by data.custom_cls, "
                    "reward.reward_manager, trainer.v1.sampler.custom_sampler or agent.agent_loop_config_path"
                )
    return f"{TARGET} of {', '.join(dropped)}: a node's type follows from its place" if dropped else None


def _with_target(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    from omegaconf import OmegaConf

    for name in list(node):
        if name == TARGET:
            yield path, node
        else:
            child = node._get_node(name)
            if OmegaConf.is_dict(child) and not child._is_interpolation() and not child._is_none():
                yield from _with_target(child, f"{path}.{name}".lstrip("."))
