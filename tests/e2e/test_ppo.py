"""PPO with a critic on two ranks: warm-up, GAE on rewards with a KL penalty, both KL switches, entropy bonus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo import core_algos
from rlflow.trainer.ppo.trainer_sync import PPOTrainerSync
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.nested import nested_lengths, nested_to_padded

KL = 0.5
FIELDS = ("advantages", "response_mask", "returns", "rm_scores", "token_level_rewards", "values")


class Watcher(PPOTrainerSync):
    """Keeps the weights after each step and what the advantage was computed from."""

    folder: Path
    seen: list[dict[str, Any]]

    def on_init_end(self) -> None:
        super().on_init_end()
        self.keep_weights()

    def on_step_end(self, metrics: Any, timing: Any) -> None:
        super().on_step_end(metrics, timing)
        self.keep_weights()

    def keep_weights(self) -> None:
        for name, group in (("actor", self.runtime.actor_wg), ("critic", self.runtime.critic_wg)):
            group.save_checkpoint(str(self.folder / f"{name}_{self.global_steps}"), None, self.global_steps, None)

    def _compute_ref_log_prob(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_ref_log_prob(batch, metrics)
        # A reference at a known distance, so that the penalty is known.
        old = tq.kv_batch_get(batch.keys, "train", ["old_log_probs"])["old_log_probs"]
        ref = tu.nested_like(old.values() - KL, old)
        tq.kv_batch_put(batch.keys, "train", fields=tu.get_tensordict({"ref_log_prob": ref}))
        return batch

    def _compute_advantage(self, batch: Any, metrics: Any) -> Any:
        batch = super()._compute_advantage(batch, metrics)
        self.seen.append(dict(tq.kv_batch_get(batch.keys, "train", [*FIELDS, "responses"]).items()))
        return batch


def weights(folder: Path, name: str) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / name / "model").glob("*.safetensors")}


@pytest.mark.timeout(240)
def test_ppo_with_a_critic(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tiny_model_dir: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    Watcher.folder, Watcher.seen = tmp_path / "kept", []
    run_trainer(
        [
            *tiny_overrides,
            "trainer.n_gpus_per_node=2",
            "trainer.critic_warmup=2",
            "actor_rollout_ref.rollout.n=2",
            "algorithm.adv_estimator=gae",
            "algorithm.gamma=0.9",
            "algorithm.lam=0.8",
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.2",
            "algorithm.kl_ctrl.horizon=100",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
            f"critic.model.path={tiny_model_dir}",
            "critic.model.enable_gradient_checkpointing=false",
            "critic.fsdp.dtype=float32",
            "critic.ppo_mini_batch_size=1",
            "critic.optim.lr=1e-3",
            "critic.optim.lr_scheduler_type=cosine",
        ],
        Watcher,
    )
    pairs = [(name, step) for name in ("actor", "critic") for step in (0, 1, 2)]
    kept = {(name, step): weights(Watcher.folder, f"{name}_{step}") for name, step in pairs}
    assert len(kept["critic", 0]) == 2, "a file a rank"
    assert kept["actor", 1] == kept["actor", 0], "only the critic is trained in step 1"
    assert kept["critic", 1] != kept["critic", 0]
    assert kept["actor", 2] != kept["actor", 1] and kept["critic", 2] != kept["critic", 1]

    first, second = (line["data"] for line in read_metrics())
    for metrics in (first, second):
        names = {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/values/mean"}
        names |= {"critic/vf_explained_var", "timing_s/values", "timing_s/update_critic", "timing_per_token_ms/values"}
        assert names <= set(metrics)
        assert metrics["critic/grad_norm"] > 0
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(KL, abs=1e-5)
    assert "actor/grad_norm" not in first and second["actor/grad_norm"] > 0
    assert second["actor/kl_loss"] > 0 and second["actor/entropy_loss"] > 0
    assert first["critic/lr"] == pytest.approx(0.5e-3), "the schedule knows that the run has 2 steps"
    # 4 rows a step; the KL is far over its target of 0.1.
    assert first["actor/reward_kl_penalty_coeff"] == pytest.approx(0.2)
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.2 * (1 + 0.2 * 4 / 100))

    for data, metrics in zip(Watcher.seen, (first, second), strict=True):
        for name in FIELDS:
            assert torch.equal(nested_lengths(data[name]), nested_lengths(data["responses"])), name
        dense = {name: nested_to_padded(data[name]).float() for name in FIELDS}
        mask, rewards = dense["response_mask"], dense["token_level_rewards"]
        torch.testing.assert_close(
            rewards, dense["rm_scores"] - metrics["actor/reward_kl_penalty_coeff"] * KL * mask, rtol=0, atol=1e-5
        )
        advantages, returns = core_algos.compute_gae_advantage_return(rewards, dense["values"], mask, 0.9, 0.8)
        torch.testing.assert_close(dense["advantages"] * mask, advantages * mask, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dense["returns"] * mask, returns * mask, rtol=1e-5, atol=1e-5)
        assert metrics["critic/values/mean"] == pytest.approx(dense["values"][mask.bool()].mean().item(), abs=1e-5)
