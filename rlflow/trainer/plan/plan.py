"""The plan as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.trainer.plan.batches import BatchPlan, plan_batches
from rlflow.trainer.plan.changes import Change, find_changes
from rlflow.trainer.plan.memory import MemoryPlan, plan_memory
from rlflow.trainer.plan.placement import Placement, plan_placement
from rlflow.trainer.plan.stage_plan import plan_stages
from rlflow.trainer.ppo.field_table import StageFields


@dataclass(frozen=True)
class Plan:
    """Everything that follows from a configuration.

    Fields:
        changes: keys that differ from their defaults.
        notices: settings that work but deserve a line.
        stages: what happens in a step, in order.
    """

    changes: list[Change]
    notices: list[str]
    batches: BatchPlan
    placement: Placement
    memory: MemoryPlan
    stages: list[StageFields]

    def as_dict(self) -> dict[str, Any]:
        """Plain containers, without secrets."""
        from rlflow.utils.redact import redact

        parts = {name: getattr(self, name) for name in ("batches", "placement", "memory")}
        plain: dict[str, Any] = {
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "notices": list(self.notices),
            **{name: dataclasses.asdict(part) for name, part in parts.items()},
            "stages": [stage.as_dict() for stage in self.stages],
        }
        return redact(plain)


def make_plan(overrides: Sequence[str]) -> Plan:
    """Compose, fit to the machine, check, and derive everything.

    Raises:
        ConfigError: the configuration cannot work; all problems are listed.
    """
    from rlflow.trainer.prepare import prepare_config

    notices: list[str] = []
    config = prepare_config(overrides, notices.append)
    return describe_plan(config, overrides, notices)


def describe_plan(config: Any, overrides: Sequence[str] | None = None, notices: Sequence[str] = ()) -> Plan:
    """The plan of a checked configuration; `overrides` say where its values come from (None: nobody knows)."""
    return Plan(
        changes=find_changes(config, overrides),
        notices=list(notices),
        batches=plan_batches(config),
        placement=plan_placement(config),
        memory=plan_memory(config),
        stages=plan_stages(config),
    )
