"""Tokens, log-probabilities and stop reasons of any engine are those of the plain model."""

from __future__ import annotations

import contract_engines as engines
import pytest
import rollout_tiny as tiny
import torch
from contract_replica import expect_log_probs

from rlflow.utils.errors import ContractError, DeadlineError

GREEDY = {"temperature": 0.0, "logprobs": True, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "logprobs": True, "max_tokens": 12, "ignore_eos": True, "seed": 11}


def test_it_says_what_it_is(served):
    import asyncio

    facts = asyncio.run(served.call("ready"))
    assert facts["pid"] > 0 and facts["max_model_len"] == engines.MAX_MODEL_LEN
    assert facts["max_num_seqs"] == engines.MAX_NUM_SEQS and facts["dtype"] == "torch.float32"
    status = asyncio.run(served.call("status"))
    assert status["replica_rank"] == 0 and status["running"] == status["waiting"] == 0
    assert status["paused"] is status["asleep"] is False


def test_greedy_tokens_are_those_of_transformers(served):
    """More requests than fit at once, short and long, together."""
    prompts = [
        *tiny.prompts(engines.MAX_NUM_SEQS + 2, seed=1),
        *tiny.prompts(1, seed=2, low=engines.LONG_PROMPT, high=301),
    ]
    outputs = served.generate_all(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == engines.greedy(served.model, prompt, 12)
        assert output.stop_reason == "length"
        expect_log_probs(served, prompt, output)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.4])
def test_log_probs_are_those_of_the_distribution_that_was_sampled(served, temperature):
    prompt = tiny.prompts(1, seed=3)[0]
    output = served.generate(prompt, {**SAMPLED, "temperature": temperature})
    expect_log_probs(served, prompt, output, temperature)


def test_log_probs_come_only_when_asked_for(served):
    output = served.generate([5, 6], {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True})
    assert output.log_probs is None and len(output.token_ids) == 3


def test_the_models_own_generation_config_changes_nothing(served):
    """It asks for a temperature of 0.2, truncation and a penalty: see `contract_engines.save_model`."""
    prompt = tiny.prompts(1, seed=4)[0]
    output = served.generate(prompt, {"logprobs": True, "max_tokens": 30, "ignore_eos": True, "seed": 1})
    expect_log_probs(served, prompt, output)
    table = _log_softmax(served, prompt, output.token_ids)
    ranks = (table > table.gather(1, torch.tensor(output.token_ids)[:, None])).sum(1)
    assert int(ranks.max()) >= 2, "all tokens are among the two likeliest: top_k of the generation config was used"


def test_a_sequence_ends_with_its_end_of_sequence_token(served):
    expected = engines.greedy(served.model, engines.EOS_PROMPT, 12)
    params = {"temperature": 0.0, "logprobs": True, "max_tokens": 12}
    output = served.generate(engines.EOS_PROMPT, params)
    assert output.stop_reason == "stop" and output.extra_fields["raw_stop_reason"]
    length = len(output.token_ids)
    assert 3 < length < 12 and output.token_ids == expected[:length]
    assert len(output.log_probs) == length
    whole = served.generate(engines.EOS_PROMPT, {**params, "ignore_eos": True})
    assert whole.stop_reason == "length" and whole.token_ids == expected


def test_a_stop_token_of_the_request_ends_it_and_is_part_of_it(served):
    prompt = tiny.prompts(1, seed=5)[0]
    whole = engines.greedy(served.model, prompt, 12)
    stop = next(i for i, token in enumerate(whole) if i >= 2 and token not in whole[:i])
    output = served.generate(prompt, {**GREEDY, "stop_token_ids": [whole[stop]]})
    assert output.token_ids == whole[: stop + 1] and output.stop_reason == "stop"
    assert len(output.log_probs) == stop + 1


def test_a_seed_fixes_the_tokens_whatever_runs_beside_it(served):
    prompt = tiny.prompts(1, seed=6)[0]
    alone = served.generate(prompt, SAMPLED)
    others = [served.generate(prompt, {**SAMPLED, "seed": seed}).token_ids for seed in (12, 13)]
    together = served.generate_all([prompt, *tiny.prompts(4, seed=7)], SAMPLED)
    assert together[0].token_ids == alone.token_ids
    assert alone.token_ids not in others and others[0] != others[1]


def test_without_a_seed_equal_requests_differ(served):
    params = {key: value for key, value in SAMPLED.items() if key != "seed"}
    outputs = served.generate_all([[5, 6, 7]] * 4, params)
    assert len({tuple(output.token_ids) for output in outputs}) > 1


def test_top_k_samples_among_the_likeliest_and_reports_that_distribution(served):
    prompt = tiny.prompts(1, seed=8)[0]
    params = {**SAMPLED, "max_tokens": 40}
    assert served.generate(prompt, {**params, "top_k": 1}).token_ids == engines.greedy(served.model, prompt, 40)
    output = served.generate(prompt, {**params, "top_k": 3})
    table = _log_softmax(served, prompt, output.token_ids)
    likeliest = table.topk(3, dim=-1)
    chosen = torch.tensor(output.token_ids)[:, None]
    assert bool((likeliest.indices == chosen).any(-1).all())
    expected = table.gather(1, chosen)[:, 0] - likeliest.values.logsumexp(-1)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=served.case.log_prob_atol, rtol=0)


def test_top_p_samples_in_the_smallest_set_with_that_mass(served):
    prompt = tiny.prompts(1, seed=9)[0]
    output = served.generate(prompt, {**SAMPLED, "max_tokens": 40, "top_p": 0.4})
    probs = _log_softmax(served, prompt, output.token_ids).exp()
    chosen = probs.gather(1, torch.tensor(output.token_ids)[:, None])
    likelier = torch.where(probs > chosen, probs, 0.0).sum(-1)
    assert float(likelier.max()) < 0.4 + 1e-4


def test_a_repetition_penalty_is_that_of_transformers(served):
    prompt = tiny.prompts(1, seed=10)[0]
    output = served.generate(prompt, {**GREEDY, "max_tokens": 20, "repetition_penalty": 1.4})
    assert output.token_ids == engines.greedy(served.model, prompt, 20, penalty=1.4)
    assert output.token_ids != engines.greedy(served.model, prompt, 20)


def test_the_token_budget_is_the_requests_else_the_configured_lengths(served):
    free = {"temperature": 0.0, "ignore_eos": True}
    assert len(served.generate([5], {**free, "max_new_tokens": 7}).token_ids) == 7
    long = [5] * (engines.MAX_MODEL_LEN - 4)
    output = served.generate(long, {**free, "max_tokens": 50})
    assert len(output.token_ids) == 4 and output.stop_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "match"),
    [
        ([5], {"beam_width": 4}, "beam_width"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([], {}, "cannot be continued"),
        ([5] * engines.MAX_MODEL_LEN, {}, "cannot be continued"),
        ([5, tiny.VOCAB], {}, "vocabulary"),
        ([5, -1], {}, "vocabulary"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(served, prompt, params, match):
    with pytest.raises(ContractError, match=match):
        served.generate(prompt, params)


def test_a_request_over_its_deadline_fails_and_is_not_computed_on(served):
    import asyncio

    with pytest.raises(DeadlineError):
        served.generate([5], {**GREEDY, "max_tokens": 600}, timeout_s=0.05)

    async def idle():
        while (await served.call("status"))["running"]:
            pass

    asyncio.run(asyncio.wait_for(idle(), 30))


def test_prompt_log_probs_are_those_of_the_plain_model(served):
    import asyncio

    if not hasattr(served.server, "prompt_log_probs"):
        pytest.skip(f"the {served.case.name} server has no prompt_log_probs")
    for length in (2, 20, engines.LONG_PROMPT):
        ids = tiny.prompts(1, seed=length, low=length, high=length + 1)[0]
        got = asyncio.run(served.call("prompt_log_probs", ids))
        expected = tiny.log_probs_of(served.model, ids[:1], ids[1:])
        torch.testing.assert_close(torch.tensor(got), expected, atol=served.case.log_prob_atol, rtol=0)


def _log_softmax(served, prompt: list[int], response: list[int]) -> torch.Tensor:
    """The plain model's table of log-probabilities, [response, vocab]."""
    with torch.no_grad():
        logits = served.model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, dim=-1)
