"""Sentences for a value that the type of its key does not take."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "options by name",
    type(None): "null",
}


def wrong_type(prefix: str, key: str, given: Any, kind: type) -> str | None:
    """What was set, what the key takes, and what to try.

    Args:
        prefix: path of the node that `kind` describes, "" when it is not known.
        key: dotted path below it, perhaps with the place in a list ("weights[0]"); "": it is looked for.
        given: the node as plain containers.
        kind: its dataclass.

    Returns:
        None when `kind` has no such key.
    """
    key = key or _misplaced(given, kind)
    names = key.partition("[")[0].split(".")
    hint, default, value = typing.cast(Any, kind), typing.cast(Any, kind()), given
    for name in names:
        node = _node(hint)
        hints = typing.get_type_hints(node) if node is not None else {}
        if name not in hints:
            return None
        hint, default = hints[name], getattr(default, name, None)
        value = value.get(name) if isinstance(value, Mapping) else None
    path = ".".join([*([prefix] if prefix else []), *names])
    return f"{path}={_text(value)} must be {type_words(hint)}.\n    try:    {_advice(path, value, hint, default)}"


def _misplaced(given: Any, kind: Any) -> str:
    """Path of the first value where a group of options belongs, or group where a list does; "" when there is none."""
    hints = typing.get_type_hints(kind) if isinstance(given, Mapping) else {}
    for name, value in given.items() if hints else ():
        hint = hints.get(name)
        node = _node(hint)
        if node is not None and isinstance(value, Mapping):
            below = _misplaced(value, node)
            if below:
                return f"{name}.{below}"
        elif (node is not None and value is not None) or (_is_list(hint) and isinstance(value, Mapping)):
            return name
    return ""


def _node(hint: Any) -> Any:
    """The dataclass among the alternatives of a type, if there is one."""
    return next((one for one in _alternatives(hint) if dataclasses.is_dataclass(one)), None)


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(one) is list for one in _alternatives(hint))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_words(hint: Any) -> str:
    """The values that a type takes, in words."""
    parts = []
    for one in _alternatives(hint):
        if typing.get_origin(one) is list:
            parts.append(f"a list, each of it {type_words(typing.get_args(one)[0])}")
        elif dataclasses.is_dataclass(one):
            parts.append(f"a group of options ({', '.join(field.name for field in dataclasses.fields(one))})")
        else:
            parts.append(_WORDS.get(typing.get_origin(one) or one, str(one)))
    return " or ".join(parts)


def _advice(path: str, value: Any, hint: Any, default: Any) -> str:
    node = _node(hint)
    if node is not None:
        return f"{path}.{dataclasses.fields(node)[0].name}=..., one option at a time"
    if _is_list(hint) and isinstance(value, (str, int, float)):
        return f"{path}=[{_text(value)}]"
    return f"{path}={_text(default)}"


def _text(value: Any) -> str:
    """As it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_text(one)}' for name, one in value.items())}}}"
    return str(value)
