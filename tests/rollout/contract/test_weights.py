"""After a sync an engine is the new model in everything it says, and before a good one it says nothing."""

from __future__ import annotations

import asyncio

import contract_engines as engines
import pytest
import rollout_tiny as tiny
import torch
from contract_replica import changed, expect_log_probs, parameters

from rlflow.utils.errors import ContractError, WeightSyncError

GREEDY = {"temperature": 0.0, "logprobs": True, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {**GREEDY, "temperature": 1.0, "seed": 5}


def test_a_sync_brings_the_new_models_tokens_and_log_probs(served):
    prompt = tiny.prompts(1, seed=30)[0]
    before = served.generate(prompt, GREEDY)
    receipt = served.sync(3, changed(served.model, 1))
    sent = parameters(served.model)
    assert receipt.version == 3 and receipt.tensor_count == len(sent)
    assert receipt.total_bytes == sum(tensor.numel() * 4 for _, tensor in sent)
    assert asyncio.run(served.call("weight_version")) == 3
    after = served.generate(prompt, GREEDY)
    assert after.extra_fields["global_steps"] == 3
    assert after.token_ids == engines.greedy(served.model, prompt, 12) != before.token_ids
    expect_log_probs(served, prompt, after)
    sampled = served.generate(prompt, SAMPLED)
    expect_log_probs(served, prompt, sampled)


def test_the_prefix_cache_does_not_cross_versions(served):
    """The prompt is longer than a block of any cache, and is generated from twice before the sync."""
    prompt = tiny.prompts(1, seed=31, low=engines.LONG_PROMPT, high=engines.LONG_PROMPT + 1)[0]
    before = [served.generate(prompt, GREEDY) for _ in range(2)]
    assert before[0].token_ids == before[1].token_ids
    served.sync(4, changed(served.model, 2))
    after = served.generate(prompt, GREEDY)
    assert after.token_ids == engines.greedy(served.model, prompt, 12) != before[0].token_ids
    expect_log_probs(served, prompt, after)


def test_a_sync_in_many_small_buckets_and_in_another_order(served):
    model = changed(served.model, 3)
    megabytes = served.config.rollout.checkpoint_engine.update_weights_bucket_megabytes
    served.config.rollout.checkpoint_engine.update_weights_bucket_megabytes = 0
    try:
        served.sync(5, model, tensors=list(reversed(parameters(model))))
    finally:
        served.config.rollout.checkpoint_engine.update_weights_bucket_megabytes = megabytes
    prompt = tiny.prompts(1, seed=32)[0]
    expect_log_probs(served, prompt, served.generate(prompt, SAMPLED))


def test_a_sync_asleep_wakes_with_the_new_weights(served):
    model = changed(served.model, 4)
    prompt = tiny.prompts(1, seed=33)[0]

    async def scenario():
        await served.call("sleep")
        await served.send(parameters(model), 6)
        await served.call("wake_up")
        await served.call("resume_generation")

    asyncio.run(scenario())
    served.model = model
    output = served.generate(prompt, GREEDY)
    assert output.extra_fields["global_steps"] == 6
    expect_log_probs(served, prompt, output)


def test_weights_may_not_change_while_it_serves(served):
    with pytest.raises(ContractError, match="pause it"):
        asyncio.run(served.send(parameters(served.model), 7))
    assert served.generate([5], GREEDY).extra_fields["global_steps"] == 6


def test_a_version_can_be_relabelled(served):
    asyncio.run(served.call("set_global_steps", 9))
    assert asyncio.run(served.call("weight_version")) == 9
    assert served.generate([5], GREEDY).extra_fields["global_steps"] == 9


@pytest.fixture(scope="module")
def cold(launch):
    """Another replica, without weights of its own; the tests below use it in order."""
    return launch(load_format="dummy")


def test_a_replica_without_weights_refuses(cold):
    with pytest.raises(ContractError, match="before the first weight sync"):
        cold.generate([5], GREEDY)
    assert asyncio.run(cold.call("weight_version")) is None


def test_a_cold_and_a_warm_replica_agree(served, cold):
    """The warm one has had several versions, and prompts of each in its caches."""
    prompts = [
        *tiny.prompts(3, seed=34),
        *tiny.prompts(1, seed=31, low=engines.LONG_PROMPT, high=engines.LONG_PROMPT + 1),
    ]
    served.sync(10, changed(served.model, 5))
    cold.sync(10, served.model)
    for params in (GREEDY, SAMPLED):
        warm_outputs, cold_outputs = served.generate_all(prompts, params), cold.generate_all(prompts, params)
        for warm, other in zip(warm_outputs, cold_outputs, strict=True):
            assert warm.token_ids == other.token_ids
            assert warm.log_probs == pytest.approx(other.log_probs, abs=served.case.log_prob_atol)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("drop", "model.layers.1.mlp.up_proj.weight"),
        ("rename", "model.somebody.else"),
        ("shape", "model.layers.1.mlp.up_proj.weight"),
        ("raise", "gathering failed"),
    ],
)
def test_after_a_failed_update_it_refuses_until_one_succeeds(cold, what, match):
    broken = changed(cold.model, 6)
    with pytest.raises((WeightSyncError, RuntimeError), match=match):
        cold.sync(11, tensors=_faulty(broken, what, "model.layers.1.mlp.up_proj.weight"))
    prompt = tiny.prompts(1, seed=35)[0]
    if asyncio.run(cold.call("weight_version")) is None:
        with pytest.raises(ContractError, match="weight update did not finish"):
            cold.generate(prompt, GREEDY)
    else:  # nothing had been touched: then it still serves the old weights, and only those
        expect_log_probs(cold, prompt, cold.generate(prompt, GREEDY))
    cold.sync(12, changed(cold.model, 7))
    output = cold.generate(prompt, GREEDY)
    assert output.extra_fields["global_steps"] == 12
    expect_log_probs(cold, prompt, output)


def _faulty(model, what, where):
    for name, tensor in parameters(model):
        if name != where:
            yield name, tensor
        elif what == "rename":
            yield "model.somebody.else", tensor
        elif what == "shape":
            yield name, torch.zeros(3, 5)
        elif what == "raise":
            raise RuntimeError("gathering failed")
