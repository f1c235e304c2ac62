"""The naive manager and the registry of managers, without any process."""

from __future__ import annotations

import asyncio

import pytest
from omegaconf import OmegaConf

from rlflow.reward_loop.result import InvalidRewardError, RewardInput
from rlflow.reward_loop.reward_manager import (
    RewardManagerBase,
    get_reward_manager_cls,
    register,
    resolve_reward_manager_cls,
)
from rlflow.utils.errors import ConfigError


def score_of(compute_score, **columns):
    row = {
        "data_source": "s",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 3},
        "__num_turns__": 2,
        "tool_extra_fields": {"stop_reason": "stop", "reward_scores": {"a": 1}},
        **columns,
    }
    data = RewardInput([1, 2], [3, 4], [1, 1], "the text", {k: v for k, v in row.items() if v is not ...})
    manager = get_reward_manager_cls("naive")(config=None, tokenizer=None, compute_score=compute_score)
    return asyncio.run(manager.run_single(data)), data


def test_naive_hands_text_truth_and_a_copy_of_extra_info_to_the_function():
    seen = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        seen.update(locals())
        extra_info["mine"] = True
        return 0.5

    result, data = score_of(compute_score)
    assert result == {"reward_score": 0.5, "reward_extra_info": {"acc": 0.5}}
    assert (seen["data_source"], seen["solution_str"], seen["ground_truth"]) == ("s", "the text", "7")
    info = seen["extra_info"]
    assert info["index"] == 3 and info["num_turns"] == 2 and info["stop_reason"] == "stop"
    assert info["rollout_reward_scores"] == {"a": 1}
    assert data["extra_info"] == {"index": 3}


def test_all_entries_of_a_dict_result_are_kept():
    async def compute_score(**_):
        return {"score": 1.0, "acc": True, "pred": "7"}

    result, _ = score_of(compute_score)
    assert result == {"reward_score": 1.0, "reward_extra_info": {"score": 1.0, "acc": True, "pred": "7"}}


@pytest.mark.parametrize("columns", [{"reward_model": ...}, {"reward_model": {"style": "rule"}}, {"data_source": None}])
def test_a_row_without_truth_or_source_is_invalid(columns):
    with pytest.raises(InvalidRewardError, match="the row has no"):
        score_of(lambda **_: 1.0, **columns)


def test_naive_decodes_when_the_sender_did_not():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens
            return " ".join(map(str, ids))

    manager = get_reward_manager_cls("naive")(None, Tokenizer(), lambda solution_str, **_: float(solution_str == "3 4"))
    data = RewardInput([1], [3, 4], [1, 1], None, {"data_source": "s", "reward_model": {"ground_truth": 0}})
    assert asyncio.run(manager.run_single(data))["reward_score"] == 1.0


def test_a_router_address_reaches_the_function():
    async def compute_score(reward_router_address, reward_model_tokenizer, **_):
        return float(reward_router_address == "127.0.0.1:1" and reward_model_tokenizer == "tok")

    manager = get_reward_manager_cls("naive")(None, None, compute_score, "127.0.0.1:1", "tok")
    data = RewardInput([1], [3], [1], "", {"data_source": "s", "reward_model": {"ground_truth": 0}})
    assert asyncio.run(manager.run_single(data))["reward_score"] == 1.0


def test_users_register_managers_and_set_up_once_per_class():
    calls = []

    @register("test_manager")
    class Mine(RewardManagerBase):
        @classmethod
        def init_class(cls, config, tokenizer):
            calls.append((config, tokenizer))

        async def run_single(self, data):
            return {"reward_score": 0.0}

    config = OmegaConf.create({"reward": {"reward_manager": {"source": "register", "name": "test_manager"}}})
    cls = resolve_reward_manager_cls(config)
    assert cls is Mine
    cls("c", "t", None), cls("c", "t", None)
    assert calls == [("c", "t")]
    with pytest.raises(ValueError, match="taken"):
        register("test_manager")(type("Other", (Mine,), {"__module__": "elsewhere"}))


def test_a_manager_class_comes_from_a_file(tmp_path):
    file = tmp_path / "my_manager.py"
    file.write_text(
        "from rlflow.reward_loop import RewardManagerBase\n"
        "class Mine(RewardManagerBase):\n    async def run_single(self, data):\n        return {'reward_score': 2.0}\n"
    )
    node = {"source": "importlib", "name": "Mine", "module": {"path": str(file), "name": "ignored"}}
    cls = resolve_reward_manager_cls(OmegaConf.create({"reward": {"reward_manager": node}}))
    assert asyncio.run(cls(None, None, None).run_single(None)) == {"reward_score": 2.0}


def test_unknown_names_and_sources_are_refused():
    with pytest.raises(ValueError, match=r"'nive' is unknown; known: .*naive"):
        get_reward_manager_cls("nive")
    with pytest.raises(ValueError, match="register or importlib"):
        resolve_reward_manager_cls(OmegaConf.create({"reward": {"reward_manager": {"source": "magic"}}}))


def overlong(tokens, config=None, result=1.0, **cfg):
    """What the dapo manager makes of a response of so many tokens; limit 20, buffer 8, factor 2."""
    kwargs = {"max_resp_len": 20, "overlong_buffer_cfg": {"enable": True, "len": 8, "penalty_factor": 2.0, **cfg}}
    config = config or {"reward": {"reward_kwargs": kwargs}, "data": {"max_response_length": 64}}
    manager = get_reward_manager_cls("dapo")(OmegaConf.create(config), None, lambda **_: result)
    row = {"data_source": "s", "reward_model": {"ground_truth": 0}}
    data = RewardInput([1], list(range(tokens)), [1] * tokens, "", row)
    return asyncio.run(manager.run_single(data))


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.25), (16, -1.0), (20, -2.0), (24, -3.0)])
def test_dapo_punishes_the_stretch_before_the_limit(tokens, penalty):
    assert overlong(tokens) == {"reward_score": 1.0 + penalty, "reward_extra_info": {"acc": 1.0}}


def test_dapo_reports_the_penalty_when_asked_and_leaves_the_rest_unshaped():
    info = overlong(16, log=True, result={"score": 0.5, "acc": 1.0})["reward_extra_info"]
    assert info == {"score": 0.5, "acc": 1.0, "overlong_reward": -1.0, "overlong": True}
    assert overlong(16, enable=False)["reward_score"] == 1.0


def test_the_limit_of_dapo_is_that_of_the_data_unless_it_is_set():
    kwargs = {"overlong_buffer_cfg": {"enable": True, "len": 4}}
    config = {"reward": {"reward_kwargs": kwargs}, "data": {"max_response_length": 8}}
    assert [overlong(tokens, config)["reward_score"] for tokens in (4, 6, 8)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("cfg", "problem"),
    [
        ({"len": 21}, "between 1 and 20"),
        ({"len": None}, "len=null"),
        ({"len": True}, "len=True"),
        ({"len": "abc"}, r"overlong_buffer_cfg\.len=4"),
        ({"lenght": 3}, "lenght"),
        ({"penalty_factor": "x"}, "penalty_factor=x must be a number above 0"),
        ({"penalty_factor": None}, r"penalty_factor=null [^$]*overlong_buffer_cfg\.penalty_factor=1\.0"),
        ({"penalty_factor": float("nan")}, "penalty_factor=nan"),
        ({"enable": "maybe"}, "enable=maybe must be true or false"),
        ({"log": 3}, "log=3 must be true or false"),
    ],
)
def test_dapo_refuses_a_buffer_that_cannot_work(cfg, problem):
    with pytest.raises(ConfigError, match=problem) as error:
        overlong(1, **cfg)
    assert "\n    try:    " in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"overlong_buffer_cfg": 4}, "overlong_buffer_cfg=4 must be a group of options"),
        ({"overlong_buffer_cfg": False}, "overlong_buffer_cfg=False must be a group of options"),
        ({"max_resp_len": "abc"}, "max_resp_len=abc must be a number of tokens"),
        ({"max_resp_len": 0}, "max_resp_len=0 must be a number of tokens"),
    ],
)
def test_dapo_refuses_options_of_the_wrong_kind(kwargs, problem):
    options = {"overlong_buffer_cfg": {"enable": True, "len": 4}, **kwargs}
    with pytest.raises(ConfigError, match=problem):
        overlong(1, {"reward": {"reward_kwargs": options}, "data": {"max_response_length": 8}})
