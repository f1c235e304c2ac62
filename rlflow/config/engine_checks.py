"""Settings of `actor_rollout_ref.rollout` that the chosen engine cannot honour; facts from its capability table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlflow.config.problems import choice
from rlflow.utils.import_utils import is_installed
from rlflow.workers.rollout.capabilities import CAPABILITIES, EngineCapabilities

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

ROLLOUT = "actor_rollout_ref.rollout"


def check_engine(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Name, packages, parallel sizes, formats, devices, and log-probs of a truncated distribution."""
    row = CAPABILITIES.get(c.rollout.name)
    if row is None:
        problems.append(choice(f"{ROLLOUT}.name", c.rollout.name, CAPABILITIES, "is no rollout engine"))
        return
    if row.packages and not any(is_installed(package) for package in row.packages):
        problems.append(
            f"{ROLLOUT}.name={row.name}: {' or '.join(row.packages)} is not installed here.\n"
            f"    try:    pip install 'rlflow[{row.extra}]', or {ROLLOUT}.name=hf"
        )
    problems.extend(_unsupported(row, key, value, able, instead) for key, value, able, instead in _asked(c, row))
    _check_truncation(c, notices)
    _check_placement(c, problems, notices)


def _check_placement(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Replicas share the trainer's devices, and get their weights from the worker beside them."""
    if c.rollout.nnodes > 0:
        problems.append(
            f"{ROLLOUT}.nnodes={c.rollout.nnodes}: replicas on nodes of their own need an asynchronous trainer, "
            f"which is not in this version; they share the trainer's devices.\n    try:    {ROLLOUT}.nnodes=0"
        )
    if (backend := c.rollout.checkpoint_engine.backend) != "naive":
        notices.append(
            f"rollout.checkpoint_engine.backend={backend} has no effect: it is for replicas on devices of their own; "
            "those that share the trainer's always use naive"
        )


def _asked(c: TypedConfig, row: EngineCapabilities) -> list[tuple[str, Any, tuple[str, ...], str]]:
    """(key, value, engines that can, value that works) of every setting the engine cannot honour."""
    rollout = c.rollout
    found = []

    def need(key: str, value: Any, fact: str, instead: str) -> None:
        if not getattr(row, fact):
            able = tuple(other.name for other in CAPABILITIES.values() if getattr(other, fact))
            found.append((key, value, able, instead))

    # The reference's default of the tensor size is 2; hf has always served it from one device.
    if rollout.tensor_model_parallel_size not in (1, type(rollout)().tensor_model_parallel_size):
        need(f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size, "tensor_parallel", "1")
    if rollout.data_parallel_size > 1:
        need(f"{ROLLOUT}.data_parallel_size", rollout.data_parallel_size, "data_parallel", "1")
    if rollout.pipeline_model_parallel_size > 1:
        need(f"{ROLLOUT}.pipeline_model_parallel_size", rollout.pipeline_model_parallel_size, "pipeline_parallel", "1")
    if c.trainer.device not in row.devices:
        able = tuple(other.name for other in CAPABILITIES.values() if c.trainer.device in other.devices)
        found.append(("trainer.device", c.trainer.device, able, row.devices[0]))
    if rollout.load_format not in row.load_formats:
        able = tuple(other.name for other in CAPABILITIES.values() if rollout.load_format in other.load_formats)
        found.append((f"{ROLLOUT}.load_format", rollout.load_format, able, row.load_formats[0]))
    return found


def _unsupported(row: EngineCapabilities, key: str, value: Any, able: tuple[str, ...], instead: str) -> str:
    others = f", or {ROLLOUT}.name={'|'.join(able)}" if able else ""
    why = f"{key}={value}: the rollout engine {row.name} ({row.title}) cannot do that."
    return f"{why}\n    try:    {key}={instead}{others}"


def _check_truncation(c: TypedConfig, notices: list[str]) -> None:
    """Log-probs of what was really sampled from do not compare with the trainer's when top-p or top-k cut it."""
    if c.rollout.top_p >= 1.0 and c.rollout.top_k <= 0:
        return
    correction = c.algorithm.rollout_correction
    cut = f"rollout.top_p={c.rollout.top_p}, top_k={c.rollout.top_k}"
    notices.append(
        f"{cut}: the engine samples from a truncated distribution, the trainer's log-probs are of the full one, so "
        "probability ratios are biased"
    )
    uses = (
        [
            name
            for name, used in (
                (f"rollout_is={correction.rollout_is}", correction.rollout_is),
                (f"rollout_rs={correction.rollout_rs}", correction.rollout_rs),
                ("bypass_mode=true", correction.bypass_mode),
            )
            if used
        ]
        if correction is not None
        else []
    )
    if uses:
        notices.append(
            f"{cut} with algorithm.rollout_correction.{', '.join(uses)}: the rollout's log-probs are of the truncated "
            "distribution (processed), so every importance ratio is off by the mass that was cut away. Set top_p=1.0 "
            "and top_k=-1, or an engine with raw log-probs (rollout.logprobs_mode=raw_logprobs)"
        )
