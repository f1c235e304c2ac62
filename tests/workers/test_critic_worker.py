"""The critic's calls in one process: values, updates, metrics, sizes; what they read and write."""

from __future__ import annotations

import pytest
import tiny
import torch
from omegaconf import OmegaConf
from test_engine_workers import metrics_of, worker_config

from rlflow.config.overrides import compose_config
from rlflow.single_controller.base import WorkerContext
from rlflow.single_controller.base.decorator import registered_methods
from rlflow.utils import tensordict_utils as tu
from rlflow.workers.critic_worker import CriticWorker
from rlflow.workers.engine_workers import ActorRolloutRefWorker

pytestmark = pytest.mark.usefixtures("single_process_group")


def critic_config(path, *overrides):
    return compose_config(
        [
            f"critic.model.path={path}",
            "actor_rollout_ref.rollout.name=hf",
            "critic.use_dynamic_bsz=true",
            "critic.ppo_max_token_len_per_gpu=64",
            "critic.fsdp.dtype=float32",
            "critic.optim.lr=3e-4",
            *overrides,
        ]
    ).critic


def make_critic(path, *overrides, **kwargs):
    worker = CriticWorker(critic_config(path, *overrides), **kwargs, context=WorkerContext.single())
    worker.init_model()
    return worker


def test_values_are_written_in_row_order_and_an_update_brings_them_to_the_returns(tiny_model):
    critic = make_critic(tiny_model)
    data = tiny.make_batch(8)
    inputs = tu.get_keys(data, ["input_ids", "responses"])
    out = critic.compute_values(inputs)
    assert set(out.keys()) == {"values"}
    values = out["values"]
    assert values.dtype == torch.float32
    assert torch.equal(tu.nested_lengths(values), tu.nested_lengths(data["responses"]))
    reverse = tu.index_select_tensor_dict(inputs, list(range(7, -1, -1)))
    for a, b in zip(values.unbind(), critic.compute_values(reverse)["values"].unbind()[::-1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

    data.set("values", values)
    data.set("returns", tu.nested_like(values.values() + 0.3, values))
    update = tu.assign_non_tensor_whole(data, {"mini_batch_size": 4, "epochs": 2})
    metrics = metrics_of(critic.update_critic(update))
    assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "loss", "grad_norm", "lr"} <= set(metrics)
    assert metrics["lr"] == pytest.approx(3e-4)
    assert metrics["critic/vf_loss"] == pytest.approx(metrics["loss"])
    valid = data["response_mask"].values().bool()
    before = 0.5 * 0.3**2
    after = (critic.compute_values(inputs)["values"].values() - data["returns"].values())[valid].square().mean() / 2
    assert after < before


def test_sizes_of_both_passes_come_from_the_critics_own_keys(tiny_model):
    config = critic_config(
        tiny_model,
        "critic.use_dynamic_bsz=false",
        "critic.ppo_micro_batch_size_per_gpu=2",
        "critic.forward_micro_batch_size_per_gpu=8",
        "critic.forward_max_token_len_per_gpu=128",
        "critic.model.use_remove_padding=false",
        "critic.strategy=fsdp2",
    )
    before = OmegaConf.to_container(config)
    worker = CriticWorker(config, context=WorkerContext.single())
    engine = worker.engine_config
    assert (engine.micro_batch_size_per_gpu, engine.infer_micro_batch_size_per_gpu) == (2, 8)
    assert (engine.max_token_len_per_gpu, engine.infer_max_token_len_per_gpu) == (64, 128)
    assert (engine.use_dynamic_bsz, engine.use_remove_padding, engine.strategy) == (False, False, "fsdp2")
    assert OmegaConf.to_container(config) == before


def test_the_norm_mode_does_not_depend_on_the_split(tiny_model):
    critic = make_critic(tiny_model, "critic.loss_agg_mode=seq-mean-token-sum-norm", response_length=12)
    assert critic.loss_fn.keywords["config"].loss_scale_factor == 12


def test_policy_and_critic_share_a_process_and_leave_each_other_alone(tiny_model):
    critic = make_critic(tiny_model)
    policy = ActorRolloutRefWorker(worker_config(tiny_model), "actor_rollout", context=WorkerContext.single())
    policy.init_model()
    data = tiny.with_values(tiny.make_batch(8))
    tu.assign_non_tensor_whole(data, {"mini_batch_size": 8})
    inputs = tu.get_keys(data, ["input_ids", "responses"])
    log_probs, values = policy.compute_log_prob(inputs)["old_log_probs"], critic.compute_values(inputs)["values"]
    critic.update_critic(data)
    assert torch.equal(policy.compute_log_prob(inputs)["old_log_probs"].values(), log_probs.values())
    moved = critic.compute_values(inputs)["values"].values()
    assert not torch.equal(moved, values.values())
    policy.update_actor(data)
    assert torch.equal(critic.compute_values(inputs)["values"].values(), moved)


def test_every_call_declares_what_it_reads_and_writes():
    declared = dict(registered_methods(CriticWorker))
    assert declared["compute_values"]["mesh"] == declared["update_critic"]["mesh"] == "critic"
    assert declared["compute_values"]["reads"] == ("input_ids", "responses")
    assert declared["compute_values"]["writes"] == ("values",)
    assert {"values", "returns", "response_mask"} <= set(declared["update_critic"]["reads"])
