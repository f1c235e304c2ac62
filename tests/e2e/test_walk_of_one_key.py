"""Two prompts, three sessions each, through every stage of one real step: the fields, and their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.nested import nested_lengths

AGENT_FIELDS = {
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs", "rm_scores",
    "num_turns", "metrics", "extra_fields", "uid", "session_id", "raw_prompt", "data_source", "reward_model",
    "extra_info", "index",
}  # fmt: skip
SCORES = {"A": [1.0, 0.0, 0.0], "B": [0.0, 1.0, 1.0]}
EXPECTED = {"A": [1.155, -0.577, -0.577], "B": [-1.155, 0.577, 0.577]}


class Walker(PPOTrainerSync):
    """The sync trainer, with an eye on the table after each stage."""

    seen: dict[str, Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).seen = {"batches": []}

    def look(self, stage: str, batch: Any) -> None:
        listed = tq.kv_list("train").get("train", {})
        meta = tq.kv_batch_get(batch.keys, "train")
        self.seen[stage] = {"keys": sorted(listed), "fields": set(meta.keys()), "order": list(batch.keys), "data": meta}

    def _submit(self, batch: Any) -> None:
        self.seen["uids"] = self.feed.uids(batch)
        super()._submit(batch)

    def _balance_batch(self, batch: Any, metrics: Any) -> Any:
        self.look("sampled", batch)
        # Fixed scores, so that the advantages are known.
        rows = {}
        for letter, uid in zip("AB", self.seen["uids"], strict=True):
            for session, score in enumerate(SCORES[letter]):
                rows[f"{uid}_{session}_0"] = score
        lengths = nested_lengths(tq.kv_batch_get(batch.keys, "train", ["responses"])["responses"]).tolist()
        scores = []
        for key, length in zip(batch.keys, lengths, strict=True):
            row = torch.zeros(length)
            row[-1] = rows[key]
            scores.append(row)
        tq.kv_batch_put(batch.keys, "train", fields=tu.get_tensordict({"rm_scores": tu.nested_from_list(scores)}))
        batch = super()._balance_batch(batch, metrics)
        self.look("balanced", batch)
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        self.look("old", batch)
        return batch

    def _compute_ref_log_prob(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_ref_log_prob(batch, metrics)
        self.look("ref", batch)
        return batch

    def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        self.look("adv", batch)
        return batch

    def _update_actor(self, batch: Any, metrics: Any) -> None:
        super()._update_actor(batch, metrics)
        self.look("update", batch)

    def on_train_end(self) -> None:
        self.seen["end"] = tq.kv_list("train").get("train", {})


@pytest.mark.timeout(240)
def test_the_walk_of_one_key(
    run_trainer: Callable[..., Any], tiny_overrides: list[str], read_metrics: Callable[[], list[dict[str, Any]]]
) -> None:
    run_trainer([*tiny_overrides, "trainer.total_training_steps=1", "actor_rollout_ref.actor.use_kl_loss=true"], Walker)
    seen = Walker.seen
    a, b = seen["uids"]
    six = sorted(f"{uid}_{session}_0" for uid in (a, b) for session in range(3))

    assert a.startswith("e0r") and a.endswith("a0")
    assert seen["sampled"]["keys"] == six, "the markers are gone, six rows are there"
    assert seen["sampled"]["fields"] == AGENT_FIELDS
    assert sorted(seen["balanced"]["order"]) == six, "6 rows split over one rank without padding"
    assert seen["old"]["fields"] == AGENT_FIELDS | {"old_log_probs", "entropy"}
    assert seen["ref"]["fields"] == seen["old"]["fields"] | {"ref_log_prob"}
    assert seen["adv"]["fields"] == seen["ref"]["fields"] | {"advantages", "returns"}
    assert seen["update"]["fields"] == seen["adv"]["fields"]
    assert len({tuple(seen[stage]["order"]) for stage in ("balanced", "old", "ref", "adv", "update")}) == 1
    assert seen["end"] == {}, "all keys are cleared"

    data = seen["adv"]["data"]
    lengths = nested_lengths(data["responses"])
    aligned = (
        "response_mask",
        "rollout_log_probs",
        "rm_scores",
        "old_log_probs",
        "entropy",
        "ref_log_prob",
        "advantages",
    )
    for name in aligned:
        assert torch.equal(nested_lengths(data[name]), lengths), name
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "entropy", "advantages", "returns"):
        assert data[name].dtype is torch.float32, name
    assert torch.equal(nested_lengths(data["input_ids"]), nested_lengths(data["prompts"]) + lengths)

    for key, row in zip(seen["adv"]["order"], data["advantages"].unbind(), strict=True):
        uid, session, _ = key.rsplit("_", 2)
        expected = EXPECTED["A" if uid == a else "B"][int(session)]
        assert row.tolist() == pytest.approx([expected] * len(row), abs=1e-3)

    old, rollout, ref = (data[name].values() for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob"))
    assert (old - rollout).abs().max() < 1e-4, "the actor recomputes what the rollout engine reported"
    assert (old - ref).abs().max() < 1e-5, "actor and reference start as the same model"

    [line] = read_metrics()
    metrics = line["data"]
    assert metrics["training/rollout_log_probs_diff/max"] < 1e-4
    assert metrics["training/off_policy/trajectory_staleness/max"] == 0
    assert metrics["actor/grad_norm"] > 0
    assert metrics["training/global_step"] == 1
