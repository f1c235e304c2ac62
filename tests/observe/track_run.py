"""A process that logs to trackers: `python track_run.py NAMES JSON_OPTIONS`. Notices go to stdout.

A process of its own, because trackers change the process they run in (hooks, global state, services).
"""

from __future__ import annotations

import json
import logging
import sys

import numpy as np

from rlflow.observe.tracking import Tracking, ValidationGenerationsLogger


def main() -> None:
    options = json.loads(sys.argv[2])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    config = {
        "trainer": {"default_local_dir": "run"},
        "reward": {"api_key": "canary-secret-42", "urls": ["http://me:canary-secret-42@host/"], "n": 3},
        "lr": 1e-6,
    }
    tracking = Tracking("proj", "exp", sys.argv[1].split(","), config, resumed_from=options.get("resumed_from", 0))
    for step in options["steps"]:
        numbers = {
            "training/global_step": step,
            "critic/score/mean": step / 4,
            "val-core/a b/acc/mean@2": float("nan"),
            "up": float("inf"),
            "flag": True,
            "numpy": np.float32(1.5),
            "text": "no number",
            "array": np.zeros(3),
        }
        tracking.log_samples([("1+1", "line one\nline two", 1.0), ("2+2", "# five", None)], step=step)
        tracking.log(numbers, step=step)
        numbers.clear()
    if options.get("samples"):
        ValidationGenerationsLogger("proj", "exp").log("file,console".split(","), [("a", "b", 0.5)], 9)
    tracking.finish(options.get("exit_code", 0), timeout_s=60)


if __name__ == "__main__":
    main()
