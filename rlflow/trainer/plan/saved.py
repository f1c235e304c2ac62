"""The plan of a run in its folder: plan.txt to read, plan.json for tools."""

from __future__ import annotations

import copy
import json
import logging
import threading
from pathlib import Path
from typing import Any

from rlflow.utils.errors import RlflowError

logger = logging.getLogger(__name__)


def save_plan_in_background(config: Any, folder: Path) -> threading.Thread:
    """Write the plan of a resolved configuration while the run goes on; a plan that cannot be written is a warning."""
    # The run changes its configuration; the thread must not see that.
    thread = threading.Thread(target=_save, args=(copy.deepcopy(config), folder), name="save-plan", daemon=True)
    thread.start()
    return thread


def _save(config: Any, folder: Path) -> None:
    from rlflow.trainer.plan.plan import describe_plan
    from rlflow.trainer.plan.text import render_plan

    try:
        plan = describe_plan(config)
        (folder / "plan.json").write_text(json.dumps(plan.as_dict(), indent=2, default=str) + "\n", encoding="utf-8")
        (folder / "plan.txt").write_text(render_plan(plan) + "\n", encoding="utf-8")
    except (OSError, RlflowError) as error:
        logger.warning("plan.txt and plan.json are not written: %s", error)
