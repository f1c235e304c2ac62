"""What remax and gdpo read beside the scores, from tags and from what the reward function returned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.estimator_inputs import optional_fields, reward_baselines, reward_components
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import RewardError


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    tq.init({"namespace": "estimator-inputs", "backend": {"storage_backend": "Local"}})
    yield
    tq.close()


def batch(rows: dict[str, dict[str, float] | None], **tags: object) -> KVBatchMeta:
    """key -> what the reward function returned, None for an invalid reward; a padding row at the end."""
    fields = [
        {"responses": torch.arange(2), "extra_fields": {"reward_extra_info": info or {}}} for info in rows.values()
    ]
    tq.kv_batch_put(list(rows), "train", fields=tu.list_of_dict_to_tensordict(fields))
    known = [{**tags, **({"invalid": "no"} if info is None else {})} for info in rows.values()]
    return KVBatchMeta(keys=[*rows, "pad1_0_0"], tags=[*known, {"is_padding": True}], partition_id="train", fields=None)


@pytest.mark.parametrize(
    ("estimator", "kl", "fields"),
    [
        ("grpo", False, {"values"}),
        ("grpo", True, {"values", "old_log_probs", "ref_log_prob"}),
        ("tir_optimal_token_baseline", False, {"values", "old_log_probs", "sum_pi_squared", "rollout_is_weights"}),
    ],
)
def test_the_advantage_stage_fetches_what_its_estimator_reads(estimator: str, kl: bool, fields: set[str]) -> None:
    config = SimpleNamespace(algorithm=SimpleNamespace(adv_estimator=estimator, use_kl_in_reward=kl))
    assert set(optional_fields(config)) == fields


def test_the_baseline_of_a_row_is_its_prompts_and_prompts_count_once() -> None:
    meta = batch({"a_0_0": {}, "a_1_0": {}, "b_0_0": {}})
    for tag, score in zip(meta.tags, (0.5, 0.5, 2.0), strict=False):
        tag["reward_baseline"] = score
    metrics: dict[str, float] = {}
    values = reward_baselines(meta, metrics)
    assert values[:3].tolist() == [0.5, 0.5, 2.0] and math.isnan(values[3])
    assert metrics["remax/baseline_score/mean"] == 1.25 and metrics["remax/baseline_score/max"] == 2.0
    del meta.tags[2]["reward_baseline"]
    assert reward_baselines(meta, metrics).isnan().tolist() == [False, False, True, True]


def test_components_are_columns_and_their_metrics_count_sessions_with_a_reward() -> None:
    meta = batch(
        {"a_0_0": {"x": 9, "ok": True}, "a_0_1": {"x": 1, "ok": True}, "a_1_0": {"x": 3, "ok": False}, "a_2_0": None}
    )
    metrics: dict[str, float] = {}
    found = reward_components(meta, ["x", "ok"], metrics)
    assert found["x"].nan_to_num(-1).tolist() == [9, 1, 3, -1, -1]
    assert found["ok"].nan_to_num(-1).tolist() == [1, 1, 0, -1, -1]
    # The last outputs of sessions 0 and 1.
    expected = {"mean": 2.0, "std": 1.0, "max": 3.0, "min": 1.0}
    assert {stat: metrics[f"gdpo/x/{stat}"] for stat in expected} == expected


@pytest.mark.parametrize("value", [None, "high", math.nan])
def test_a_missing_component_names_key_and_row(value: object) -> None:
    info = {"acc": 1.0} if value is None else {"acc": 1.0, "format": value}
    meta = batch({"a_0_0": {"acc": 0.0, "format": 1.0}, "a_1_0": info})  # type: ignore[dict-item]
    with pytest.raises(RewardError, match=r"gdpo_reward_keys names format.*trajectory a_1_0.*It returned acc"):
        reward_components(meta, ["format"], {})
