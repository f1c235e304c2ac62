"""The gradient of a mini-batch is one number, whatever the way to compute it."""

from __future__ import annotations

from functools import partial

import pytest
import tiny
import torch
from rank_jobs import build, full_grads
from torch.distributed.fsdp import FSDPModule

from rlflow.config import FSDPActorConfig
from rlflow.trainer.ppo import core_algos
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.workers.losses import ppo_loss

KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}


@pytest.fixture(autouse=True)
def _one_process(single_process_group):
    """All engines here run in this process."""


def _relative(a, b):
    norm = torch.sqrt(sum(t.double().square().sum() for t in b.values()))
    return float(torch.sqrt(sum((a[n].double() - b[n].double()).square().sum() for n in b)) / norm)


def _naive(path, data, loss_config, temperature=1.0):
    """Row by row with the plain transformers model, logits whole, the loss from its definition."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rows = [{k: data[k][i] for k in data.keys()} for i in range(data.batch_size[0])]
    width = max(len(r["responses"]) for r in rows)
    columns = {k: [] for k in ("log_probs", "entropy", "response_mask", "old_log_probs", "advantages", "ref_log_prob")}
    log_probs = []
    for r in rows:
        n = len(r["responses"])
        logits = model(r["input_ids"][None]).logits[0, -n - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        lp = log_p.gather(1, r["responses"][:, None])[:, 0]
        log_probs.append(lp.detach())
        r = r | {"log_probs": lp, "entropy": -(log_p.exp() * log_p).sum(-1)}
        for k in columns:
            columns[k].append(torch.nn.functional.pad(r[k].float(), (0, width - n)))
    c = {k: torch.stack(v) for k, v in columns.items()}
    mask, mode = c["response_mask"], loss_config.loss_agg_mode
    loss, _ = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=c["old_log_probs"],
        log_prob=c["log_probs"],
        advantages=c["advantages"],
        response_mask=mask.bool(),
        loss_agg_mode=mode,
        config=loss_config,
    )
    loss = loss - loss_config.entropy_coeff * core_algos.agg_loss(c["entropy"], mask, mode)
    if loss_config.use_kl_loss:
        kl = core_algos.kl_penalty(c["log_probs"], c["ref_log_prob"], loss_config.kl_loss_type)
        loss = loss + loss_config.kl_loss_coef * core_algos.agg_loss(kl, mask, mode)
    loss.backward()
    return float(loss.detach()), log_probs, {f"hf_model.{n}": p.grad for n, p in model.named_parameters()}


def _ours(path, data, loss_config, options, **engine_options):
    engine = build(path, **engine_options)
    batch = tu.assign_non_tensor_whole(data.copy(), {"calculate_entropy": True} | options)
    with engine.train_mode():
        out = engine.forward_backward_batch(batch, partial(ppo_loss, config=loss_config))
        grads = full_grads(engine)
    return out, grads


WAYS = {
    "packed, prompts shared": {"share_prompts": True},
    "packed": {"share_prompts": False},
    "padded": {"use_remove_padding": False},
    "one row a micro-batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1},
    "three rows a micro-batch": {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 3},
    "padded, by tokens": {"use_remove_padding": False, "max_token_len_per_gpu": 45},
    "by tokens": {"max_token_len_per_gpu": 40},
    "by tokens, prompts shared": {"max_token_len_per_gpu": 40, "share_prompts": True},
}


@pytest.fixture(scope="module")
def naive(tiny_model):
    config = FSDPActorConfig(**KL)
    return _naive(tiny_model, tiny.make_batch(10), config, temperature=0.8)


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_does_not_depend_on_the_way(tiny_model, naive, way):
    loss, log_probs, grads = naive
    out, ours = _ours(tiny_model, tiny.make_batch(10), FSDPActorConfig(**KL), {"temperature": 0.8} | WAYS[way])
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
    assert _relative(ours, grads) < 1e-5
    for mine, expected in zip(out["model_output"]["log_probs"].unbind(), log_probs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert out["model_output"]["log_probs"].dtype == torch.float32


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_every_aggregation_is_exact_over_micro_batches(tiny_model, mode):
    config = FSDPActorConfig(loss_agg_mode=mode, loss_scale_factor=16.0)
    data = tiny.make_batch(10)
    plain = FSDPActorConfig(loss_agg_mode=mode, loss_scale_factor=16.0)
    object.__setattr__(plain, "global_batch_info", {"loss_scale_factor": 16.0})
    loss, _, grads = _naive(tiny_model, data, plain)
    for options in ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}, {"max_token_len_per_gpu": 50}):
        out, ours = _ours(tiny_model, data, config, options)
        assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
        assert _relative(ours, grads) < 1e-5


@pytest.mark.parametrize("recompute", [True, False])
def test_gradient_checkpointing_and_untied_heads_change_nothing(untied_model, recompute):
    config = FSDPActorConfig()
    loss, _, grads = _naive(untied_model, tiny.make_batch(6), config)
    _, ours = _ours(untied_model, tiny.make_batch(6), config, {"share_prompts": True}, recompute=recompute)
    assert _relative(ours, grads) < 1e-5


def test_the_entropy_bonus_moves_the_gradient_in_proportion(tiny_model):
    grads = [_ours(tiny_model, tiny.make_batch(6), FSDPActorConfig(entropy_coeff=c), {})[1] for c in (0.0, 0.1, 0.2)]
    once, twice = ({name: grads[i][name] - grads[0][name] for name in grads[0]} for i in (1, 2))
    assert all(bool(part.any()) for part in once.values())
    assert _relative({name: part / 2 for name, part in twice.items()}, once) < 1e-4


def test_padding_rows_weigh_nothing(tiny_model):
    data = tiny.make_batch(6)
    with_padding, grads = _ours(tiny_model, data, FSDPActorConfig(loss_agg_mode="seq-mean-token-mean"), {})
    without, expected = _ours(
        tiny_model, tu.slice_tensordict(data, 0, 5), FSDPActorConfig(loss_agg_mode="seq-mean-token-mean"), {}
    )
    assert sum(with_padding["loss"]) == pytest.approx(sum(without["loss"]), rel=1e-6)
    assert _relative(grads, expected) < 1e-6


def test_a_mini_batch_without_tokens_has_loss_zero(tiny_model):
    data = tiny.make_batch(4)
    mask = tu.nested_like(torch.zeros_like(tu.nested_values(data["response_mask"])), data["response_mask"])
    data.set("response_mask", mask)
    for mode in ("token-mean", "seq-mean-token-mean"):
        out, grads = _ours(tiny_model, data, FSDPActorConfig(loss_agg_mode=mode, **KL), {"micro_batch_size_per_gpu": 2})
        assert sum(out["loss"]) == 0
        assert all(bool((g == 0).all()) for g in grads.values())


def test_metrics_are_means_over_tokens_for_any_split(tiny_model):
    values = []
    for size in (10, 1):
        out, _ = _ours(
            tiny_model,
            tiny.make_batch(10),
            FSDPActorConfig(**KL),
            {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": size},
        )
        values.append({name: metric.aggregate() for name, metric in out["metrics"].items()})
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy_loss", "kl_loss"} <= set(values[0])
    for name, value in values[0].items():
        assert values[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_rows_of_different_temperature(tiny_model):
    data = tiny.make_batch(6)
    temperature = torch.linspace(0.5, 1.5, 6)
    batch = tu.assign_non_tensor_whole(data.copy(), {"calculate_entropy": True, "max_token_len_per_gpu": 40})
    batch.set("temperature", temperature)
    engine = build(tiny_model)
    out = engine.infer_batch(batch)["model_output"]["log_probs"].unbind()
    for i, row in enumerate(out):
        one = tu.assign_non_tensor_whole(tu.slice_tensordict(data, i, i + 1), {"temperature": float(temperature[i])})
        torch.testing.assert_close(engine.infer_batch(one)["model_output"]["log_probs"][0], row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"max_token_len_per_gpu": 3}, {"enable_routing_replay": True}]
)
def test_what_cannot_work_is_refused(tiny_model, options):
    engine = build(tiny_model)
    with pytest.raises(ContractError, match=next(iter(options)).split("_per")[0]):
        engine.infer_batch(tu.assign_non_tensor_whole(tiny.make_batch(4), options))


def test_squared_probabilities_do_not_depend_on_the_way(tiny_model):
    from transformers import AutoModelForCausalLM

    data = tiny.make_batch(10)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")
    expected = []
    for ids, response in zip(data["input_ids"].unbind(), data["responses"].unbind(), strict=True):
        logits = model(ids[None]).logits[0, -len(response) - 1 : -1] / 0.8
        expected.append(logits.softmax(-1).square().sum(-1).detach())
    engine = build(tiny_model)
    for way, options in WAYS.items():
        options = options | {"temperature": 0.8, "calculate_sum_pi_squared": True}
        out = engine.infer_batch(tu.assign_non_tensor_whole(data.copy(), options))["model_output"]
        assert set(out) == {"log_probs", "sum_pi_squared"}, way
        for mine, row in zip(out["sum_pi_squared"].unbind(), expected, strict=True):
            torch.testing.assert_close(mine, row, rtol=1e-4, atol=1e-6)


def test_the_chunk_limit_of_the_configuration_reaches_the_model(tiny_model):
    engine = build(tiny_model, entropy_from_logits_chunk_size=3)
    assert engine.module.chunk_limit == 3
    whole = build(tiny_model).infer_batch(tiny.make_batch(6))["model_output"]["log_probs"]
    cut = engine.infer_batch(tiny.make_batch(6))["model_output"]["log_probs"]
    torch.testing.assert_close(tu.nested_values(cut), tu.nested_values(whole), rtol=1e-5, atol=1e-5)
    everything = build(tiny_model, entropy_from_logits_chunk_size=3, entropy_from_logits_with_chunking=False)
    at_once = everything.infer_batch(tiny.make_batch(6))["model_output"]["log_probs"]
    torch.testing.assert_close(tu.nested_values(at_once), tu.nested_values(whole), rtol=1e-5, atol=1e-5)


def test_empty_responses_and_prompts_only(tiny_model):
    engine = build(tiny_model)
    rows = [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 7, 8, 9])]
    responses = [torch.zeros(0, dtype=torch.int64), torch.tensor([8, 9])]
    data = tu.get_tensordict({"input_ids": tu.nested_from_list(rows), "responses": tu.nested_from_list(responses)})
    for packed in (True, False):
        out = engine.infer_batch(tu.assign_non_tensor_whole(data.copy(), {"use_remove_padding": packed}))
        assert [len(r) for r in out["model_output"]["log_probs"].unbind()] == [0, 2]
    only_empty = tu.slice_tensordict(data, 0, 1)
    assert tu.nested_lengths(engine.infer_batch(only_empty)["model_output"]["log_probs"]).tolist() == [0]


def test_a_response_without_a_prompt_is_refused(tiny_model):
    ids = tu.nested_from_list([torch.tensor([5, 6, 7])])
    with pytest.raises(ContractError, match="at least one prompt token"):
        build(tiny_model).infer_batch(tu.get_tensordict({"input_ids": ids, "responses": ids}))


def test_bf16_compute_is_close_and_masters_stay_fp32(tiny_model):
    engine = build(tiny_model, dtype="bfloat16")
    assert all(p.dtype == torch.float32 for p in engine.module.parameters())
    data = tiny.make_batch(6)
    exact = build(tiny_model).infer_batch(data)["model_output"]["log_probs"]
    rough = engine.infer_batch(data)["model_output"]["log_probs"]
    assert rough.dtype == torch.float32
    assert float((tu.nested_values(exact) - tu.nested_values(rough)).abs().mean()) < 0.2


def test_a_single_rank_is_wrapped_only_to_compute_in_another_type(tiny_model):
    assert not isinstance(build(tiny_model).module, FSDPModule)
    assert isinstance(build(tiny_model, dtype="bfloat16").module, FSDPModule)


def test_a_rank_with_fewer_micro_batches_takes_part(tiny_model, run_ranks):
    """Rank 1 holds the short rows: it runs empty micro-batches so that the collectives meet.

    Of the policy its last two rows have no token that counts: they weigh nothing in the mean over rows, on either rank.
    The head of the critic has fewer rows than there are ranks.
    """
    options = {"max_token_len_per_gpu": 21, "use_remove_padding": False}
    policy = {"path": tiny_model, "seed": 8, "options": options, "masked": 2}
    policy["loss"] = {"loss_agg_mode": "seq-mean-token-mean"}
    critic = {"path": tiny_model, "seed": 8, "options": options, "critic": True}
    jobs = [("gradient", policy), ("gradient", critic)]
    one, two = run_ranks(1, "in_turn", jobs=jobs), run_ranks(2, "in_turn", jobs=jobs)
    for alone, together in zip(one, two, strict=True):
        assert len(set(together["micro"])) == 2, "the ranks should need different numbers of micro-batches"
        assert together["loss"] == pytest.approx(float(alone["loss"]), rel=1e-5)
        assert _relative(together["grads"], alone["grads"]) < 1e-5
    masks = tiny.make_batch(8, 8)["response_mask"].unbind()[:6]
    assert one[0]["counts"] == [sum(int(m.sum()) for m in masks), sum(bool(m.any()) for m in masks), 1]
    assert two[0]["counts"] == [*one[0]["counts"][:2], 2]
    for mine, theirs in zip(two[1]["values"], one[1]["values"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
