"""A whole DAPO run: groups without a signal are replaced, overlong answers are punished, rollouts are corrected.

Started again from the checkpoint of its first step, it must take the same prompts again.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.observe.journal import read_lines
from rlflow.trainer.ppo.core_algos.rollout_correction import compute_rollout_correction
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.nested import nested_to_padded

# Every other prompt scores the same whatever the answer is.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    acc = 1.0 if int(ground_truth) % 4 == 0 else float(sum(map(ord, solution_str)) % 5)
    return {"score": acc, "acc": acc}
"""
SEEN = ("old_log_probs", "rollout_log_probs", "response_mask", "loss_mask", "rollout_is_weights", "extra_fields",
        "reward_model", "responses", "rm_scores")  # fmt: skip


class Watcher(PPOTrainerSync):
    """Moves the rollout's log-probs away from the policy's, and keeps what the correction made of it."""

    seen: list[dict[str, Any]]

    def _compute_old_log_prob(self, batch: Any, metrics: Any) -> Any:
        data = tq.kv_batch_get(batch.keys, "train", ["rollout_log_probs", "response_mask"])
        moved = tu.nested_like(
            torch.sin(torch.arange(data["rollout_log_probs"].values().numel())), data["response_mask"]
        )
        rollout = tu.nested_like(data["rollout_log_probs"].values() + moved.values(), data["response_mask"])
        tq.kv_batch_put(batch.keys, "train", fields=tu.get_tensordict({"rollout_log_probs": rollout}))
        batch = super()._compute_old_log_prob(batch, metrics)
        after = tq.kv_batch_get(batch.keys, "train", list(SEEN))
        self.seen.append({"keys": list(batch.keys), "before": data["response_mask"], "data": after})
        return batch


@pytest.mark.timeout(240)
def test_dapo_replaces_groups_corrects_rollouts_and_resumes_where_it_was(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    Watcher.seen = []
    common = [
        *tiny_overrides,
        "trainer.save_freq=1",
        "actor_rollout_ref.rollout.full_determinism=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4, penalty_factor: 1.0, log: true}",
    ]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    config = run_trainer([*common, f"trainer.default_local_dir={whole}"], Watcher).config
    lines = read_metrics()
    steps = Watcher.seen

    for step, line in zip(steps, lines, strict=True):
        _check_groups(step)
        _check_overlong(step)
        _check_correction(step, line["data"], config.algorithm.rollout_correction)
        assert line["data"]["reward_extra/overlong_reward/mean"] < 0
    _check_journal(whole, lines)

    resumed.mkdir()
    shutil.copytree(whole / "global_step_1", resumed / "global_step_1")
    shutil.copy(whole / "events.jsonl", resumed)
    (resumed / "latest_checkpointed_iteration.txt").write_text("1")
    run_trainer([*common, f"trainer.default_local_dir={resumed}"], Watcher)
    assert Watcher.seen[2]["keys"] == steps[1]["keys"], "step 2 takes the prompts that it took before"
    cursors = [torch.load(run / "global_step_2" / "data.pt", weights_only=True) for run in (whole, resumed)]
    assert cursors[0] == cursors[1] and cursors[0]["position"] + 8 * cursors[0]["epoch"] > 4, "dropped prompts count"
    ends = [[(x["event"], x["uids"]) for x in _ended(run)] for run in (whole, resumed)]
    assert ends[0] == ends[1]


def _ended(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "events.jsonl") if line["event"] in ("trained", "dropped")]


def _infos(step: dict[str, Any]) -> list[dict[str, Any]]:
    return [extra["reward_extra_info"] for extra in tu.get(step["data"], "extra_fields")]


def _check_groups(step: dict[str, Any]) -> None:
    groups: dict[str, set[float]] = {}
    for key, info in zip(step["keys"], _infos(step), strict=True):
        groups.setdefault(key.rsplit("_", 2)[0], set()).add(info["acc"])
    assert len(groups) == 2 and all(len(values) > 1 for values in groups.values())


def _check_overlong(step: dict[str, Any]) -> None:
    rows = zip(step["data"]["responses"].unbind(), step["data"]["rm_scores"].unbind(), _infos(step), strict=True)
    for response, scores, info in rows:
        assert info["overlong_reward"] == min(0.0, -(len(response) - 4) / 4)
        assert float(scores.sum()) == pytest.approx(info["acc"] + info["overlong_reward"])


def _check_correction(step: dict[str, Any], numbers: dict[str, float], settings: Any) -> None:
    data = step["data"]
    before = nested_to_padded(step["before"])
    old, rollout = nested_to_padded(data["old_log_probs"]), nested_to_padded(data["rollout_log_probs"])
    weights, mask, _ = compute_rollout_correction(old, rollout, before, settings)
    assert weights is not None and 0 < mask.sum() < before.sum()
    assert torch.equal(nested_to_padded(data["response_mask"]), mask)
    assert torch.equal(data["loss_mask"].values(), data["response_mask"].values()), "the loss divides by what it uses"
    torch.testing.assert_close(nested_to_padded(data["rollout_is_weights"]), weights)
    share = 1 - float(mask.sum() / before.sum())
    assert numbers["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share, abs=1e-5)
    assert numbers["actor/grad_norm"] > 0


def _check_journal(run: Path, lines: list[dict[str, Any]]) -> None:
    """issued = trained + dropped, each with its reason; the metrics count the same."""
    events = [json.loads(text) for text in (run / "events.jsonl").read_text().splitlines()]
    uids = {
        kind: [uid for x in events if x["event"] == kind for uid in x["uids"]]
        for kind in ("issued", "trained", "dropped")
    }
    assert Counter(uids["issued"]) == Counter(uids["trained"] + uids["dropped"]) and uids["dropped"]
    reasons = {x["reason"] for x in events if x["event"] == "dropped"}
    assert reasons <= {f"algorithm.filter_groups: acc is {value} in all sessions" for value in range(5)}
    prefix = "training/filter_groups"
    assert sum(line["data"].get(f"{prefix}/evicted_groups", 0) for line in lines) == len(uids["dropped"])
    assert sum(line["data"].get(f"{prefix}/evicted_samples", 0) for line in lines) == 3 * len(uids["dropped"])
    assert sum(line["data"].get(f"{prefix}/refilled_prompts", 0) for line in lines) == len(uids["dropped"])
    written = {x["stage"]: x for x in events[0]["stages"]}["old_log_prob"]["writes"]
    assert {"rollout_is_weights", "response_mask", "loss_mask"} <= set(written)
