"""The default of `trainer.logger` on a machine without its packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.utils.tracker_names import TRACKERS, missing_packages, tracker_names


def fit_default_trackers(config: Any, overrides: Sequence[str] = ()) -> str | None:
    """Take trackers whose package is missing out of `trainer.logger`, unless an override chose them.

    What the user chose is left alone: the checks refuse it when it cannot work.

    Returns:
        A notice, None when nothing was changed.
    """
    from omegaconf import open_dict

    if any(text.lstrip("+~").split("=")[0].strip() == "trainer.logger" for text in overrides):
        return None
    names = tracker_names(config.trainer.logger)
    missing = [name for name in names if name in TRACKERS and missing_packages(name)]
    if not missing:
        return None
    with open_dict(config):
        config.trainer.logger = [name for name in names if name not in missing] or ["console"]
    extras = ",".join(missing)
    return f"going on without {' and '.join(missing)}, which is not installed (pip install 'rlflow[{extras}]')"
