"""SwanLab. Without a key it records offline (`swanlab sync` sends it later).

$SWANLAB_API_KEY, $SWANLAB_LOG_DIR (swanlog) and $SWANLAB_MODE (cloud) are read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import finite

# Names of the mode in earlier versions of the package.
OLD_MODES = {"cloud": "online", "cloud-only": "online"}


class SwanlabBackend:
    """One SwanLab run."""

    def __init__(self, info: RunInfo) -> None:
        import swanlab

        self._swanlab = swanlab
        mode = os.environ.get("SWANLAB_MODE") or "cloud"
        mode = OLD_MODES.get(mode, mode)
        if mode == "online" and not (os.environ.get("SWANLAB_API_KEY") or swanlab.Settings().api_key):
            mode = "offline"
        log_dir = os.environ.get("SWANLAB_LOG_DIR") or "swanlog"
        run_id = info.remembered("swanlab") if mode == "online" else None
        self.run = swanlab.init(
            project=info.project,
            name=info.experiment,
            config={"FRAMEWORK": "rlflow", **info.config},
            log_dir=log_dir,
            mode=mode,
            id=run_id,
            resume="allow" if run_id else None,
        )
        if mode == "online":
            info.remember("swanlab", str(self.run.id))
        if mode == "offline":
            where = os.path.abspath(log_dir)
            notice(f"swanlab records offline in {where} (no key, or SWANLAB_MODE); to send it: swanlab sync")

    def log(self, data: dict[str, Any], step: int) -> None:
        """Finite numbers; it has no place for others."""
        values = finite(data)
        if values:
            self.run.log(values, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A table a step under `val/generations`."""
        table = self._swanlab.echarts.Table()
        rows = [[step, prompt, output, "invalid" if score is None else score] for prompt, output, score in samples]
        table.add(["step", "input", "output", "score"], rows)
        self.run.log({"val/generations": self._swanlab.ECharts(table)}, step=step)

    def finish(self, exit_code: int) -> None:
        """Close; a failed run is marked as crashed."""
        if exit_code:
            self.run.finish(state="crashed", error=f"exit code {exit_code}")
        else:
            self.run.finish()
