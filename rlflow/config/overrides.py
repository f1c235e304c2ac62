"""Command-line overrides that name no key, with what was probably meant.

Hydra stops at the first unknown key and says only that it is not there. Here all of them are reported at once, each
with the nearest existing keys, before anything else starts.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from rlflow.config.tree import closed_node
from rlflow.utils.errors import ConfigError

CONFIG_MODULE = "rlflow.config"
CONFIG_NAME = "ppo_trainer"


def compose_config(overrides: Sequence[str] = (), config_name: str = CONFIG_NAME) -> Any:
    """The composed `DictConfig` (interpolations unresolved), as the command line would give it.

    Raises ConfigError for overrides that name no key or do not parse.
    """
    from hydra.errors import HydraException

    overrides = check_overrides(overrides, config_name)
    try:
        return _compose(config_name, overrides)
    except HydraException as error:
        raise ConfigError(f"the overrides cannot be composed: {error}") from error


@functools.cache
def _defaults(config_name: str, groups: tuple[str, ...]) -> Any:
    """The tree that the package's files make, to look at; composing it again would take as long as the user's."""
    return _compose(config_name, groups)


def _compose(config_name: str, overrides: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base=None):
        return compose(config_name, overrides=list(overrides))


def check_overrides(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> list[str]:
    """The overrides for Hydra; ConfigError listing every one that cannot work.

    `key=value` must name an existing key. `+key=value` adds one where anything may be put, see `rlflow.config.tree`;
    where the key exists it sets it, since commands written for the reference add keys that are options here.
    `~key` is refused: an option that is taken away would only get its default back.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    problems = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            problems.append(
                f"{text!r} is not an override: {str(error).splitlines()[0]}\n    try:    key=value without spaces"
            )
    # Group choices decide which keys exist, so they are applied before the others are judged.
    groups = [p.input_line for p in parsed if p.input_line and _is_group(p.get_key_element()) and not p.is_delete()]
    try:
        config = _defaults(config_name, tuple(groups))
    except HydraException as error:
        raise ConfigError(
            f"{' '.join(groups)}: {str(error).splitlines()[0]}\n    try:    model_engine=dp, the engine of this version"
        ) from error
    known = set(_flatten(config))
    accepted = []
    for override in parsed:
        key = override.get_key_element().lstrip("~+")
        accepted.append(f"+{override.input_line}" if override.is_add() and key in known else str(override.input_line))
        if (_is_group(key) and not override.is_delete()) or key.startswith("hydra."):
            continue
        if key not in known and (closed_node(key) or not (override.is_add() or override.is_force_add())):
            problems.append(unknown_key(key, known))
        elif override.is_delete():
            problems.append(_cannot_remove(key, config))
        elif _is_misread_range(key, override):
            problems.append(_misread_range(key, override))
    if problems:
        raise ConfigError("\n".join(problems))
    return accepted


def _is_group(key: str) -> bool:
    return key.lstrip("~+").split("@")[0] in {"model_engine"}


def _flatten(node: Any, prefix: str = "") -> Iterator[str]:
    from omegaconf import OmegaConf

    for name in node:
        path = f"{prefix}{name}"
        yield path
        child = node._get_node(name)
        if OmegaConf.is_dict(child) and not child._is_interpolation() and not child._is_none():
            yield from _flatten(child, f"{path}.")


def _is_misread_range(key: str, override: Any) -> bool:
    """Whether a range such as 1_2 was read as a number (12): an underscore may separate digits there."""
    is_bound = key.endswith(("rollout_is_threshold", "rollout_rs_threshold"))
    return is_bound and isinstance(override.value(), (int, float)) and "_" in _value_text(override)


def _value_text(override: Any) -> str:
    return str(override.input_line).partition("=")[2].strip()


def _misread_range(key: str, override: Any) -> str:
    text = _value_text(override)
    meant = "_".join(str(float(part)) for part in text.split("_"))
    return (
        f"{key}={text} is read as the number {override.value()}, not as a range.\n    set in: command line\n"
        f"    try:    {key}={meant}"
    )


def _cannot_remove(key: str, config: Any) -> str:
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, key, throw_on_missing=False)
    default = "" if OmegaConf.is_config(node) or node is None else f" ({node})"
    return (
        f"~{key} cannot take the option away: what reads it would go on with its default{default}.\n"
        f"    set in: command line\n    try:    {key}=... with the value it should have (null where it may be empty), "
        "or leave it out"
    )


def unknown_key(key: str, known: set[str]) -> str:
    """The sentence for a key that is not among `known`, with what was probably meant."""
    last = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == last]
    close = sorted(same_leaf, key=lambda k: -difflib.SequenceMatcher(None, k, key).ratio())[:3]
    if not close:
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not close:
        leaves = {k.rsplit(".", 1)[-1]: k for k in sorted(known)}
        close = [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=3, cutoff=0.6)]
    meant = (
        f"did you mean {' or '.join(close)}?" if close else "see rlflow/config/ppo_trainer.yaml for the keys there are"
    )
    closed = closed_node(key)
    adding = f"{closed} takes no other keys" if closed else f"to add a key on purpose write +{key}=..."
    return f"{key} is not a key of the configuration.\n    set in: command line\n    try:    {meant} ({adding})"
