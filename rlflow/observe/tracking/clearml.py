"""ClearML. Without credentials it records offline (a zip that `Task.import_offline_session` sends later)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import finite


class ClearmlBackend:
    """One ClearML task."""

    def __init__(self, info: RunInfo) -> None:
        import clearml

        Task: Any = clearml.Task
        offline = not has_credentials()
        if offline:
            Task.set_offline(True)
        # It would fork a reporter; forking a process that has threads and a gRPC connection may hang.
        Task._report_subprocess_enabled = False
        self.task = Task.init(
            project_name=info.project,
            task_name=info.experiment,
            reuse_last_task_id=False,
            continue_last_task=False if offline else (info.remembered("clearml") or False),
            output_uri=False,
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        # Steps of a continued task are ours; it would count on from its own last one.
        self.task.set_initial_iteration(0)
        self.task.connect_configuration(info.config, name="config")
        if offline:
            notice(f"clearml records offline in {self.task.get_offline_mode_folder()} (no credentials)")
        else:
            info.remember("clearml", self.task.id)

    def log(self, data: dict[str, Any], step: int) -> None:
        """`a/b/c` is the series `b/c` of the plot `a`; DataFrames are tables; NaN and infinity are left out."""
        logger = self.task.get_logger()
        for name, value in finite(data).items():
            title, series = split_key(name)
            logger.report_scalar(title, series, value, iteration=step)
        for name, value in data.items():
            if type(value).__name__ == "DataFrame":
                title, series = split_key(name)
                logger.report_table(title, series, iteration=step, table_plot=value)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A table a step."""
        rows = [[step, prompt, output, "invalid" if score is None else score] for prompt, output, score in samples]
        self.task.get_logger().report_table(
            "val", "generations", iteration=step, table_plot=[["step", "input", "output", "score"], *rows]
        )

    def finish(self, exit_code: int) -> None:
        """Send what is left; a failed run is marked as failed."""
        if exit_code:
            self.task.mark_failed(status_message=f"exit code {exit_code}", force=True)
        self.task.close()


def split_key(name: str) -> tuple[str, str]:
    """(title, series) of a metric's name, cut at the first slash."""
    title, slash, series = name.partition("/")
    return (title, series) if slash else (name, name)


def has_credentials() -> bool:
    """Whether ClearML knows a server: its variables, or the file that `clearml-init` writes."""
    named = os.environ.get("CLEARML_CONFIG_FILE")
    file = Path(named or "~/clearml.conf").expanduser()
    return bool(os.environ.get("CLEARML_API_ACCESS_KEY")) or file.is_file()
