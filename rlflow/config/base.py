"""The base of all typed configs and the way from a Hydra node to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from rlflow.config.wrong_type import wrong_type
from rlflow.utils.errors import ConfigError

T = TypeVar("T")
_SCHEMAS: dict[type, Any] = {}


class MissingConfigKeyError(AttributeError, KeyError):
    """A key that a config does not have; both kinds of error, so that attribute and mapping users can catch it."""


@dataclasses.dataclass
class BaseConfig(Mapping):
    """A frozen dataclass that also reads like a mapping.

    Invariant: a field keeps its value after construction unless its name is in `_mutable_fields` (values that the
    trainer derives at run time). `get`, `[]`, `in`, iteration and `**config` work as for a dict of fields.
    """

    _mutable_fields: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise dataclasses.FrozenInstanceError(f"{type(self).__name__}.{name} is frozen after construction")
        super().__setattr__(name, value)

    def get(self, key: str, default: Any = None) -> Any:
        """The field `key`, or `default` when there is none."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise MissingConfigKeyError(f"{type(self).__name__} has no key {key!r}; it has {', '.join(self)}")
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return any(field.name == key for field in dataclasses.fields(self))

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in dataclasses.fields(self))

    def __len__(self) -> int:
        return len(dataclasses.fields(self))


def _schema(dataclass_type: type) -> Any:
    """The types and defaults of a dataclass; made once, since a large one takes a tenth of a second. Never changed."""
    from omegaconf import OmegaConf

    if dataclass_type not in _SCHEMAS:
        _SCHEMAS[dataclass_type] = OmegaConf.structured(dataclass_type)
    return _SCHEMAS[dataclass_type]


def omega_conf_to_dataclass(config: Any, dataclass_type: type[T]) -> T:
    """The typed form of a config node.

    Args:
        config: a `DictConfig` or dict; an instance of `dataclass_type` is returned as it is, None gives the defaults.
        dataclass_type: the target dataclass; nested dataclass fields are built too.

    Raises:
        ConfigError: a key that the dataclass does not know, or a value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(config, dataclass_type):
        return config
    plain = config
    try:
        plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
        merged = OmegaConf.merge(_schema(dataclass_type), plain or {})
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        prefix = config._get_full_key(None) if OmegaConf.is_config(config) else ""
        text = wrong_type(prefix, str(error.full_key or ""), plain, dataclass_type)
        raise ConfigError(text or f"{dataclass_type.__name__}: {str(error).splitlines()[0]}") from error
