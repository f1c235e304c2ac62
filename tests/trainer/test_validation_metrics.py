"""Validation numbers against measured values, and that the global generator is left alone."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from rlflow.trainer.ppo.validation import choose_samples
from rlflow.trainer.ppo.validation_metrics import (
    bootstrap_metric,
    calc_maj_val,
    name_validation_metrics,
    process_validation_metrics,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "validation_metrics.json").read_text())


def processed(**more: object) -> dict[str, dict[str, dict[str, float]]]:
    return process_validation_metrics(**GOLDEN["process_validation_metrics"]["inputs"], **more)


def test_golden_process_validation_metrics() -> None:
    expected = GOLDEN["process_validation_metrics"]["out"]
    result = processed()
    assert result["s1"].keys() == {"reward"}, "a variable of texts is no metric"
    assert result["s1"]["reward"] == pytest.approx(expected["s1"]["reward"], abs=1e-4)
    assert result["s2"]["reward"] == pytest.approx(expected["s2"]["reward"])


def test_golden_bootstrap_metric() -> None:
    given = GOLDEN["bootstrap_metric"]["inputs"]
    found = bootstrap_metric(given["data"], given["subset_size"], [getattr(np, name) for name in given["reduce_fns"]])
    assert np.array(found) == pytest.approx(np.array(GOLDEN["bootstrap_metric"]["out"]), abs=1e-12)


@pytest.mark.parametrize(("size", "count"), [(2, 2), (3, 5), (8, 4)])
def test_the_bootstrap_comes_near_the_exact_expectation(size: int, count: int) -> None:
    """E[max of n draws with replacement] over the order statistics, summed in float64."""
    data = [float(value) ** 2 for value in range(count)]
    cumulated = [((rank + 1) / count) ** size for rank in range(count)]
    exact = sum(value * (high - low) for value, high, low in zip(data, cumulated, [0.0, *cumulated], strict=False))
    [(mean, std)] = bootstrap_metric(data, size, [np.max], n_bootstrap=20000, seed=1)
    assert mean == pytest.approx(exact, abs=4 * std / 20000**0.5)
    assert bootstrap_metric(data, size, [np.max], seed=1) == bootstrap_metric(data, size, [np.max], seed=1)
    assert bootstrap_metric(data, size, [np.max], seed=1) != bootstrap_metric(data, size, [np.max], seed=2)


def test_the_majority_is_the_first_value_of_the_most_common_vote() -> None:
    votes = [{"pred": p, "val": v} for p, v in zip("abbac", (1, 2, 3, 4, 5), strict=True)]
    assert calc_maj_val(votes, "pred", "val") == 1, "a tie goes to the vote seen first"
    assert calc_maj_val(votes[1:], "pred", "val") == 2


@pytest.mark.parametrize("seeded", [False, True])
def test_the_bootstrap_does_not_touch_the_global_generator(seeded: bool) -> None:
    np.random.seed(7)
    expected = np.random.rand(3)
    np.random.seed(7)
    processed(**({"seed": 5} if seeded else {}))
    bootstrap_metric([1.0, 2.0], 2, [np.mean], seed=5)
    assert (np.random.rand(3) == expected).all()


def test_headline_keys_carry_the_largest_n_of_the_core_variable() -> None:
    flat = name_validation_metrics({"gsm8k": {"acc": {"mean@1": 0.5}, "reward": {"mean@1": 0.4}}})
    assert flat == {"val-core/gsm8k/acc/mean@1": 0.5, "val-aux/gsm8k/reward/mean@1": 0.4}
    flat = name_validation_metrics({"s": {"reward": {"mean@16": 1.0, "best@2/mean": 1.0, "best@16/mean": 1.0}}})
    assert set(flat) == {"val-core/s/reward/mean@16", "val-core/s/reward/best@16/mean", "val-aux/s/reward/best@2/mean"}


def test_samples_without_a_value_are_left_out() -> None:
    result = process_validation_metrics(["s"] * 2, ["a", "b"], {"reward": [None, 1.0]})
    assert result["s"]["reward"] == {"mean@1": 1.0}


def test_what_is_no_number_does_not_spoil_the_rest() -> None:
    infos = {
        "reward": [1.0, float("nan"), None, float("inf")],
        "acc": [True, np.bool_(False), np.float32(1), None],
        "note": ["text", None, None, None],
        "mixed": [1.0, "x", 2.0, 3.0],
        "list": [[1], [2], [3], [4]],
    }
    result = process_validation_metrics(["s"] * 4, ["u"] * 4, infos)["s"]
    assert set(result) == {"reward", "acc"}
    assert result["reward"]["mean@4"] == 1.0 and result["reward"]["std@4"] == 0.0
    assert result["acc"]["mean@4"] == pytest.approx(2 / 3)
    assert all(np.isfinite(value) for metrics in result.values() for value in metrics.values())


def test_a_prompt_that_lost_samples_stays_in_the_headline() -> None:
    infos = {"reward": [1.0, 0.0, 1.0, None, 1.0]}
    result = process_validation_metrics(
        ["s"] * 5, ["a", "a", "b", "b", "c"], infos, samples_of={"a": 2, "b": 2, "c": 2, "all failed": 2}
    )
    assert result["s"]["reward"]["mean@2"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert not any("@1" in name for name in result["s"]["reward"])


@pytest.mark.parametrize("seed", range(5))
def test_the_vectorised_bootstrap_is_the_plain_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 10))
    values = rng.integers(0, 3, n).astype(float).tolist()
    # Votes that cannot be hashed, None, and equal ones of different type.
    preds = [[None, "a", ["x"], 1, 1.0][i] for i in rng.integers(0, 5, n)]
    result = process_validation_metrics(["s"] * n, ["u"] * n, {"reward": values, "pred": preds})["s"]["reward"]
    votes = [{"pred": repr(p) if isinstance(p, list) else p, "val": v} for p, v in zip(preds, values, strict=True)]
    for size in {2, 4, 8, n} & set(range(n + 1)):
        [(best, best_std), (worst, _)] = bootstrap_metric(values, size, [np.max, np.min])
        [(majority, majority_std)] = bootstrap_metric(votes, size, [lambda draw: calc_maj_val(draw, "pred", "val")])
        assert result[f"best@{size}/mean"] == pytest.approx(best)
        assert result[f"worst@{size}/mean"] == pytest.approx(worst)
        assert result[f"best@{size}/std"] == pytest.approx(best_std)
        assert result[f"maj@{size}/mean"] == pytest.approx(majority), size
        assert result[f"maj@{size}/std"] == pytest.approx(majority_std)


def test_many_prompts_take_no_time() -> None:
    rng = np.random.default_rng(0)
    rows = 16 * 500
    infos = {"reward": rng.random(rows).tolist(), "pred": [str(i) for i in rng.integers(0, 6, rows)]}
    start = time.process_time()
    process_validation_metrics(["s"] * rows, [str(row // 16) for row in range(rows)], infos)
    assert time.process_time() - start < 10


def test_the_same_samples_are_shown_each_time() -> None:
    samples = [(f"question {i:02}", "answer", None) for i in range(40)]
    shown = choose_samples(list(reversed(samples)), 5)
    ordered = list(samples)
    np.random.RandomState(42).shuffle(ordered)
    assert shown == ordered[:5] == choose_samples(samples, 5)
    assert len(choose_samples(samples, 100)) == 40
