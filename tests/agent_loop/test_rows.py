from __future__ import annotations

import time

import pytest
import torch

from rlflow.agent_loop import AgentLoopMetrics, AgentLoopOutput
from rlflow.agent_loop.rows import build_rows
from rlflow.agent_loop.session import Session
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError

FIELDS = {
    "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs", "rm_scores",
    "uid", "session_id", "data_source", "reward_model", "raw_prompt", "extra_info", "index",
    "num_turns", "metrics", "extra_fields",
}  # fmt: skip


def output(response=(4, 5), score=1.0, **fields):
    response = list(response)
    fields.setdefault("response_logprobs", [-1.0] * len(response))
    return AgentLoopOutput(
        prompt_ids=[1, 2, 3],
        response_ids=response,
        response_mask=[1] * len(response),
        reward_score=score,
        metrics=AgentLoopMetrics(),
        **fields,
    )


def rows(*outputs, session=None, **options):
    options = {"with_log_probs": True, "with_scores": True, "invalid": None, **options}
    row = {"data_source": "s", "raw_prompt": [{"role": "user", "content": "x"}], "index": 0, "ability": "math"}
    return build_rows(outputs, row=row, session=session or Session("e0r0a0", 1), global_steps=9, **options)


def test_the_row_has_exactly_the_fields_of_the_contract():
    stored = rows(output())
    assert set(stored.fields.keys()) == FIELDS
    assert stored.keys == ["e0r0a0_1_0"]
    fields = stored.fields
    assert fields["input_ids"][0].tolist() == [1, 2, 3, 4, 5]
    assert fields["position_ids"][0].tolist() == [0, 1, 2, 3, 4]
    assert fields["loss_mask"][0].tolist() == fields["response_mask"][0].tolist() == [1, 1]
    assert fields["rm_scores"][0].tolist() == [0.0, 1.0]
    assert tu.get(fields, "data_source") == ["s"] and tu.get(fields, "reward_model") == [None]


def test_the_tag_has_lengths_step_and_versions():
    session = Session("e0r0a0", 1, min_global_steps=7, max_global_steps=8)
    (tag,) = rows(output(), session=session).tags
    assert tag == {
        "status": "success",
        "prompt_len": 3,
        "response_len": 2,
        "seq_len": 5,
        "global_steps": 9,
        "min_global_steps": 7,
        "max_global_steps": 8,
    }
    (tag,) = rows(output(extra_fields={"min_global_steps": 5})).tags
    assert (tag["min_global_steps"], tag["max_global_steps"]) == (5, 9)


def test_a_score_of_the_loops_own_is_noted_for_whoever_scores_later():
    later = {"with_scores": True, "scored_later": True}
    assert [tag["own_score"] for tag in rows(output(score=None), output(score=0.5), **later).tags] == [0.5, 0.5]
    for stored in (rows(output(score=None), with_scores=False, scored_later=True), rows(output(score=0.5))):
        assert "own_score" not in stored.tags[0]


def test_extra_fields_always_hold_what_later_stages_read():
    session = Session("u", 0, stop_reason="length", worker="agent_loop_worker_1")
    before = time.time()
    (extra,) = tu.get(rows(output(extra_fields={"mine": 1}), session=session).fields, "extra_fields")
    facts = extra.pop("session_facts")
    assert facts["worker"] == "agent_loop_worker_1"
    assert before - 60 < facts["started"] <= facts["ended"] <= time.time() and facts["ended"] >= before
    assert [extra] == [
        {
            "mine": 1,
            "global_steps": 9,
            "min_global_steps": 9,
            "max_global_steps": 9,
            "stop_reason": "length",
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {},
        }
    ]


def test_an_invalid_reward_masks_the_row_and_says_why():
    stored = rows(output(), invalid="no score within 30 s")
    assert stored.fields["response_mask"].sum() == stored.fields["loss_mask"].sum() == 0
    assert stored.fields["rm_scores"].sum() == 0
    assert stored.tags[0]["invalid"] == "no score within 30 s"
    assert tu.get(stored.fields, "extra_fields")[0]["reward_invalid_reason"] == "no score within 30 s"


def test_several_outputs_are_several_rows_of_one_put():
    stored = rows(output(response=(4,)), output(response=(4, 5, 6)))
    assert stored.keys == ["e0r0a0_1_0", "e0r0a0_1_1"]
    assert tu.nested_lengths(stored.fields["responses"]).tolist() == [1, 3]
    assert len(stored.tags) == 2


def test_optional_fields_follow_the_config_not_the_session():
    without = rows(output(), with_log_probs=False, with_scores=False).fields
    assert "rollout_log_probs" not in without.keys() and "rm_scores" not in without.keys()
    assert rows(output(score=None)).fields["rm_scores"].tolist() == [[0.0, 0.0]]
    with pytest.raises(ContractError, match=r"e0r0a0_1 has no response_logprobs.*calculate_log_probs"):
        rows(output(response_logprobs=None))


def test_an_empty_response_is_a_row_too():
    stored = rows(output(response=()))
    assert stored.fields["responses"].shape == torch.Size([1, 0]) and stored.tags[0]["response_len"] == 0
