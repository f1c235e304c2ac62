from __future__ import annotations

import numpy as np
import pytest
import torch

from rlflow.reward_loop.frames import MAX_REPLY_BYTES, encode_reply
from rlflow.reward_loop.result import (
    InvalidRewardError,
    RewardInput,
    Score,
    normalise_result,
    one_line,
    to_score,
)


@pytest.mark.parametrize(
    "number", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array([1.0]), torch.tensor(1.0)]
)
def test_numbers_of_all_kinds_are_scores(number):
    assert normalise_result(number) == 1.0


@pytest.mark.parametrize(
    "bad", [None, "1.0", b"1", [1.0], (1.0, 2), float("nan"), float("inf"), 10**400, np.array([1.0, 2.0]), object()]
)
def test_everything_else_is_no_score(bad):
    with pytest.raises(InvalidRewardError):
        normalise_result(bad)
    with pytest.raises(InvalidRewardError):
        normalise_result({"score": bad})


@pytest.mark.parametrize("beyond", [1e39, -1e300, 10**39, np.float64(3.5e38)])
def test_a_score_that_fp32_cannot_hold_is_none(beyond):
    with pytest.raises(InvalidRewardError, match="beyond what fp32 can hold"):
        normalise_result(beyond)
    with pytest.raises(InvalidRewardError, match="fp32"):
        to_score({"reward_score": beyond})
    assert torch.tensor(normalise_result(torch.finfo(torch.float32).max), dtype=torch.float32).isfinite()


def test_values_beside_the_score_become_plain():
    raw = {"score": np.float32(0.5), "acc": np.bool_(True), "parts": (np.int64(1), [torch.tensor([1, 2])]), "pred": "x"}
    assert normalise_result(raw) == {"score": 0.5, "acc": True, "parts": [1, [[1, 2]]], "pred": "x"}


@pytest.mark.parametrize(
    "bad", [{"acc": 1}, {"score": 1, 3: 1}, {"score": 1, "x": float("nan")}, {"score": 1, "x": object()}]
)
def test_a_dict_must_be_plain_and_have_a_score(bad):
    with pytest.raises(InvalidRewardError):
        normalise_result(bad)


def test_a_managers_result_becomes_a_score():
    assert to_score({"reward_score": 1, "reward_extra_info": {"acc": 1}}) == Score(1.0, {"acc": 1})
    assert to_score({"reward_score": 1}) == Score(1.0, {})
    for bad in (None, 1.0, {"reward_score": None}, {"reward_score": 1, "reward_extra_info": [1]}):
        with pytest.raises(InvalidRewardError):
            to_score(bad)


def test_reasons_are_one_short_encodable_line():
    reason = one_line("a\nb\x00\ud800" + "x" * 10_000)
    assert "\n" not in reason and "\x00" not in reason and len(reason) <= 300
    reason.encode("utf-8")


def test_replies_are_ascii_and_bounded():
    assert b"\\ud800" in encode_reply({"result": "\ud800"})
    with pytest.raises(ValueError, match="bytes long"):
        encode_reply({"result": "x" * MAX_REPLY_BYTES})


def test_a_missing_column_is_named():
    data = RewardInput([1], [2], [1], non_tensor_batch={"data_source": "s"})
    assert data["data_source"] == "s"
    with pytest.raises(KeyError, match="ground_truth"):
        data["ground_truth"]
