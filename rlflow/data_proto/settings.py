"""Whether a batch may be padded to divide over workers."""

from __future__ import annotations

import os
from typing import Any

_ENV = ("RLFLOW_AUTO_PADDING", "VERL_AUTO_PADDING")


class _Settings(type):
    """Makes `DataProtoConfig.auto_padding = True` an assignment to a setting of the process."""

    auto_padding_key = "_verl_auto_padding"
    _enabled = False

    @property
    def auto_padding(cls) -> bool:
        """Whether all batches of this process may be padded."""
        return cls._enabled or any(os.environ.get(name, "").lower() in ("1", "true") for name in _ENV)

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        cls._enabled = bool(enabled)


class DataProtoConfig(metaclass=_Settings):
    """Settings of all batches of a process.

    `DataProtoConfig.auto_padding = True`, or VERL_AUTO_PADDING=true (RLFLOW_AUTO_PADDING is the same) in the
    environment, lets every batch be padded; `meta_info[DataProtoConfig.auto_padding_key] = True` lets one.
    """


def may_be_padded(meta_info: dict[str, Any]) -> bool:
    """Whether a batch with this `meta_info` may."""
    return bool(meta_info.get(DataProtoConfig.auto_padding_key, False)) or DataProtoConfig.auto_padding
