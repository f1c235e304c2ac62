"""Trackers: where the numbers of a run go.

    trainer.logger=[console, wandb]
        -> Tracking.log(numbers, step) -> Guard -> console
                                       -> Background (a thread) -> wandb

`Tracking` fans out to the trackers named by `trainer.logger`. Each is one small file with a class that has
`log(data, step)`, `log_samples(samples, step)` and `finish(exit_code)`; its package is imported when it is used.

Invariant: a tracker never stops, delays or fails training. What it loses is said, and the run folder's metrics.jsonl
has all numbers in any case.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlflow.observe.tracking.backend import Backend, RunInfo, Sample
from rlflow.observe.tracking.guard import Background, Guard
from rlflow.utils.errors import ConfigError
from rlflow.utils.metric import as_number
from rlflow.utils.tracker_names import TRACKERS, tracker_names, tracker_problem

__all__ = ["Backend", "RunInfo", "Sample", "Tracking", "ValidationGenerationsLogger"]

logger = logging.getLogger(__name__)

# They only write to this machine, at once.
AT_ONCE = ("console", "file")
FINISH_S = 60.0
# A run that fails or is interrupted has seconds left, not a minute.
FINISH_FAILED_S = 5.0

_live: weakref.WeakSet[Tracking] = weakref.WeakSet()


class Tracking:
    """All trackers of a run.

    Args:
        project_name, experiment_name: names the trackers show.
        default_backend: a tracker's name or a list of them.
        config: the resolved configuration; trackers that keep it get it without secrets.
        resumed_from: step of the checkpoint the run goes on from; trackers that can continue their earlier run do.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
    """

    supported_backend = tuple(TRACKERS)

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Any = None,
        *,
        resumed_from: int = 0,
    ) -> None:
        self._finished = True  # nothing to finish yet, should this raise
        names = tracker_names(default_backend)
        problems = [problem for problem in map(tracker_problem, names) if problem]
        if problems:
            raise ConfigError("\n".join(problems))
        info = RunInfo.of(project_name, experiment_name, config, resumed_from)
        self.logger: dict[str, Guard] = {
            name: (Guard if name in AT_ONCE else Background)(name, partial(_make, name, info)) for name in names
        }
        self._strangers: set[str] = set()
        self._finished = False
        _live.add(self)

    @classmethod
    def from_config(cls, config: Any, *, resumed_from: int = 0) -> Tracking:
        """The trackers of `trainer.logger`."""
        trainer = config.trainer
        return cls(trainer.project_name, trainer.experiment_name, trainer.logger, config, resumed_from=resumed_from)

    def log(self, data: dict[str, Any], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Send the numbers of a step to all trackers, or to those named. What is no number goes only to trackers whose
        own type it is.
        """
        data = dict(data)  # the caller may go on filling it
        self._name_strangers(data)
        chosen = None if backend is None else tracker_names(backend)
        for name, tracker in self.logger.items():
            if chosen is None or name in chosen:
                tracker.log(data, step)

    def log_samples(self, samples: Sequence[Sample], step: int, backend: str | Sequence[str] | None = None) -> None:
        """Send validation samples (input, output, score or None) to all trackers, or to those named."""
        samples = [(str(prompt), str(output), as_number(score)) for prompt, output, score in samples]
        chosen = None if backend is None else tracker_names(backend)
        for name, tracker in self.logger.items():
            if chosen is None or name in chosen:
                tracker.log_samples(samples, step)

    def finish(self, exit_code: int = 0, timeout_s: float | None = None) -> None:
        """Close all trackers; later calls do nothing.

        Args:
            exit_code: 0 = the run is done; others mark it as failed.
            timeout_s: for all of them together; 60 s, or 5 s for a failed run.
        """
        if self._finished:
            return
        self._finished = True
        if timeout_s is None:
            timeout_s = FINISH_FAILED_S if exit_code else FINISH_S
        deadline = time.monotonic() + timeout_s
        for tracker in self.logger.values():
            if tracker.name != "console":
                tracker.request_finish(exit_code)
        for tracker in self.logger.values():
            if tracker.name != "console":
                tracker.wait_finished(deadline)
        if "console" in self.logger:  # last: the others may still have something to say
            self.logger["console"].request_finish(exit_code)

    def __del__(self) -> None:
        # While the interpreter ends, threads no longer run and waiting for them would be in vain.
        if not self._finished and not sys.is_finalizing():
            self.finish()

    def _name_strangers(self, data: dict[str, Any]) -> None:
        strange = {name for name, value in data.items() if as_number(value) is None} - self._strangers
        if strange:
            self._strangers |= strange
            logger.warning("no numbers, so most trackers leave them out: %s", ", ".join(sorted(strange)))


class ValidationGenerationsLogger:
    """Sends validation samples to trackers by name, beside a `Tracking`.

    Args:
        project_name, experiment_name: of the run, should a tracker have to be opened for it.
    """

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self.project_name = project_name or "rlflow"
        self.experiment_name = experiment_name or "run"
        self._own: list[Tracking] = []

    def log(self, loggers: str | Sequence[str], samples: Sequence[Sample], step: int) -> None:
        """Samples (input, output, score) to the trackers of that name which are open in this process; one that is not
        open is opened.
        """
        for name in tracker_names(loggers):
            tracking = next((t for t in list(_live) if name in t.logger and not t._finished), None)
            if tracking is None:
                tracking = Tracking(self.project_name, self.experiment_name, name)
                self._own.append(tracking)
            tracking.log_samples(samples, step, backend=name)


def _make(name: str, info: RunInfo) -> Backend:
    module = importlib.import_module(f"rlflow.observe.tracking.{name}")
    backend: Backend = getattr(module, f"{name.capitalize()}Backend")(info)
    return backend
