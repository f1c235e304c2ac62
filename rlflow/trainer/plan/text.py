"""The plan as text for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlflow.trainer.plan.batches import BatchPlan, ModelBatches
from rlflow.trainer.plan.memory import MemoryPlan
from rlflow.trainer.plan.placement import Placement
from rlflow.trainer.plan.plan import Plan
from rlflow.trainer.ppo.field_table import StageFields, use_of
from rlflow.utils.redact import redact_text

_UNKNOWN = "unknown (the files do not say how many rows they have)"


def render_plan(plan: Plan) -> str:
    """Sections under headings; see docs/reading_the_plan.md."""
    parts = [
        ("Changed from the defaults", _changes(plan)),
        ("Batches", _batches(plan.batches)),
        ("Processes", _processes(plan.placement)),
        ("Memory a device", _memory(plan.memory, plan.placement)),
        ("Stages of a step", _stages(plan.stages)),
        ("Notices", [f"- {notice}" for notice in plan.notices]),
    ]
    blocks = ["\n".join([title, "-" * len(title), *lines]) for title, lines in parts if lines]
    return redact_text("\n\n".join(blocks))


def _changes(plan: Plan) -> list[str]:
    rows = [("key", "value", "default", "set in" if plan.changes and plan.changes[0].origin else "")]
    rows += [(c.key, _value(c.value), _value(c.default), c.origin) for c in plan.changes]
    return list(_table(rows)) if plan.changes else ["nothing"]


def _batches(batches: BatchPlan) -> list[str]:
    rows = [
        ("prompts a step", str(batches.prompts), "data.train_batch_size"),
        ("answers a prompt", str(batches.sessions), "rollout.n"),
        ("trajectories a step", str(batches.trajectories), f"{batches.prompts} x {batches.sessions}"),
        ("tokens a trajectory", f"up to {batches.longest_tokens}", "prompt + response"),
        ("tokens a step", f"up to {batches.tokens}", f"{batches.trajectories} x {batches.longest_tokens}"),
    ]
    for name, model in batches.models.items():
        rows += _model_rows(name, model, batches)
    steps = f"{batches.data_prompts} prompts / {batches.prompts}, whole batches"
    total = f"{batches.steps_an_epoch} x {batches.epochs} epochs"
    if batches.steps is not None and batches.steps != (batches.steps_an_epoch or 0) * batches.epochs:
        total = "trainer.total_training_steps"
    rows += [
        ("steps an epoch", _or_unknown(batches.steps_an_epoch), steps if batches.data_prompts else ""),
        ("steps of the run", _or_unknown(batches.steps), total if batches.steps is not None else ""),
        ("optimizer steps of the run", _or_unknown(batches.optimizer_steps), ""),
        ("validation", _or_unknown(batches.validation_trajectories), "prompts x rollout.val_kwargs.n"),
    ]
    return list(_table(rows))


def _model_rows(name: str, model: ModelBatches, batches: BatchPlan) -> list[tuple[str, str, str]]:
    shared = f", {model.sp_ranks} devices share a row" if model.sp_ranks > 1 else ""
    return [
        (f"{name}: rows a rank", str(model.rows_a_rank), f"{batches.trajectories} / {model.dp_ranks} ranks{shared}"),
        (
            f"{name}: rows of an optimizer step",
            str(model.mini_batch_rows),
            f"ppo_mini_batch_size {model.mini_batch_prompts} prompts x {batches.sessions}",
        ),
        (f"{name}: of them a rank", str(model.mini_batch_rows_a_rank), f"{model.mini_batch_rows} / {model.dp_ranks}"),
        (f"{name}: rows of a forward", model.micro_batch, f"{model.micro_batches} forwards an optimizer step"),
        (
            f"{name}: optimizer steps a batch",
            str(model.optimizer_steps),
            f"{batches.prompts} / {model.mini_batch_prompts} x {model.epochs} ppo_epochs",
        ),
    ]


def _processes(placement: Placement) -> list[str]:
    rows = [("process", "count", "where")]
    rows += [(group.name, str(group.count), group.place) for group in placement.processes]
    device = "GPUs" if placement.device != "cpu" else "CPU processes that compute"
    lines = list(_table(rows))
    lines.append(f"needed: {placement.devices_needed} {device} on {placement.nodes} node(s)")
    memory = placement.memory_found_bytes / 2**30
    lines.append(f"found:  {placement.gpus_found} GPUs, {placement.cpus_found} cores, {memory:.1f} GiB of memory")
    return lines + [f"SHORT: {text}" for text in placement.short_of] + list(placement.remarks)


def _memory(memory: MemoryPlan, placement: Placement) -> list[str]:
    if memory.unknown:
        return [f"unknown: {memory.unknown}"]
    counts = ", ".join(f"{name} {count / 1e6:.0f} million" for name, count in memory.parameters.items())
    lines = [f"parameters: {counts}", *([memory.remark] if memory.remark else [])]
    for device in memory.devices:
        rows = [(f"{device.name} (x {device.count})", "")]
        for phase, parts in device.phases.items():
            rows.append((f"  {phase}", _gib(sum(parts.values()))))
            rows += [(f"    {part}", _gib(size)) for part, size in parts.items() if size]
        lines += list(_table(rows))
    if placement.device == "cpu":
        total = sum(max(device.peaks.values()) * device.count for device in memory.devices)
        lines.append(f"all processes at their worst: {_gib(total)}, beside what the libraries take")
    return lines


def _stages(stages: Sequence[StageFields]) -> list[str]:
    """Who does each stage, then fields by stages: w written, r read, (r) read where it is there."""
    lines = list(_table([(stage.stage, f"{stage.group}.{stage.method}") for stage in stages]))
    fields = list(dict.fromkeys(f for stage in stages for f in (*stage.writes, *stage.reads, *stage.optional_reads)))
    rows = [("field", *(stage.stage for stage in stages))]
    rows += [(name, *(use_of(stage, name) for stage in stages)) for name in fields]
    return [*lines, "", *_table(rows)]


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns as wide as their longest cell; the last one is as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def _or_unknown(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _value(value: Any) -> str:
    """As it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_value, value))}]"
    return str(value)
