"""Trackers: where the numbers of a run go.

`Tracking` fans out to the backends named by `trainer.logger`; each backend is one small file with a class that has
`log(data, step)`, `log_samples(samples, step)` and `finish(exit_code)`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlflow.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Sample = tuple[str, str, "float | None"]


class Backend(Protocol):
    """What a tracker can do."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Record the numbers of a step."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record validation samples (input, output, score)."""

    def finish(self, exit_code: int) -> None:
        """Close; called once."""


def _console(project: str, experiment: str, config: Any) -> Backend:
    from rlflow.observe.tracking.console import ConsoleBackend

    return ConsoleBackend(config)


def _file(project: str, experiment: str, config: Any) -> Backend:
    from rlflow.observe.tracking.file import FileBackend

    return FileBackend(project, experiment, config)


BACKENDS: dict[str, Callable[[str, str, Any], Backend]] = {"console": _console, "file": _file}


class Tracking:
    """All trackers of a run.

    Args:
        project_name, experiment_name: names the trackers show.
        default_backend: a backend name or a list of them.
        config: the resolved configuration.
    """

    supported_backend = tuple(BACKENDS)

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Any = None,
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        unknown = [name for name in names if name not in BACKENDS]
        if unknown:
            raise ConfigError(f"trainer.logger names {unknown}; trackers: {', '.join(sorted(BACKENDS))}")
        self.logger: dict[str, Backend] = {
            name: BACKENDS[name](project_name, experiment_name, config) for name in names
        }
        self._finished = False

    @classmethod
    def from_config(cls, config: Any) -> Tracking:
        """The trackers of `trainer.logger`."""
        trainer = config.trainer
        backends = trainer.logger if isinstance(trainer.logger, str) else list(trainer.logger)
        return cls(trainer.project_name, trainer.experiment_name, backends, config)

    def log(self, data: dict[str, Any], step: int, backend: Sequence[str] | None = None) -> None:
        """Send the numbers of a step to all trackers, or to those named."""
        for name, tracker in self.logger.items():
            if backend is None or name in backend:
                tracker.log(data, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Send validation samples to all trackers."""
        for tracker in self.logger.values():
            tracker.log_samples(samples, step)

    def finish(self, exit_code: int = 0) -> None:
        """Close all trackers; later calls do nothing."""
        if not self._finished:
            self._finished = True
            for tracker in self.logger.values():
                tracker.finish(exit_code)
