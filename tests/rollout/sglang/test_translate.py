"""Sampling parameters and answers, between rlflow's vocabulary and SGLang's. Needs no SGLang."""

from __future__ import annotations

import pytest

from rlflow.workers.rollout.base import RolloutError, SamplingParams
from rlflow.workers.rollout.sglang import translate

EOS, VOCAB = frozenset({2}), 100


def _sampling(**params):
    return translate.sampling_arguments(
        SamplingParams.from_dict(params), 7, eos_token_ids=EOS, vocab_size=VOCAB, seed=5
    )


def _answer(tokens=(4, 5), **meta):
    rows = [(-0.5 * (i + 1), token, None) for i, token in enumerate(tokens)]
    spans = [{"version": "3", "start": 0, "end": len(tokens)}]
    reason = {"type": "length", "length": 2}
    meta = {"id": "r", "output_token_logprobs": rows, "weight_versions": spans, "finish_reason": reason} | meta
    return {"output_ids": list(tokens), "meta_info": meta}


def test_nothing_is_left_to_the_models_generation_config():
    """Every parameter that a generation config can set is given."""
    given = _sampling()
    assert {"temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens"} <= set(given)
    assert (given["temperature"], given["top_p"], given["top_k"]) == (1.0, 1.0, -1)


def test_end_of_sequence_tokens_are_stop_tokens_unless_ignored():
    assert _sampling(stop_token_ids=[9])["stop_token_ids"] == [2, 9]
    assert _sampling()["ignore_eos"] is False
    free = _sampling(ignore_eos=True)
    assert free["ignore_eos"] is True and free["stop_token_ids"] == []


def test_stop_tokens_of_a_request_survive_ignore_eos():
    """SGLang ignores all stop tokens of a request that ignores the end of sequence: it must not be told to."""
    given = _sampling(ignore_eos=True, stop_token_ids=[9])
    assert given["ignore_eos"] is False and given["stop_token_ids"] == [9]


@pytest.mark.parametrize(
    ("params", "truncated", "top_k"),
    [
        ({}, False, -1),
        ({"top_k": 5}, True, 5),
        ({"top_k": VOCAB}, False, -1),
        ({"top_p": 0.9}, True, VOCAB),
        ({"top_p": 0.9, "top_k": 5}, True, 5),
        ({"top_p": 0.9, "temperature": 0.0}, False, VOCAB),
    ],
)
def test_a_truncated_distribution_has_a_finite_top_k(params, truncated, top_k):
    """SGLang reports log-probs of the support only for one."""
    assert translate.is_truncated(SamplingParams.from_dict(params), VOCAB) is truncated
    assert _sampling(**params)["top_k"] == top_k


def test_log_probs_of_a_truncated_distribution_are_its_own():
    answer = _answer(output_token_sampling_logprobs=[-0.1, -0.2])
    assert translate.log_probs_of(answer, SamplingParams(logprobs=True, top_k=3), VOCAB) == [-0.1, -0.2]
    assert translate.log_probs_of(answer, SamplingParams(logprobs=True), VOCAB) == [-0.5, -1.0]


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [(-0.5, 4, None)]},
        {"output_token_logprobs": []},
        {"output_token_logprobs": [(-0.5, 4, None), (-0.5, 6, None)]},
    ],
    ids=["fewer", "none", "of another token"],
)
def test_log_probs_that_are_not_those_of_the_tokens_are_an_error(meta):
    with pytest.raises(RolloutError, match="log-probs for 2 tokens of request r"):
        translate.log_probs_of(_answer(**meta), SamplingParams(logprobs=True), VOCAB)


def test_prompt_log_probs_leave_out_the_first_token():
    answer = _answer(input_token_logprobs=[(None, 7, None), (-1.5, 8, None)])
    assert translate.prompt_log_probs_of(answer, [7, 8]) == [-1.5]
    with pytest.raises(RolloutError, match="prompt log-probs"):
        translate.prompt_log_probs_of(answer, [7, 9])


def test_stop_reasons_keep_what_sglang_said():
    assert translate.stop_reason_of(_answer()) == ("length", "length")
    stop = _answer(finish_reason={"type": "stop", "matched": 2})
    assert translate.stop_reason_of(stop) == ("stop", "stop: 2")
    abort = _answer(finish_reason={"type": "abort", "message": "Aborted"})
    assert translate.stop_reason_of(abort) == ("abort", "abort: Aborted")
    with pytest.raises(RolloutError, match="unknown reason"):
        translate.stop_reason_of(_answer(finish_reason={"type": "error"}))


def test_every_token_has_a_weight_version():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    assert translate.version_spans_of(_answer(weight_versions=spans)) == [[3, 1], [4, 1]]
    with pytest.raises(RolloutError, match="1 of 2 tokens"):
        translate.version_spans_of(_answer(weight_versions=spans[:1]))


def test_an_answer_in_pieces_has_one_span_a_version():
    output = translate.token_output([1, 2, 3], [], SamplingParams(), "stop", "stop: 3", [[3, 1], [3, 1], [4, 1]], 9)
    assert output.extra_fields == {
        "global_steps": 4,
        "raw_stop_reason": "stop: 3",
        "version_spans": [[3, 2], [4, 1]],
    }
    assert output.log_probs is None
