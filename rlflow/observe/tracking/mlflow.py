"""MLflow: $MLFLOW_TRACKING_URI, by default the file sqlite:////tmp/mlruns.db; the project is its experiment.

$MLFLOW_RUN_ID attaches to a run that exists. Calls are tried three times.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import flatten, numbers

DEFAULT_URI = "sqlite:////tmp/mlruns.db"  # noqa: S108 - the place that users of this interface know
ATTEMPTS = 3
PAUSE_S = 1.0
# Limits of one call of its REST interface.
PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000
PARAM_CHARS = 6000


class MlflowBackend:
    """One MLflow run."""

    def __init__(self, info: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self._error = MlflowException
        uri = os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI
        self.client = MlflowClient(uri)
        run_id = os.environ.get("MLFLOW_RUN_ID") or info.remembered("mlflow")
        if run_id is None:
            run_id = self._try(self._create, info.project, info.experiment)
        else:
            self._try(self.client.update_run, run_id, "RUNNING")
        self.run_id: str = run_id
        info.remember("mlflow", run_id)
        self._log_params(info.config)
        notice(f"mlflow: run {run_id} in {uri}")

    def _create(self, project: str, experiment: str) -> str:
        found = self.client.get_experiment_by_name(project)
        experiment_id = self.client.create_experiment(project) if found is None else found.experiment_id
        return str(self.client.create_run(experiment_id, run_name=experiment).info.run_id)

    def _log_params(self, config: dict[str, Any]) -> None:
        from mlflow.entities import Param

        # A parameter cannot change; those of the interrupted run stay as they are.
        known = self.client.get_run(self.run_id).data.params
        params = {clean_key(key): str(value)[:PARAM_CHARS] for key, value in flatten(config)}
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for part in _parts(new, PARAMS_PER_CALL):
            self._try(self.client.log_batch, self.run_id, params=part)

    def log(self, data: dict[str, Any], step: int) -> None:
        """All numbers of a step in one call."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(clean_key(name), value, now, step) for name, value in numbers(data).items()]
        for part in _parts(metrics, METRICS_PER_CALL):
            self._try(self.client.log_batch, self.run_id, metrics=part)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """An artifact `val_step{n}.json`."""
        rows = [{"input": prompt, "output": output, "score": score} for prompt, output, score in samples]
        self._try(self.client.log_dict, self.run_id, rows, f"val_step{step}.json")

    def finish(self, exit_code: int) -> None:
        """Mark the run as finished or failed."""
        self._try(self.client.set_terminated, self.run_id, "FAILED" if exit_code else "FINISHED")

    def _try(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call(*args, **kwargs)
            except (self._error, OSError):
                if attempt == ATTEMPTS:
                    raise
                time.sleep(PAUSE_S * attempt)
        return None


def clean_key(name: str) -> str:
    """A name MLflow takes: `@` becomes `_at_`, repeated slashes one, other characters it refuses `_`."""
    name = re.sub(r"/+", "/", name.replace("@", "_at_")).strip("/")
    return re.sub(r"[^\w\-. /:]", "_", name)


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
