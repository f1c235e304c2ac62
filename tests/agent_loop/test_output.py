from __future__ import annotations

import pytest
import torch

from rlflow.agent_loop import AgentLoopMetrics, AgentLoopOutput
from rlflow.utils.errors import ContractError


def output(response=(4, 5, 6), mask=None, **fields):
    response = list(response)
    return AgentLoopOutput(
        prompt_ids=[1, 2, 3],
        response_ids=response,
        response_mask=[1] * len(response) if mask is None else mask,
        metrics=AgentLoopMetrics(),
        **fields,
    )


def test_a_row_has_its_required_fields_even_when_the_loop_set_none_of_them():
    row = output().as_dict()
    assert set(row) == {"prompts", "responses", "response_mask", "num_turns", "metrics", "extra_fields"}
    assert row["prompts"].dtype == row["responses"].dtype == row["response_mask"].dtype == torch.int64
    assert row["metrics"] == {"generate_sequences": 0.0, "tool_calls": 0.0, "compute_score": 0.0, "num_preempted": -1}


@pytest.mark.parametrize(("mask", "place"), [([1, 1, 1], 2), ([1, 1, 0], 1), ([1, 0, 0], 0), ([0, 0, 0], 2)])
def test_the_score_sits_on_the_last_token_the_model_wrote(mask, place):
    scores = output(mask=mask, reward_score=2.0).as_dict()["rm_scores"]
    assert scores.dtype == torch.float32 and scores.sum() == 2.0 and scores[place] == 2.0


def test_an_empty_response_has_nowhere_to_put_a_score():
    assert output(response=(), reward_score=2.0).as_dict()["rm_scores"].shape == (0,)


def test_log_probs_are_float32():
    assert output(response_logprobs=[-1.0, 0.0, -2.0]).as_dict()["rollout_log_probs"].dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mask": [1]}, "response_mask has 1 entries for 3"),
        ({"response_logprobs": [0.0]}, "response_logprobs has 1 entries for 3"),
        ({"response": range(9)}, "over rollout.response_length=8"),
    ],
)
def test_parts_that_do_not_fit_are_named(wrong, message):
    with pytest.raises(ContractError, match=f"my_loop.*{message}"):
        output(**wrong).check(8, "my_loop")
