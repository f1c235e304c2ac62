"""`rlflow config explain KEY` and `rlflow config show key=value ...`."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from typing import TYPE_CHECKING, Any

from rlflow.utils.errors import ConfigError

if TYPE_CHECKING:
    from rlflow.config.describe import KeyDescription

# Keys that a pattern shows in full; beyond, a line each.
_IN_FULL = 3


def add_parser(subparsers: Any) -> None:
    """Register the subcommand and its two verbs."""
    parser = subparsers.add_parser(
        "config",
        help="explain a key, show the resolved tree",
        description="Answers questions about the configuration without starting anything.",
        epilog="example: rlflow config explain 'actor_rollout_ref.rollout.*length'",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    explain = verbs.add_parser("explain", help="what a key means, its default, type, place and state")
    explain.add_argument("key", metavar="KEY", help="dotted path, its last part, or a pattern with * and ?")
    explain.add_argument("--json", action="store_true", help="as a JSON list on stdout")
    show = verbs.add_parser("show", help="the resolved tree of a command line as YAML, secrets hidden")
    show.add_argument("--node", metavar="NODE", default="", help="only this part, such as actor_rollout_ref.rollout")
    show.add_argument("overrides", metavar="key=value", nargs=argparse.REMAINDER, help="as for the main job")


def run(args: argparse.Namespace) -> int:
    """Print the answer."""
    text = explain_text(args.key, args.json) if args.verb == "explain" else show_text(args.overrides, args.node)
    sys.stdout.write(text.rstrip("\n") + "\n")
    return 0


def explain_text(pattern: str, as_json: bool = False) -> str:
    """The keys that a path, the end of a path or a pattern names.

    Raises:
        ConfigError: there is none; the nearest ones are named.
    """
    from rlflow.config.describe import describe

    found = [describe(key) for key in matching_keys(pattern)]
    if as_json:
        return json.dumps([dataclasses.asdict(one) for one in found], indent=2, default=str)
    if len(found) > _IN_FULL:
        width = max(len(one.key) for one in found)
        return "\n".join(f"{one.key:<{width}}  {one.description}" for one in found)
    return "\n\n".join(_in_full(one) for one in found)


def matching_keys(pattern: str) -> list[str]:
    """Keys that `pattern` names: a path, a pattern, else every key that ends in it.

    Raises:
        ConfigError: there is none; the nearest ones are named.
    """
    from rlflow.config.describe import describe, keys_of

    known = keys_of()
    if pattern in known:
        return [pattern]
    if any(sign in pattern for sign in "*?["):
        found = [key for key in known if fnmatch.fnmatchcase(key, pattern) or fnmatch.fnmatchcase(key, f"*.{pattern}")]
        if not found:
            raise ConfigError(f"no key matches {pattern!r}; a pattern such as '*.optim.lr' matches whole keys")
        return found
    found = [key for key in known if key.endswith(f".{pattern}")]
    return found or [describe(pattern).key]  # another engine's key, or an error that names the nearest ones


def _in_full(one: KeyDescription) -> str:
    lines = {
        "": one.description,
        "type": one.type,
        "default": _default(one),
        "choices": ", ".join(one.allowed),
        "set in": f"rlflow/config/{one.defined_in}" if one.defined_in else "",
        "state": one.state if one.state != "honoured" else "",
        "because": one.reason,
        "instead": one.instead,
    }
    return "\n".join(
        [one.key, *(f"    {name + ':' if name else '':<9}{text}".rstrip() for name, text in lines.items() if text)]
    )


def _default(one: KeyDescription) -> str:
    if isinstance(one.default, dict) and one.default:
        return f"a group of {len(one.default)} keys: {', '.join(one.default)}"
    if one.follows:
        return f"that of {one.follows}"
    return "must be set" if one.default == "???" else json.dumps(one.default)


def show_text(overrides: list[str], node: str = "") -> str:
    """The resolved tree as YAML.

    Raises:
        ConfigError: an override cannot be used, a value refers to nothing, or there is no such node.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlflow.config.command_line import read_command_line
    from rlflow.config.describe import describe
    from rlflow.config.old_keys import move_old_keys
    from rlflow.config.overrides import compose_what_can_be
    from rlflow.config.targets import drop_targets
    from rlflow.utils.redact import redact, remember_arguments

    remember_arguments(overrides)
    line = read_command_line(overrides)
    config, unusable = compose_what_can_be(line.overrides, line.config)
    problems = [*line.problems, *(problem.text for problem in unusable)]
    drop_targets(config, problems)
    move_old_keys(config, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        part = OmegaConf.select(config, node) if node else config
        if part is None:
            describe(node)  # raises where there is no such key; else it is null
        if not OmegaConf.is_config(part):
            return f"{node}: {redact({node: part})[node]}"
        plain = OmegaConf.to_container(part, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return OmegaConf.to_yaml(OmegaConf.create(redact(plain)))
