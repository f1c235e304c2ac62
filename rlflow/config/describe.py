"""All that is known about one key of the configuration: for `rlflow config explain` and the reference page."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from rlflow.config.choices import allowed_values
from rlflow.config.key_states import HONOURED, Rule, rule_for
from rlflow.config.tree import hint_of
from rlflow.config.wrong_type import type_words
from rlflow.config.yaml_text import FOLDER, Place, documented
from rlflow.utils.errors import ConfigError

ENGINES = ("dp", *sorted({path.stem for path in (FOLDER / "model_engine").glob("*.yaml")} - {"dp"}))
_FOLLOWS = re.compile(r"\$\{(?:oc\.select:)?([\w.]+?)(?:,[^}]*)?\}")


@dataclass(frozen=True)
class KeyDescription:
    """One key.

    Attributes:
        key: dotted path.
        description: the comment above it in the YAML file.
        default: as it stands in the tree, interpolations unresolved; a dict for a node.
        follows: the key that the default follows, "" when it is a value.
        type: in words ("a whole number or null").
        defined_in: file below rlflow/config and line ("actor/actor.yaml:12").
        allowed: the values to choose from, () when any value of the type will do.
        state: "honoured", "inert" (accepted, one notice line) or "unbuilt" (refused away from the default).
        reason: why it is inert, or the feature that is not built; "" when honoured.
        instead: what to set or do in its place, "" when there is nothing to say.
    """

    key: str
    description: str
    default: Any
    follows: str
    type: str
    defined_in: str
    allowed: tuple[str, ...]
    state: str
    reason: str
    instead: str


def describe(key: str, model_engine: str = "", config_name: str = "ppo_trainer") -> KeyDescription:
    """The description of a key or node of the tree.

    Args:
        key: dotted path.
        model_engine: the variant of the tree; "": dp, and where that has no such key the other engines'.
        config_name: the tree: ppo_trainer, sft_trainer, evaluation or generation.

    Raises:
        ConfigError: the tree has no such key; the nearest ones are named.
    """
    variants = ENGINES if config_name == "ppo_trainer" else ENGINES[:1]
    engines = (model_engine,) if model_engine else variants
    for engine in engines:
        tree = keys_of(config_name, engine)
        if key in tree:
            return _describe(key, tree[key], _places(config_name, engine).get(key, Place("", "")))
    from rlflow.config.overrides import unknown_key

    raise ConfigError(unknown_key(key, set(keys_of(config_name, engines[0]))))


def _describe(key: str, default: Any, place: Place) -> KeyDescription:
    rule = rule_for(key)
    hint = hint_of(key)
    return KeyDescription(
        key=key,
        description=place.comment,
        default=default,
        follows=followed(key, default),
        type=type_words(type(default) if hint is None else hint),
        defined_in=place.where,
        allowed=allowed_values(key, default),
        state=rule.state if rule else HONOURED,
        reason=_reason(rule) if rule else "",
        instead=rule.instead if rule else "",
    )


def _reason(rule: Rule) -> str:
    honoured = f" (rollout.name={'|'.join(rule.honoured_by)} honours it)" if rule.honoured_by else ""
    return f"{rule.why}{honoured}"


def followed(key: str, default: Any) -> str:
    """The full key that an interpolated default names, "" when the default is a value of its own."""
    match = _FOLLOWS.fullmatch(default) if isinstance(default, str) else None
    if match is None:
        return ""
    relative = match[1].startswith(".")
    return f"{key.rpartition('.')[0]}{match[1]}" if relative else match[1]


@functools.cache
def keys_of(config_name: str = "ppo_trainer", model_engine: str = "dp") -> dict[str, Any]:
    """Every key and node of a composed tree -> its default, interpolations unresolved."""
    from omegaconf import OmegaConf

    from rlflow.config.overrides import compose_config

    # Without a choice where it is the default one: that tree is composed in any case, and kept.
    choice = [] if model_engine == ENGINES[0] else [f"model_engine={model_engine}"]
    return dict(_walk(OmegaConf.to_container(compose_config(choice, config_name), resolve=False)))


def _walk(node: Any, prefix: str = "") -> Any:
    for name, value in node.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{name}.")


@functools.cache
def _places(config_name: str, model_engine: str) -> dict[str, Place]:
    return documented(f"{config_name}.yaml", model_engine=model_engine)
