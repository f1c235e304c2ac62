"""Validation numbers against measured values, and that the global generator is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlflow.trainer.ppo.validation_metrics import name_validation_metrics, process_validation_metrics

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "core_algos.json").read_text())


def processed() -> dict[str, dict[str, dict[str, float]]]:
    return process_validation_metrics(
        ["s1"] * 8 + ["s2"],
        ["u1"] * 4 + ["u2"] * 4 + ["u3"],
        {"reward": [1, 0, 0, 1, 0, 0, 0, 1, 1], "pred": list("ABACxxyzq")},
    )


def test_measured_values() -> None:
    expected = GOLDEN["process_validation_metrics"]["out"]
    result = processed()
    assert result["s1"]["reward"] == pytest.approx(expected["s1"]["reward"], abs=1e-4)
    assert result["s2"]["reward"] == pytest.approx(expected["s2"]["reward"])


def test_the_bootstrap_does_not_touch_the_global_generator() -> None:
    np.random.seed(7)
    before = np.random.get_state()[1].copy()
    processed()
    assert (np.random.get_state()[1] == before).all()


def test_headline_keys_carry_the_largest_n_of_the_core_variable() -> None:
    flat = name_validation_metrics({"gsm8k": {"acc": {"mean@1": 0.5}, "reward": {"mean@1": 0.4}}})
    assert flat == {"val-core/gsm8k/acc/mean@1": 0.5, "val-aux/gsm8k/reward/mean@1": 0.4}
    flat = name_validation_metrics({"s": {"reward": {"mean@16": 1.0, "best@2/mean": 1.0, "best@16/mean": 1.0}}})
    assert set(flat) == {"val-core/s/reward/mean@16", "val-core/s/reward/best@16/mean", "val-aux/s/reward/best@2/mean"}


def test_samples_without_a_value_are_left_out() -> None:
    result = process_validation_metrics(["s"] * 2, ["a", "b"], {"reward": [None, 1.0]})
    assert result["s"]["reward"] == {"mean@1": 1.0}
