"""The worker's calls, in one process: mini-batches, metrics, schedule, log-probs, weights, checkpoints."""

from __future__ import annotations

import asyncio
import math

import pytest
import tiny
import torch
from omegaconf import OmegaConf

from rlflow.config.overrides import compose_config
from rlflow.single_controller.base import WorkerContext
from rlflow.single_controller.base.decorator import registered_methods
from rlflow.trainer.ppo.stages import merge_worker_metrics
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.metric import Metric
from rlflow.workers import training_worker
from rlflow.workers.engine_workers import ActorRolloutRefWorker

pytestmark = pytest.mark.usefixtures("single_process_group")


def worker_config(path, *overrides):
    return compose_config(
        [
            f"actor_rollout_ref.model.path={path}",
            "data.train_files=x",
            "data.val_files=x",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
            "actor_rollout_ref.actor.fsdp_config.dtype=float32",
            "actor_rollout_ref.ref.fsdp_config.dtype=float32",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.optim.total_training_steps=10",
            "trainer.device=cpu",
            *overrides,
        ]
    ).actor_rollout_ref


def make_worker(path, *overrides, role="actor_rollout_ref"):
    worker = ActorRolloutRefWorker(worker_config(path, *overrides), role, context=WorkerContext.single())
    worker.init_model()
    return worker


def batch(worker, rows=8, seed=0, **options):
    data = tiny.make_batch(rows, seed)
    old = worker.compute_log_prob(tu.get_keys(data, ["input_ids", "responses"]))["old_log_probs"]
    data.set("old_log_probs", old)
    options = {"mini_batch_size": rows, "temperature": 1.0, "calculate_entropy": True} | options
    return tu.assign_non_tensor_whole(data, options)


def metrics_of(output):
    assert list(output.batch_size) == []
    metrics = tu.get(output, "metrics")
    assert all(isinstance(m, Metric) for m in metrics.values())
    return {name: m.aggregate() for name, m in metrics.items()}


@pytest.fixture(scope="module")
def worker(tiny_model, single_process_group):
    return make_worker(tiny_model, "actor_rollout_ref.actor.use_kl_loss=true", "algorithm.use_kl_in_reward=false")


def test_log_probs_come_in_row_order_and_fp32(worker):
    data = tiny.make_batch(8)
    out = worker.compute_log_prob(tu.get_keys(data, ["input_ids", "responses"]))
    assert set(tu.get_keys(out, ["old_log_probs", "entropy"]).keys()) == set(out.keys())
    for name in ("old_log_probs", "entropy"):
        assert out[name].dtype == torch.float32
        assert torch.equal(tu.nested_lengths(out[name]), tu.nested_lengths(data["responses"]))
    reverse = tu.index_select_tensor_dict(data, list(range(7, -1, -1)))
    again = worker.compute_log_prob(tu.get_keys(reverse, ["input_ids", "responses"]))["old_log_probs"].unbind()
    for a, b in zip(out["old_log_probs"].unbind(), again[::-1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_reference_stays_while_the_policy_moves(tiny_model):
    worker = make_worker(tiny_model, "actor_rollout_ref.actor.use_kl_loss=true")
    inputs = tu.get_keys(tiny.make_batch(8), ["input_ids", "responses"])
    before = worker.compute_ref_log_prob(inputs)["ref_log_prob"]
    policy = worker.compute_log_prob(inputs)["old_log_probs"]
    torch.testing.assert_close(before.values(), policy.values())
    out = metrics_of(worker.update_actor(batch(worker)))
    assert out["kl_coef"] == pytest.approx(0.001)
    assert torch.equal(worker.compute_ref_log_prob(inputs)["ref_log_prob"].values(), before.values())
    assert not torch.allclose(worker.compute_log_prob(inputs)["old_log_probs"].values(), policy.values())


def test_a_policy_with_an_adapter_is_its_own_reference(tiny_model):
    """No second model: what the reference gives is the policy without its adapter, also for verl's own call."""
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true")
    worker = make_worker(tiny_model, *lora, role="actor_rollout")
    assert worker.ref is None
    inputs = tu.get_keys(tiny.make_batch(8), ["input_ids", "responses"])
    before = worker.compute_ref_log_prob(inputs)["ref_log_prob"].values()
    assert torch.equal(before, worker.compute_log_prob(inputs)["old_log_probs"].values())
    worker.update_actor(batch(worker))
    moved = worker.compute_log_prob(inputs)["old_log_probs"].values()
    assert not torch.allclose(moved, before)
    assert torch.equal(worker.compute_ref_log_prob(inputs)["ref_log_prob"].values(), before)
    without = tu.assign_non_tensor_whole(inputs.copy(), {"no_lora_adapter": True})
    assert torch.equal(worker.compute_log_prob(without)["old_log_probs"].values(), before)
    with pytest.raises(ContractError, match="no reference policy"):
        make_worker(tiny_model, role="actor_rollout").compute_ref_log_prob(inputs)


def test_a_reference_of_its_own_says_what_the_one_in_the_policys_worker_says(worker, tiny_model):
    inputs = tu.get_keys(tiny.make_batch(8), ["input_ids", "responses"])
    alone = make_worker(tiny_model, role="ref")
    assert alone.actor is None and alone.weights is None
    expected = worker.compute_ref_log_prob(inputs)["ref_log_prob"].values()
    assert torch.equal(alone.compute_ref_log_prob(inputs)["ref_log_prob"].values(), expected)
    with pytest.raises(ContractError, match="has no actor"):
        alone.compute_log_prob(inputs)


def test_an_on_policy_update_starts_at_ratio_one_and_reports_typed_metrics(worker):
    data = batch(worker)
    lengths = tu.nested_lengths(data["responses"])
    data.set("ref_log_prob", tu.nested_from_values(data["old_log_probs"].values().clone(), lengths))
    out = metrics_of(worker.update_actor(data))
    assert out["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert out["actor/pg_clipfrac"] == 0
    assert out["kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert out["grad_norm"] > 0 and out["skipped_steps"] == 0
    assert out["lr"] == pytest.approx(1e-3)
    assert out["perf/cpu_memory_used_gb"] > 0
    assert "mfu" not in out  # a CPU has no known peak
    assert {"loss", "actor/pg_loss", "actor/entropy_loss", "actor/pg_clipfrac_lower"} <= set(out)


def test_a_fused_update_is_the_update_after_a_log_prob_pass(tiny_model):
    inputs = tu.get_keys(tiny.make_batch(8), ["input_ids", "responses"])
    apart, fused = (make_worker(tiny_model, role="actor_rollout") for _ in range(2))
    expected = apart.compute_log_prob(inputs)
    numbers = metrics_of(apart.update_actor(batch(apart)))
    data = tiny.make_batch(8)
    data.pop("old_log_probs", None)
    options = {"mini_batch_size": 8, "temperature": 1.0, "fuse_old_log_prob": True}
    out = fused.update_actor(tu.assign_non_tensor_whole(data, options))
    for name in ("old_log_probs", "entropy"):
        torch.testing.assert_close(out[name].values(), expected[name].values(), rtol=1e-5, atol=1e-5)
        assert torch.equal(tu.nested_lengths(out[name]), tu.nested_lengths(data["responses"]))
    found = {name: metric.aggregate() for name, metric in tu.get(out, "metrics").items()}
    assert found["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-4)
    assert found["actor/pg_loss"] == pytest.approx(numbers["actor/pg_loss"], abs=1e-5)
    assert found["actor/ppo_kl"] == 0.0
    for (_, a), (_, b) in zip(
        apart.actor.engine.get_per_tensor_param()[0], fused.actor.engine.get_per_tensor_param()[0], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_fused_update_of_several_steps_is_refused(worker):
    data = batch(worker, mini_batch_size=4, fuse_old_log_prob=True)
    with pytest.raises(ContractError, match="one optimizer step"):
        worker.update_actor(data)


def test_an_update_without_old_log_probs_is_refused(worker):
    data = batch(worker)
    data.pop("old_log_probs")
    with pytest.raises(ContractError, match="the loss needs old_log_probs"):
        worker.update_actor(data)


def test_mini_batches_and_epochs_are_optimizer_steps_and_one_schedule_step(tiny_model):
    worker = make_worker(tiny_model, "actor_rollout_ref.actor.optim.lr_warmup_steps=4", role="actor_rollout")
    engine = worker.actor.engine
    calls = []
    engine.optimizer.register_step_post_hook(lambda *_: calls.append(engine.optimizer.param_groups[0]["lr"]))
    out = worker.update_actor(batch(worker, rows=8, mini_batch_size=4, epochs=3))
    assert len(calls) == 6
    assert set(calls) == {0.0}
    assert metrics_of(out)["lr"] == pytest.approx(1e-3 / 4)
    assert len(tu.get(out, "metrics")["grad_norm"].values) == 6


def test_shuffling_is_seeded(tiny_model):
    results = []
    for seed in (1, 1, 2):
        worker = make_worker(tiny_model, role="actor_rollout")
        worker.update_actor(batch(worker, mini_batch_size=2, seed=seed, dataloader_kwargs={"shuffle": True}))
        results.append([t.clone() for _, t in worker.actor.engine.get_per_tensor_param()[0]])
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(results[0], results[2], strict=True))


def test_a_gradient_that_is_not_finite_skips_the_step(tiny_model, caplog):
    worker = make_worker(tiny_model, role="actor_rollout")
    before = [t.clone() for _, t in worker.actor.engine.get_per_tensor_param()[0]]
    data = batch(worker)
    data.set("advantages", tu.nested_like(torch.full_like(data["advantages"].values(), math.inf), data["advantages"]))
    out = metrics_of(worker.update_actor(data))
    assert out["skipped_steps"] == 1
    assert math.isnan(out["grad_norm"])
    assert "this optimizer step is left out" in caplog.text
    after = [t for _, t in worker.actor.engine.get_per_tensor_param()[0]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    "options", [{"mini_batch_size": 3}, {"mini_batch_size": None}, {"mini_batch_size": None, "num_mini_batch": 5}]
)
def test_sizes_that_do_not_divide_are_refused(worker, options):
    with pytest.raises(ContractError, match="mini_batch"):
        worker.update_actor(batch(worker, **options))


def test_the_norm_mode_does_not_depend_on_the_split(tiny_model):
    worker = make_worker(
        tiny_model,
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.rollout.response_length=12",
        role="actor_rollout",
    )
    assert worker.actor.loss_fn.keywords["config"].loss_scale_factor == 12


def test_squared_probabilities_are_written_when_asked_for(worker):
    data = tu.get_keys(tiny.make_batch(4), ["input_ids", "responses"])
    assert set(worker.compute_log_prob(data).keys()) - {"metrics"} == {"old_log_probs", "entropy"}
    asked = worker.compute_log_prob(tu.assign_non_tensor_whole(data.copy(), {"calculate_sum_pi_squared": True}))
    squares, entropy = asked["sum_pi_squared"], asked["entropy"]
    assert squares.dtype == torch.float32
    assert tu.nested_lengths(squares).tolist() == tu.nested_lengths(data["responses"]).tolist()
    # Jensen: sum p^2 >= exp(-entropy)
    assert bool((tu.nested_values(squares) >= torch.exp(-tu.nested_values(entropy)) - 1e-6).all())


def test_the_share_of_the_peak_is_reported_where_device_and_model_are_known(worker, monkeypatch):
    monkeypatch.setattr(training_worker, "get_device_flops", lambda unit: 1e9)
    reported = {}
    merge_worker_metrics(reported, tu.get(worker.update_actor(batch(worker)), "metrics"), "actor")
    assert reported["perf/mfu/actor"].aggregate() > 0 and "actor/mfu" not in reported
    assert worker.actor._mfu(flops=6e9, seconds=2.0, forward_only=False) == 3.0
    assert worker.actor._mfu(flops=6e9, seconds=2.0, forward_only=True) == 1.0
    assert worker.actor._mfu(flops=0.0, seconds=2.0, forward_only=False) is None


def test_roles_have_only_their_parts(tiny_model):
    worker = make_worker(tiny_model, role="ref")
    assert worker.actor is None
    with pytest.raises(ContractError, match="no actor"):
        worker.update_actor(tiny.make_batch(2))
    actor = make_worker(tiny_model, role="actor")
    assert actor.weights is None and actor.ref is None
    with pytest.raises(ContractError, match="no reference"):
        actor.compute_ref_log_prob(tiny.make_batch(2))
    with pytest.raises(ContractError, match="sends no weights"):
        asyncio.run(actor.update_weights(1))
    with pytest.raises(ConfigError, match="role"):
        make_worker(tiny_model, role="critic")


def test_weights_go_to_the_bound_server(worker):
    class Sender:
        async def send(self, params, server, version):
            self.got = {name: t.clone() for name, t in params}, server, version

    sender = Sender()
    real, worker.weights._sender = worker.weights._sender, sender
    worker.bind_rollout(["server"])
    asyncio.run(worker.update_weights(global_steps=7))
    params, server, version = sender.got
    asyncio.run(worker.update_weights(global_steps=8, ranks=[5]))
    assert sender.got[1] is None, "this rank only gathers"
    worker.weights._sender = real
    assert (server, version) == ("server", 7)
    assert "model.embed_tokens.weight" in params and "lm_head.weight" not in params
    with pytest.raises(ContractError, match="1 ranks"):
        worker.bind_rollout([None, None])


def test_weights_go_through_the_configured_engine(tiny_model, tmp_path):
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    options = [
        f"{engine}.backend=disk",
        f"+{engine}.engine_kwargs.disk.folder={tmp_path}",
        f"{engine}.keep_fp32=['*norm*']",
    ]
    worker = make_worker(tiny_model, *options, "actor_rollout_ref.rollout.dtype=bfloat16", role="actor_rollout")
    asyncio.run(worker.execute_checkpoint_engine("prepare"))
    receipt = asyncio.run(worker.update_weights(3))
    ((metas, _),) = worker.weights.checkpoint_engine.stored_buckets(3)
    assert receipt.version == 3 and receipt.tensor_count == len(metas)
    assert {meta.dtype for meta in metas if "norm" in meta.name} == {"float32"}
    assert {meta.dtype for meta in metas if "norm" not in meta.name} == {"bfloat16"}
    with pytest.raises(ConfigError, match="backend=disk"):
        asyncio.run(worker.update_weights(4, mode="broadcast"))


def test_the_canary_is_the_policys_own_log_prob(worker):
    canary, dtype = worker.canary()
    ids = torch.tensor(canary.token_ids)
    data = tu.get_keys(tiny.make_batch(1), ["input_ids", "responses"])
    data["input_ids"] = torch.nested.as_nested_tensor([ids], layout=torch.jagged)
    data["responses"] = torch.nested.as_nested_tensor([ids[1:]], layout=torch.jagged)
    expected = worker.compute_log_prob(data)["old_log_probs"].values()
    torch.testing.assert_close(torch.tensor(canary.log_probs), expected)
    assert dtype == "float32"


def test_a_saved_worker_goes_on_exactly(tiny_model, tmp_path):
    first = make_worker(tiny_model, role="actor_rollout")
    first.update_actor(batch(first))
    first.save_checkpoint(str(tmp_path / "actor"), None, 1, None)
    data = batch(first, seed=1)
    first.update_actor(data)
    second = make_worker(tiny_model, role="actor_rollout")
    second.load_checkpoint(str(tmp_path / "actor"))
    second.update_actor(data)
    for (name, a), (_, b) in zip(*(w.actor.engine.get_per_tensor_param()[0] for w in (first, second)), strict=True):
        assert torch.equal(a, b), name


def test_init_model_leaves_the_config_as_it_was(tiny_model):
    config = worker_config(tiny_model)
    before = OmegaConf.to_container(config)
    worker = ActorRolloutRefWorker(config, "actor_rollout_ref", context=WorkerContext.single())
    worker.init_model()
    assert OmegaConf.to_container(config) == before


def test_every_call_declares_what_it_reads_and_writes():
    declared = dict(registered_methods(ActorRolloutRefWorker))
    assert declared["compute_log_prob"]["writes"] == ("old_log_probs", "entropy")
    assert declared["compute_log_prob"]["optional_writes"] == ("sum_pi_squared",)
    assert declared["compute_ref_log_prob"]["writes"] == ("ref_log_prob",)
    assert {"advantages", "response_mask"} <= set(declared["update_actor"]["reads"])
    assert "old_log_probs" in declared["update_actor"]["optional_reads"]
    assert declared["compute_ref_log_prob"]["mesh"] == "ref"
    assert not declared["update_weights"]["blocking"]
