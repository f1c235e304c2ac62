"""Where the value of a key comes from: the command line, a file of the package, or another key that it follows."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

COMMAND_LINE = "command line"
_TRY = "\n    try:"
_SET_IN = "\n    set in: "
_DOTTED = re.compile(r"(?<![\w./$@{])[a-z_]\w*(?:\.\w+)+(?![\w/])")
# A problem names the keys that matter first.
_NAMED = 3
_CHAIN = 4


class Origins:
    """Origins of the keys of one composed configuration.

    Args:
        overrides: the command line it was composed with.
        tree: every key and node of the defaults -> its default, interpolations unresolved.
        config_name: the file of the tree, for the places of its defaults.
    """

    def __init__(self, overrides: Sequence[str], tree: dict[str, Any], config_name: str = "ppo_trainer") -> None:
        self._given = {text.lstrip("+~").partition("=")[0].strip() for text in overrides}
        self._tree, self._config_name = tree, config_name

    def of(self, key: str, depth: int = _CHAIN) -> str:
        """Where a value was set: command line, default (file:line), or the key that it follows and where that was."""
        names = key.split(".")
        if any(".".join(names[:count]) in self._given for count in range(1, len(names) + 1)):
            return COMMAND_LINE
        if any(given.startswith(f"{key}.") for given in self._given):
            return f"{COMMAND_LINE}, in part"
        from rlflow.config.describe import followed

        other = followed(key, self._tree.get(key))
        if other and depth:
            return f"follows {other} ({self.of(other, depth - 1)})"
        place = _places(self._config_name).get(key)
        return f"default (rlflow/config/{place})" if place else "default"

    def located(self, problem: str) -> str:
        """The problem with a line that says where the keys it names were set; unchanged when it names none."""
        what, found, advice = problem.partition(_TRY)
        keys = self._keys_in(what)
        if not keys or _SET_IN in problem:
            return problem
        origins = {key: self.of(key) for key in keys}
        one = len(keys) == 1 or len(set(origins.values())) == 1
        where = origins[keys[0]] if one else "; ".join(f"{key}: {origin}" for key, origin in origins.items())
        return f"{what}{_SET_IN}{where}{found}{advice}"

    def _keys_in(self, text: str) -> list[str]:
        """Keys of the tree that a text names, in full or by an ending that only one key has."""
        keys = [self._full(match) for match in _DOTTED.findall(text)]
        found = list(dict.fromkeys(key for key in keys if key))
        # A sentence about a key may begin with its node.
        return [key for key in found if not any(other.startswith(f"{key}.") for other in found)][:_NAMED]

    def _full(self, name: str) -> str | None:
        if name in self._tree:
            return name
        ends = [key for key in self._tree if key.endswith(f".{name}")]
        return ends[0] if len(ends) == 1 else None


@functools.cache
def _places(config_name: str) -> dict[str, str]:
    from rlflow.config.yaml_text import documented

    return {key: place.where for key, place in documented(f"{config_name}.yaml").items()}
