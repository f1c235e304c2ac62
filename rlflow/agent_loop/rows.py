"""From the outputs of a session to the rows of the TransferQueue.

Row schema (one row an output; key `{uid}_{session}_{index}`, the last index is the final answer):

    prompts [p], responses [r], input_ids [p+r], position_ids [p+r]           int64, no padding
    response_mask [r], loss_mask [r]                                            int64, equal here; all 0 if invalid
    rollout_log_probs [r]                                                     float32, iff rollout.calculate_log_probs
    rm_scores [r]                                                             float32, iff somebody scores
    uid, session_id, data_source, reward_model, raw_prompt, extra_info, index, num_turns, metrics, extra_fields

Invariant: the rows of a run have one set of fields, whatever happened to a session; a field that is there for some rows
only would be lost for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.agent_loop.output import AgentLoopOutput
from rlflow.agent_loop.session import Session
from rlflow.utils.errors import ContractError

if TYPE_CHECKING:
    from tensordict import TensorDict

PROMPT_COLUMNS = ("data_source", "reward_model", "raw_prompt", "extra_info", "index")
# All fields of a row; the last two only when log-probs are calculated and somebody scores.
ROW_FIELDS = (
    *("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask"),
    *("uid", "session_id", *PROMPT_COLUMNS, "num_turns", "metrics", "extra_fields"),
    *("rollout_log_probs", "rm_scores"),
)


@dataclass(frozen=True)
class StoredRows:
    """What one `kv_batch_put` takes."""

    keys: list[str]
    fields: TensorDict
    tags: list[dict[str, Any]]


def build_rows(
    outputs: Sequence[AgentLoopOutput],
    *,
    row: dict[str, Any],
    session: Session,
    global_steps: int,
    with_log_probs: bool,
    with_scores: bool,
    invalid: str | None,
    scored_later: bool = False,
) -> StoredRows:
    """Rows, keys and tags of a session's outputs (at least one).

    Args:
        outputs: checked outputs, scores filled in.
        row: the prompt's dataset columns.
        session: names the rows and knows the weight versions.
        global_steps: the step that submitted the prompt; stands for a version nobody reported.
        with_log_probs: write rollout_log_probs; every output must have them.
        with_scores: write rm_scores; zeros where an output has no score.
        invalid: why the reward is invalid, None for a good one.
        scored_later: nobody scores sessions; a score that the loop set itself is noted in the tag (`own_score`), for
            whoever scores the rows.

    Raises:
        ContractError: log-probs are wanted and an output has none.
    """
    from rlflow.utils import tensordict_utils as tu

    rows = []
    facts = session.facts()
    for output in outputs:
        fields = _tensor_fields(output, session, with_log_probs, with_scores, invalid)
        fields |= {"uid": session.uid, "session_id": session.session_id}
        fields |= {column: row.get(column) for column in PROMPT_COLUMNS}
        fields["extra_fields"] = {**_extra_fields(output, session, global_steps, invalid), "session_facts": facts}
        rows.append(fields)
    tags = [
        _tag(output, fields["extra_fields"], global_steps, invalid)
        for output, fields in zip(outputs, rows, strict=True)
    ]
    if scored_later and outputs[-1].reward_score is not None:
        tags = [{**tag, "own_score": outputs[-1].reward_score} for tag in tags]
    keys = [f"{session.name}_{index}" for index in range(len(outputs))]
    return StoredRows(keys, fields=tu.list_of_dict_to_tensordict(rows), tags=tags)


def _tensor_fields(
    output: AgentLoopOutput, session: Session, with_log_probs: bool, with_scores: bool, invalid: str | None
) -> dict[str, Any]:
    import torch

    fields = output.as_dict()
    if with_log_probs and "rollout_log_probs" not in fields:
        raise ContractError(
            f"session {session.name} has no response_logprobs, but rollout.calculate_log_probs is true; the agent loop "
            "must return those of its generate calls, or the option must be off"
        )
    if not with_log_probs:
        fields.pop("rollout_log_probs", None)
    if with_scores and (invalid is not None or "rm_scores" not in fields):
        fields["rm_scores"] = torch.zeros(len(output.response_ids), dtype=torch.float32)
    if not with_scores:
        fields.pop("rm_scores", None)
    if invalid is not None:
        fields["response_mask"] = torch.zeros_like(fields["response_mask"])
    fields["loss_mask"] = fields["response_mask"].clone()
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]])
    fields["position_ids"] = torch.arange(fields["input_ids"].shape[0], dtype=torch.int64)
    return fields


def _extra_fields(output: AgentLoopOutput, session: Session, global_steps: int, invalid: str | None) -> dict[str, Any]:
    """The loop's extra fields with what later stages rely on filled in."""
    extra = dict(output.extra_fields)
    for name, seen in (("min_global_steps", session.min_global_steps), ("max_global_steps", session.max_global_steps)):
        if extra.get(name) is None:
            extra[name] = global_steps if seen is None else seen
    extra.setdefault("global_steps", extra["max_global_steps"])
    extra.setdefault("stop_reason", session.stop_reason)
    extra.setdefault("turn_scores", [])
    extra.setdefault("tool_rewards", [])
    extra.setdefault("reward_extra_info", {})
    if invalid is not None:
        extra["reward_invalid_reason"] = invalid
    return extra


def _tag(
    output: AgentLoopOutput, extra_fields: dict[str, Any], global_steps: int, invalid: str | None
) -> dict[str, Any]:
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    tag: dict[str, Any] = {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": int(extra_fields["min_global_steps"]),
        "max_global_steps": int(extra_fields["max_global_steps"]),
    }
    if invalid is not None:
        tag["invalid"] = invalid
    return tag
