"""The stage "reward": which rows are scored, where scores stand, what is masked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.reward_loop.result import Invalid, RewardInput, Score
from rlflow.trainer.ppo.colocated_rewards import score_batch
from rlflow.trainer.ppo.field_table import check_stage_table, stage_table
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.workers.engine_workers import ActorRolloutRefWorker

MASKS = {"a_0_0": [1, 1], "a_0_1": [1, 1, 0], "a_1_0": [1], "b_0_0": [1, 1], "b_1_0": [1, 1, 1]}
TAGS: dict[str, dict[str, Any]] = {
    "b_0_0": {"own_score": 7.0},
    "b_1_0": {"invalid": "the loop set reward_score to nan"},
}


@pytest.fixture
def batch() -> Iterator[KVBatchMeta]:
    tq.init({"namespace": "colocated-rewards", "backend": {"storage_backend": "Local"}})
    rows = [
        {
            "prompts": torch.tensor([5, 6]),
            "responses": torch.arange(len(mask)) + 10 * number,
            "response_mask": torch.tensor(mask),
            "loss_mask": torch.tensor(mask),
            "num_turns": 2,
            "extra_fields": {"mine": key},
            "raw_prompt": [{"role": "user", "content": key}],
        }
        for number, (key, mask) in enumerate(MASKS.items())
    ]
    tags = [TAGS.get(key, {}) for key in MASKS]
    tq.kv_batch_put(list(MASKS), "train", fields=tu.list_of_dict_to_tensordict(rows), tags=tags)
    yield KVBatchMeta(keys=list(MASKS), tags=tags, partition_id="train")
    tq.close()


def test_last_outputs_are_scored_and_the_rest_follows(batch: KVBatchMeta) -> None:
    asked: list[RewardInput] = []

    def compute_rm_score(inputs: list[RewardInput]) -> list[Score | Invalid]:
        asked.extend(inputs)
        return [Score(2.5, {"note": 1}), Invalid("too long")]

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"text of {ids}")
    runtime = SimpleNamespace(tokenizer=tokenizer, reward_manager=SimpleNamespace(compute_rm_score=compute_rm_score))
    meta = score_batch(SimpleNamespace(runtime=runtime), batch)  # type: ignore[arg-type]

    assert [(item.response_ids, item.response_mask) for item in asked] == [([10, 11, 12], [1, 1, 0]), ([20], [1])]
    assert asked[0].response_text == "text of [10, 11, 12]"
    assert asked[0]["raw_prompt"] == [{"role": "user", "content": "a_0_1"}] and asked[0]["data_source"] is None

    names = ["rm_scores", "response_mask", "loss_mask", "extra_fields"]
    data = tq.kv_batch_get(meta.keys, "train", names)
    scores = [row.tolist() for row in data["rm_scores"].unbind()]
    # On the last token that the policy wrote; a session's earlier output has its score too.
    assert scores == [[0, 2.5], [0, 2.5, 0], [0], [0, 7.0], [0, 0, 0]]
    assert data["rm_scores"].dtype == torch.float32
    for name in ("response_mask", "loss_mask"):
        assert [row.tolist() for row in data[name].unbind()] == [[1, 1], [1, 1, 0], [0], [1, 1], [0, 0, 0]]
    assert [tag.get("invalid") for tag in meta.tags] == [None, None, "too long", None, TAGS["b_1_0"]["invalid"]]
    extras = tu.get(data, "extra_fields")
    assert extras[1] == {"mine": "a_0_1", "reward_extra_info": {"note": 1}}
    assert extras[2] == {"mine": "a_1_0", "reward_invalid_reason": "too long"}


def test_the_stage_stands_between_sampling_and_the_rest() -> None:
    workers: dict[str, type] = {"actor": ActorRolloutRefWorker}
    stages = stage_table(workers, reward_after=True)
    check_stage_table(stages)
    assert [stage.stage for stage in stages[:3]] == ["gen", "reward", "old_log_prob"]
    assert "rm_scores" in stages[1].writes and "rm_scores" not in stages[0].writes
