"""The stage "reward": a reward model that shares the devices of training scores a sampled batch.

The rollout is asleep meanwhile; the model takes the devices and gives them back. What agent loops do where reward
workers score sessions is done here for rows that are stored already: a session's last output is scored unless its loop
did that itself, its other outputs get the same score, and rows without a valid reward are masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import rlflow.transfer_queue as tq
from rlflow.agent_loop.output import score_position
from rlflow.reward_loop.result import Invalid, RewardInput, RewardResult, Score
from rlflow.trainer.ppo.batching import partition_of
from rlflow.trainer.ppo.dumps import column
from rlflow.trainer.ppo.replay_buffer import final_outputs, session_of
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

TENSORS = ("prompts", "responses", "response_mask")
READS = (*TENSORS, "extra_fields", "num_turns")
# What scorers see of a row, where its dataset has it.
OPTIONAL_READS = ("raw_prompt", "data_source", "reward_model", "extra_info", "index")
WRITES = ("rm_scores", "response_mask", "loss_mask", "extra_fields")


def score_batch(trainer: PPOTrainer, batch: KVBatchMeta) -> KVBatchMeta:
    """Writes `rm_scores` [r] a row, masks rows without a valid reward (tag `invalid`), and notes in `extra_fields` what
    a reward function returned beside the score. Returns the meta of the same rows with their tags.
    """
    partition = partition_of(batch)
    names = [*READS, *OPTIONAL_READS]
    data = tq.kv_batch_get(batch.keys, partition, names, missing_ok=OPTIONAL_READS)
    columns: dict[str, list[Any]] = {name: list(data[name].unbind()) for name in TENSORS}
    columns |= {name: column(data, name, len(batch)) for name in names if name not in TENSORS}
    columns["extra_fields"] = [extras or {} for extras in columns["extra_fields"]]
    results = _results(trainer, batch, columns)
    rows, tags = [], []
    for key, mask, extras in zip(batch.keys, columns["response_mask"], columns["extra_fields"], strict=True):
        result = results[session_of(key)[:2]]
        rows.append(_scored(mask, extras, result))
        tags.append({"invalid": result.reason} if isinstance(result, Invalid) else {})
    tq.kv_batch_put(batch.keys, partition, fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(
        keys=batch.keys,
        tags=[{**old, **new} for old, new in zip(batch.tags, tags, strict=True)],
        partition_id=partition,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def _results(
    trainer: PPOTrainer, batch: KVBatchMeta, columns: dict[str, list[Any]]
) -> dict[tuple[str, int], RewardResult]:
    """Result by session (uid, number): of its last output. What its agent loop said itself stands."""
    results: dict[tuple[str, int], RewardResult] = {}
    asked: list[int] = []
    for row in final_outputs(batch.keys):
        tag, session = batch.tags[row], session_of(batch.keys[row])[:2]
        if tag.get("invalid"):
            results[session] = Invalid(tag["invalid"])
        elif tag.get("own_score") is not None:
            info = columns["extra_fields"][row].get("reward_extra_info") or {}
            results[session] = Score(float(tag["own_score"]), info)
        else:
            asked.append(row)
    if asked:
        tokenizer = trainer.runtime.tokenizer
        inputs = [
            _input(tokenizer, batch.keys[row], {name: values[row] for name, values in columns.items()}) for row in asked
        ]
        scores = trainer.runtime.reward_manager.compute_rm_score(inputs)
        results |= {session_of(batch.keys[row])[:2]: score for row, score in zip(asked, scores, strict=True)}
    return results


def _input(tokenizer: Any, key: str, row: dict[str, Any]) -> RewardInput:
    """The trajectory as a reward worker takes it."""
    prompt_ids, response_ids = row["prompts"].tolist(), row["responses"].tolist()
    uid, session_id, _ = session_of(key)
    return RewardInput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=row["response_mask"].tolist(),
        response_text=tokenizer.decode(response_ids, skip_special_tokens=True),
        non_tensor_batch={
            **{name: row[name] for name in OPTIONAL_READS},
            "uid": uid,
            "session_id": session_id,
            "__num_turns__": row["num_turns"],
            "tool_extra_fields": row["extra_fields"],
            "prompt_len": len(prompt_ids),
            "response_len": len(response_ids),
        },
    )


def _scored(response_mask: torch.Tensor, extra_fields: dict[str, Any], result: RewardResult) -> dict[str, Any]:
    """The fields of a row that its result decides."""
    scores = torch.zeros(len(response_mask), dtype=torch.float32)
    if isinstance(result, Invalid):
        response_mask = torch.zeros_like(response_mask)
        extra_fields = {**extra_fields, "reward_invalid_reason": result.reason}
    else:
        if len(scores):
            scores[score_position(response_mask.tolist())] = result.value
        extra_fields = {**extra_fields, "reward_extra_info": result.extra_info}
    return {
        "rm_scores": scores,
        "response_mask": response_mask,
        "loss_mask": response_mask.clone(),
        "extra_fields": extra_fields,
    }
