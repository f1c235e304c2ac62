"""Whole runs with a reward model: every role on devices of its own, and colocated behind a function that asks it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import rlflow.transfer_queue as tq
from rlflow.single_controller.ray import ResourcePoolManager
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.trainer.ppo.utils import Role
from rlflow.utils.ray_utils import run_coroutine

ASKING = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info=None, reward_router_address=None,
                  reward_model_tokenizer=None):
    number = int(ground_truth) // 2
    messages = [{"role": "user", "content": f"{number}+{number}"}, {"role": "assistant", "content": solution_str}]
    text = reward_model_tokenizer.apply_chat_template(messages, tokenize=False)
    body = json.dumps({"input": [text]}).encode()
    with urllib.request.urlopen(f"http://{reward_router_address}/classify", body) as reply:
        [item] = json.load(reply)["data"]
    rule = float(len(solution_str) % 2)
    return {"score": item["probs"][0] + rule, "rule": rule, "model": item["probs"][0]}
"""


@pytest.fixture
def overrides(tiny_overrides: list[str], tiny_reward_model_dir: Path, tmp_path: Path) -> list[str]:
    """A run with a reward model and dumps, without a reward function."""
    return [
        *(item for item in tiny_overrides if "custom_reward_function" not in item),
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={tiny_reward_model_dir}",
        "reward.reward_model.rollout.dtype=float32",
        f"trainer.rollout_data_dir={tmp_path}/train",
        f"trainer.validation_data_dir={tmp_path}/val",
    ]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def model_scores(path: Path, dumped: list[dict[str, Any]]) -> list[float]:
    """A plain transformers forward over the conversation of each dumped row."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    scores = []
    for row in dumped:
        [number] = re.findall(r"(\d+)\+\1", row["input"])
        turns = [("user", f"{number}+{number}"), ("assistant", row["output"])]
        text = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], tokenize=False)
        with torch.no_grad():
            scores.append(model(**tokenizer(text, return_tensors="pt")).logits.item())
    return scores


NAMES = ("input_ids", "responses", "ref_log_prob")


class Watcher(PPOTrainerSync):
    """Keeps what the reference said in each step, and about which tokens."""

    seen: list[Any]

    def _compute_ref_log_prob(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_ref_log_prob(batch, metrics)
        self.seen.append(tq.kv_batch_get(batch.keys, "train", list(NAMES)))
        return batch


@pytest.mark.timeout(200)
def test_reward_model_and_reference_on_devices_of_their_own(
    run_trainer: Callable[..., Any],
    overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tiny_model_dir: Path,
    tiny_reward_model_dir: Path,
    tmp_path: Path,
) -> None:
    Watcher.seen = []
    run_trainer(
        [
            *overrides,
            "reward.reward_model.enable_resource_pool=true",
            "reward.reward_model.n_gpus_per_node=1",
            "reward.reward_model.nnodes=1",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.enable_resource_pool=true",
            "actor_rollout_ref.ref.n_gpus_per_node=2",
            "actor_rollout_ref.ref.nnodes=1",
            "trainer.test_freq=2",
        ],
        Watcher,
    )
    for folder, step, count in (("train", 1, 6), ("train", 2, 6), ("val", 2, 3)):
        dumped = rows(tmp_path / folder / f"{step}.jsonl")
        assert len(dumped) == count
        expected = model_scores(tiny_reward_model_dir, dumped)
        assert [row["score"] for row in dumped] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    first, second = (line["data"] for line in read_metrics())
    mean = torch.tensor([row["score"] for row in rows(tmp_path / "train" / "1.jsonl")]).mean().item()
    assert first["critic/score/mean"] == pytest.approx(mean, rel=1e-4)
    assert first["actor/grad_norm"] > 0 and "timing_s/reward" not in first
    assert first["training/reward/invalid"] == 0
    # The reference starts as the policy, and stays when the policy has moved.
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and second["actor/kl_loss"] > 1e-6
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    for step in Watcher.seen:
        for ids, response, found in zip(*(step[name].unbind() for name in NAMES), strict=True):
            with torch.no_grad():
                log_probs = reference(ids[None]).logits[0].log_softmax(-1)
            told = log_probs[-len(response) - 1 : -1].gather(1, response[:, None])[:, 0]
            torch.testing.assert_close(found, told, rtol=1e-4, atol=1e-4)


class OwnReference(PPOTrainerSync):
    """A user's map of roles: the reference is a worker of its own in the policy's processes. The reward model sleeps
    but while a batch is scored.
    """

    scored: list[int]

    def _init_resource_pool_mgr(self) -> ResourcePoolManager:
        pools = super()._init_resource_pool_mgr()
        pool = pools.mapping.pop(Role.ActorRolloutRef)
        pools.mapping = {Role.ActorRollout: pool, Role.RefPolicy: pool, **pools.mapping}
        return pools

    def init(self) -> None:
        super().init()
        assert self.runtime.ref_policy_wg is not self.runtime.actor_wg
        assert self.runtime.ref_policy_wg.workers == self.runtime.actor_wg.workers

    def _compute_reward_colocate(self, batch: Any) -> Any:
        [replica] = self.runtime.reward_manager.reward_model.rollout_replicas
        before = run_coroutine(replica.status())
        batch = super()._compute_reward_colocate(batch)
        after = run_coroutine(replica.status())
        assert before["asleep"] and after["asleep"]
        self.scored.append(after["scored"] - before["scored"])
        return batch


@pytest.mark.timeout(240)
def test_a_colocated_model_scores_batches_with_a_rule_beside_it(
    run_trainer: Callable[..., Any],
    overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tiny_reward_model_dir: Path,
    tmp_path: Path,
) -> None:
    OwnReference.scored = []
    (tmp_path / "asking.py").write_text(ASKING)
    run_trainer(
        [
            *overrides,
            f"reward.custom_reward_function.path={tmp_path}/asking.py",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "trainer.val_before_train=true",
        ],
        OwnReference,
    )
    assert OwnReference.scored == [3, 6, 6]
    for folder, step, count in (("val", 0, 3), ("train", 1, 6), ("train", 2, 6)):
        dumped = rows(tmp_path / folder / f"{step}.jsonl")
        assert len(dumped) == count
        expected = model_scores(tiny_reward_model_dir, dumped)
        assert [row["model"] for row in dumped] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        for row in dumped:
            assert row["rule"] == len(row["output"]) % 2
            assert row["score"] == pytest.approx(row["rule"] + row["model"], rel=1e-5)
    lines = {line["step"]: line["data"] for line in read_metrics()}
    for step in (1, 2):
        assert lines[step]["timing_s/reward"] > 0 and lines[step]["actor/grad_norm"] > 0
    # The policy leaves the reference, wherever that lives.
    assert lines[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6) and lines[2]["actor/kl_loss"] > 1e-6
    assert any("rule" in name for name in lines[0] if name.startswith("val-aux/"))
