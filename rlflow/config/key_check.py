"""Keys that were set and are not honoured: one notice each, or a problem where the feature is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlflow.config.describe import ENGINES, keys_of
from rlflow.config.key_states import INERT, Rule, rule_for

ENGINE_KEY = "model_engine"


def check_keys(config: Any, problems: list[str], notices: list[str]) -> None:
    """Compare a composed tree with the defaults; what differs must be honoured, or is named here.

    Args:
        config: the `DictConfig`, interpolations unresolved.
        problems: gets one text for each key whose feature is not built.
        notices: gets one line for each reason why keys have no effect.
    """
    from omegaconf import OmegaConf

    engine = config.get(ENGINE_KEY)
    if engine != ENGINES[0]:
        problems.append(
            f"{ENGINE_KEY}={engine}: that training engine is not in this version; its keys are only known so that "
            f"recipes can be read.\n    try:    {ENGINE_KEY}=dp, with the FSDP engine's keys (docs/from_verl.md)"
        )
    defaults = keys_of("ppo_trainer", engine if engine in ENGINES else ENGINES[0])
    rollout = OmegaConf.select(config, "actor_rollout_ref.rollout.name", throw_on_missing=False)
    without_effect: dict[Rule, list[str]] = {}
    for key, value in changed(OmegaConf.to_container(config, resolve=False), defaults):
        rule = rule_for(key)
        if rule is None or rollout in rule.honoured_by:
            continue
        if rule.state == INERT:
            without_effect.setdefault(rule, []).append(key)
        elif engine == ENGINES[0] or "megatron" not in key.split("."):  # else the engine's name is problem enough
            problems.append(
                f"{key}={_text(value)} asks for {rule.why}: not in this version.\n    try:    {rule.instead}"
            )
    for rule, keys in without_effect.items():
        one = len(keys) == 1
        notices.append(f"{', '.join(keys)} {'has' if one else 'have'} no effect: {rule.why}")


def changed(tree: Any, defaults: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, value) of every value of a tree that is not its default; groups are looked into, other values are whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and (value or isinstance(defaults.get(key), dict)):
            yield from changed(value, defaults, f"{key}.")
        elif key not in defaults or defaults[key] != value:
            yield key, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
