"""Command-line overrides that name no key, with what was probably meant.

Hydra stops at the first unknown key and says only that it is not there. Here all of them are reported at once, each
with the nearest existing keys, before anything else starts.
"""

from __future__ import annotations

import copy
import difflib
import functools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.config.misread import misread, unreadable
from rlflow.config.tree import TYPED_NODES, closed_node
from rlflow.config.yaml_text import FOLDER
from rlflow.utils.errors import ConfigError

CONFIG_MODULE = "rlflow.config"
CONFIG_NAME = "ppo_trainer"


def compose_config(overrides: Sequence[str] = (), config_name: str = CONFIG_NAME) -> Any:
    """The composed `DictConfig` (interpolations unresolved), as the command line would give it.

    Raises ConfigError for overrides that name no key or do not parse.
    """
    config, problems = compose_what_can_be(overrides, config_name)
    if problems:
        raise ConfigError("\n".join(problem.text for problem in problems))
    return config


def compose_what_can_be(
    overrides: Sequence[str] = (), config_name: str = CONFIG_NAME
) -> tuple[Any, list[OverrideProblem]]:
    """The configuration of the overrides that can be used, and what is wrong with the others.

    Raises ConfigError where nothing can be composed: an unknown model engine, a choice of files that are not there.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    parsed, groups, problems = _judged(overrides, config_name)
    # Putting values into a copy is what Hydra does after reading all files, which takes most of its time.
    config = copy.deepcopy(_defaults(config_name, groups))
    for override in parsed:
        key = override.get_key_element().lstrip("+")
        added = key not in _known(config_name, groups)
        try:
            OmegaConf.update(config, key, override.value(), merge=True, force_add=added)
        except OmegaConfBaseException as error:
            problems.append(OverrideProblem(_cannot_set(override, str(error).splitlines()[0]), (key,)))
    return config, problems


@functools.cache
def _defaults(config_name: str, groups: tuple[str, ...]) -> Any:
    """The tree that the package's files make; it is never changed."""
    return _compose(config_name, groups)


@functools.cache
def _known(config_name: str, groups: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_flatten(_defaults(config_name, groups)))


def _compose(config_name: str, overrides: Sequence[str]) -> Any:
    from hydra import compose, initialize_config_dir, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    if config_name.endswith(".yaml"):  # a file of the user's, which finds ours by their names
        file = Path(config_name)
        with initialize_config_dir(str(file.parent), version_base=None):
            return compose(file.stem, overrides=[f"hydra.searchpath=[pkg://{CONFIG_MODULE}]", *overrides])
    with initialize_config_module(CONFIG_MODULE, version_base=None):
        return compose(config_name, overrides=list(overrides))


@dataclass(frozen=True)
class OverrideProblem:
    """An override that cannot be used.

    `text` says why and what to try; `keys` are the key it was written for and the one that was probably meant.
    """

    text: str
    keys: tuple[str, ...] = ()


def check_overrides(overrides: Sequence[str], config_name: str = CONFIG_NAME) -> None:
    """ConfigError listing every override that cannot work.

    `key=value` must name an existing key. `+key=value` adds one where anything may be put, see `rlflow.config.tree`;
    where the key exists it sets it, since commands written for the reference add keys that are options here.
    `~key` is refused: an option that is taken away would only get its default back.
    """
    _, _, problems = _judged(overrides, config_name)
    if problems:
        raise ConfigError("\n".join(problem.text for problem in problems))


def _judged(overrides: Sequence[str], config_name: str) -> tuple[list[Any], tuple[str, ...], list[OverrideProblem]]:
    """The overrides of values that can be used (Hydra's objects), the choices of groups, and what cannot be used."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Any] = []
    problems: list[OverrideProblem] = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            problems.append(OverrideProblem(unreadable(text, str(error).splitlines()[0]), (text.partition("=")[0],)))
    # Group choices decide which keys exist, so they are applied before the others are judged.
    choices = [one for one in parsed if _is_choice(one) and not one.is_delete()]
    groups = tuple(str(one.input_line) for one in choices)
    try:
        config, known = _defaults(config_name, groups), _known(config_name, groups)
    except HydraException as error:
        what, where = (" ".join(groups), "command line") if groups else (config_name, config_name)
        raise ConfigError(
            f"{what}: {str(error).splitlines()[0]}\n    set in: {where}\n    try:    {_other_choice(groups)}"
        ) from error
    usable = []
    for override in parsed:
        key = override.get_key_element().lstrip("~+")
        if override in choices or key.startswith("hydra."):
            continue  # the options of Hydra itself concern its launcher, which does not run here
        problem = _problem_of(key, override, known, config)
        if problem:
            problems.append(problem)
        else:
            usable.append(override)
    return usable, groups, problems


def _problem_of(key: str, override: Any, known: Set[str], config: Any) -> OverrideProblem | None:
    if key.endswith("._target_"):
        return None  # looked at with those of files
    if key not in known and (closed_node(key) or not (override.is_add() or override.is_force_add())):
        return OverrideProblem(unknown_key(key, known), (key, *probably_meant(key, known)[:1]))
    if override.is_delete():
        return OverrideProblem(_cannot_remove(key, config), (key,))
    if key in TYPED_NODES and not isinstance(override.value(), dict):
        text: str | None = _cannot_set(override, f"{key} is a group of options")
    else:
        text = misread(key, override)
    return OverrideProblem(text, (key,)) if text else None


def _is_choice(override: Any) -> bool:
    """A choice of a file: `model_engine=dp`, `group@node=file`, or `group=file` where the node has the group's name."""
    key, value = override.get_key_element().lstrip("~+"), override.value()
    return (
        "@" in key or key == "model_engine" or (isinstance(value, str) and (FOLDER / key / f"{value}.yaml").is_file())
    )


def _other_choice(groups: Sequence[str]) -> str:
    """What to choose where a choice of groups cannot be composed."""
    for choice in groups:
        group, _, name = choice.lstrip("+").partition("=")
        files = sorted(path.stem for path in (FOLDER / group.partition("@")[0]).glob("*.yaml"))
        if files and name not in files:
            return "model_engine=dp" if group == "model_engine" else f"{group}= one of {', '.join(files)}"
    return "model_engine=dp, and groups and keys that the package's files have (rlflow/config)"


def _flatten(node: Any, prefix: str = "") -> Iterator[str]:
    from omegaconf import OmegaConf

    for name in node:
        path = f"{prefix}{name}"
        yield path
        child = node._get_node(name)
        if OmegaConf.is_dict(child) and not child._is_interpolation() and not child._is_none():
            yield from _flatten(child, f"{path}.")


def _cannot_set(override: Any, why: str) -> str:
    text = str(override.input_line)
    return f"{text} cannot be set: {why}\n    set in: command line\n    try:    one option at a time, KEY.OPTION=value"


def _cannot_remove(key: str, config: Any) -> str:
    from omegaconf import OmegaConf

    node = OmegaConf.select(config, key, throw_on_missing=False)
    if OmegaConf.is_dict(node):
        return (
            f"~{key} cannot take the option away: what reads it would go on with the defaults of its group.\n"
            f"    set in: command line\n    try:    the command without ~{key}"
        )
    default = "" if OmegaConf.is_config(node) or node is None else f" ({node})"
    return (
        f"~{key} cannot take the option away: what reads it would go on with its default{default}.\n"
        f"    set in: command line\n    try:    {key}=... with the value it should have (null where it may be empty), "
        "or leave it out"
    )


def unknown_key(key: str, known: Set[str]) -> str:
    """The sentence for a key that is not among `known`, with what was probably meant."""
    close = probably_meant(key, known)
    meant = (
        f"did you mean {' or '.join(close)}?" if close else "see rlflow/config/ppo_trainer.yaml for the keys there are"
    )
    closed = closed_node(key)
    adding = f"{closed} takes no other keys" if closed else f"to add a key on purpose write +{key}=..."
    return f"{key} is not a key of the configuration.\n    set in: command line\n    try:    {meant} ({adding})"


def probably_meant(key: str, known: Set[str]) -> list[str]:
    """Up to three keys, the likeliest first: the same name elsewhere in the tree, else one that is written alike."""
    last = key.rsplit(".", 1)[-1]
    same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == last]
    close = sorted(
        sorted(same_leaf), key=lambda k: (not k.endswith(f".{key}"), -difflib.SequenceMatcher(None, k, key).ratio())
    )[:3]
    if not close:
        close = difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6)
    if not close:
        leaves = {k.rsplit(".", 1)[-1]: k for k in sorted(known)}
        close = [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=3, cutoff=0.6)]
    return close
