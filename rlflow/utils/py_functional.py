"""Small helpers on plain Python values."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def importing(module: str) -> Iterator[None]:
    """Around the import of a large module: no garbage is looked for meanwhile, nor ever again among what it made.

    Of the processor time of importing torch and transformers a sixth goes into collections that find nothing. Where
    the module is there already nothing changes: what else lives by then must stay collectable.
    """
    if module in sys.modules:
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class _DynamicEnumMeta(type):
    _members: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, item: object) -> bool:
        if isinstance(item, str):
            return item.upper() in cls._members
        return any(item is member for member in cls._members.values())

    def __getitem__(cls, name: str) -> Any:
        try:
            return cls._members[name.upper()]
        except KeyError:
            raise KeyError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._members)}") from None

    def __getattr__(cls, name: str) -> Any:
        members = cls.__dict__.get("_members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"{cls.__name__} has no member {name!r}; it has {', '.join(members)}")


class DynamicEnum(metaclass=_DynamicEnumMeta):
    """An enumeration that can grow at run time: `class Colour(DynamicEnum): ...; Colour.register("RED")`.

    Members compare by identity; `pickle` names the member, so it arrives as the receiving process's own. A process that
    never registered the name refuses it with `KeyError`.
    """

    _members: dict[str, Any] = {}
    name: str
    value: int

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._members = {}

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member (upper-cased) and return it; `ValueError` if the name is taken."""
        key = name.upper()
        if key in cls._members:
            raise ValueError(f"{cls.__name__}.{key} exists already; members cannot be replaced")
        member = cls.__new__(cls)
        member.name, member.value = key, len(cls._members)
        cls._members[key] = member
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Drop a member and return it; `KeyError` if there is none of that name."""
        member = cls[name]  # type: ignore[misc]
        del cls._members[member.name]
        return member

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (_member, (type(self), self.name))

    def __copy__(self) -> DynamicEnum:
        return self

    def __deepcopy__(self, memo: Any) -> DynamicEnum:
        return self


def _member(cls: type[DynamicEnum], name: str) -> DynamicEnum:
    return cls[name]  # type: ignore[misc]


def append_to_dict(data: dict[str, Any], new_data: dict[str, Any], prefix: str = "") -> None:
    """Append each value of `new_data` under its key (with `prefix`, unless it starts with it), in place.

    A `Metric` (anything with `init_list`) is appended to a metric of its kind, other values to a list.
    """
    for key, value in rename_dict(new_data, prefix).items():
        if key not in data:
            data[key] = value.init_list() if hasattr(value, "init_list") else []
        data[key].append(value)


def rename_dict(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A copy whose keys carry `prefix`; a key that starts with it already stays as it is."""
    return {key if key.startswith(prefix) else prefix + key: value for key, value in data.items()}


def union_two_dict(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Add the entries of `second` to `first`, in place, and return it; `ValueError` where one key has two values."""
    for key, value in second.items():
        if key in first and first[key] is not value and first[key] != value:
            raise ValueError(f"{key!r} has the values {first[key]!r} and {value!r}; a union needs them equal")
        first[key] = value
    return first
