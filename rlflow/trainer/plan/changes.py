"""Keys of a configuration that differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = "(not there)"


@dataclass(frozen=True)
class Change:
    """One key.

    Fields:
        default: what it would be, in this configuration's tree of defaults.
        value: what it is.
        origin: "command line", the key that it follows, or "fitted to this machine"; "" when it is not known.
    """

    key: str
    default: Any
    value: Any
    origin: str


def find_changes(config: Any, overrides: Sequence[str] | None = None) -> list[Change]:
    """The leaves that differ, those of the command line first. Secrets are hidden.

    `overrides`: the command line; None: where a value was set is not known.
    """
    from omegaconf import OmegaConf

    from rlflow.config.command_line import read_command_line
    from rlflow.config.describe import keys_of
    from rlflow.config.origin import COMMAND_LINE, Origins
    from rlflow.config.overrides import compose_config
    from rlflow.utils.redact import redact

    def leaves(tree: Any) -> dict[str, Any]:
        plain: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
        return dict(_leaves(redact(plain)))

    engine = config.get("model_engine") or "dp"
    given = None if overrides is None else read_command_line(overrides).overrides  # old keys under their new names
    defaults, values = leaves(compose_config([f"model_engine={engine}"])), leaves(config)
    origins = None if given is None else Origins(given, keys_of(model_engine=engine))
    found = []
    for key, value in values.items():
        default = defaults.get(key, _ABSENT)
        if value != default:
            origin = origins.of(key) if origins else ""
            origin = "fitted to this machine" if origin.startswith("default") else origin
            found.append(Change(key, "must be set" if default == "???" else default, value, origin))
    return sorted(found, key=lambda change: (change.origin != COMMAND_LINE, change.key))


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
