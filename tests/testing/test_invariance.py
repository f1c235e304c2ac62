"""The public checks hold for the package's own losses where their definition allows it, and catch what breaks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlflow.config import FSDPActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlflow.config.worker import LOSS_AGG_MODES
from rlflow.testing import PROPERTIES, check_loss, check_policy_loss, check_value_loss, random_rows
from rlflow.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss
from rlflow.utils import tensordict_utils as tu
from rlflow.workers.losses import ppo_loss

# Selected by statistics of the micro-batch (docs/losses.md says so).
PER_MICRO_BATCH = ("clip_cov", "kl_cov")
ONE_BATCH = ("row_order", "packing", "padding", "masked", "weights")


def config(**policy_loss: Any) -> FSDPActorConfig:
    options = {"dro_beta": 0.5, "clip_cov_ratio": 0.2, "clip_cov_lb": -9.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.2}
    return FSDPActorConfig(loss_scale_factor=50.0, policy_loss=PolicyLossConfig(**(options | policy_loss)))


def bypass(**options: Any) -> FSDPActorConfig:
    defaults = {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0", "bypass_mode": True}
    return config(rollout_correction=RolloutCorrectionConfig(**(defaults | options)))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSS_REGISTRY) - {"ppo", "bypass_mode"}))
def test_policy_losses(name: str, mode: str) -> None:
    properties = ONE_BATCH if name in PER_MICRO_BATCH else PROPERTIES
    for seed in (0, 1):
        check_policy_loss(name, config(), loss_agg_mode=mode, properties=properties, seed=seed)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(["vanilla", "gspo", "sapo", "geo_mean", "cispo", "dppo_kl"]),
    mode=st.sampled_from(LOSS_AGG_MODES),
    rows=st.integers(4, 12),
    noise=st.floats(0.05, 2.0),
    seed=st.integers(0, 10**6),
)
def test_any_batch(name: str, mode: str, rows: int, noise: float, seed: int) -> None:
    try:
        check_policy_loss(name, config(), loss_agg_mode=mode, rows=rows, noise=noise, seed=seed)
    except AssertionError as error:
        # A small batch may be clipped altogether.
        assert "zero at every token" in str(error), error


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode(loss_type: str, mode: str) -> None:
    rejection = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_1.7,0.2"}
    # It makes its weights itself.
    check_policy_loss("bypass_mode", bypass(loss_type=loss_type, **rejection), loss_agg_mode=mode, weights=False)
    sequence = bypass(loss_type=loss_type, rollout_is="sequence")
    check_policy_loss("bypass_mode", sequence, loss_agg_mode=mode, weights=False)


@pytest.mark.parametrize("name", PER_MICRO_BATCH)
def test_selection_depends_on_the_micro_batch(name: str) -> None:
    with pytest.raises(AssertionError, match="breaks 'micro_batches'"):
        check_policy_loss(name, config(), properties=["micro_batches"])


def test_batch_normalisation_in_bypass_mode_depends_on_the_micro_batch() -> None:
    normalised = bypass(loss_type="reinforce", rollout_is_batch_normalize=True)
    check_policy_loss("bypass_mode", normalised, properties=ONE_BATCH, weights=False)
    with pytest.raises(AssertionError, match="breaks 'micro_batches'"):
        check_policy_loss("bypass_mode", normalised)


def test_a_length_norm_without_a_constant_depends_on_the_padding() -> None:
    with pytest.raises(AssertionError, match="breaks 'padding'"):
        check_policy_loss(
            "vanilla", FSDPActorConfig(), loss_agg_mode="seq-mean-token-sum-norm", properties=["row_order", "padding"]
        )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_loss(mode: str) -> None:
    check_value_loss(loss_agg_mode=mode, loss_scale_factor=50.0)


def test_fp32_and_rows_without_weights() -> None:
    check_policy_loss("vanilla", dtype=torch.float32, tolerance=1e-4, weights=False)


def test_the_loss_of_the_workers_with_entropy_and_kl() -> None:
    actor = FSDPActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3+")
    names = {"old_log_probs": (-3.0, -0.2), "advantages": (-2.0, 2.0), "ref_log_prob": (-3.0, -0.2)}
    rows = random_rows(names, "log_probs", near={"log_probs": ("old_log_probs", 0.3)}, rows=7)

    def evaluate(fields: Mapping[str, Tensor], mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
        lengths = torch.full((mask.shape[0],), mask.shape[1])
        jagged = {name: tu.nested_from_values(field.reshape(-1), lengths) for name, field in fields.items()}
        data = tu.get_tensordict(
            {name: field for name, field in jagged.items() if name != "log_probs"}
            | {"response_mask": tu.nested_from_values(mask.long().reshape(-1), lengths)}
        )
        output = {
            "log_probs": jagged["log_probs"],
            "entropy": tu.nested_like(-jagged["log_probs"].values(), jagged["log_probs"]),
        }
        loss, _ = ppo_loss(actor, model_output=output, data=tu.assign_non_tensor_whole(data, dict(counts)))
        return loss

    check_loss(evaluate, rows, name="ppo_loss")


# --- losses that are wrong --------------------------------------------------------------------------------------------


def wrong(**change: Any) -> Any:
    """A policy gradient with one mistake."""

    def loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, loss_agg_mode: str,
        config: Any, rollout_is_weights: Tensor | None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        counts = config.global_batch_info
        mask = torch.ones_like(response_mask) if change.get("no_mask") else response_mask
        new = log_prob if change.get("mask_late") else log_prob.masked_fill(~mask, 0.0)
        advantages = advantages if change.get("mask_late") else advantages.masked_fill(~mask, 0.0)
        losses = -advantages * new
        if not change.get("no_weights"):
            losses = losses * rollout_is_weights.masked_fill(~mask, 0.0)
        if change.get("mean_of_weights"):
            losses = losses / rollout_is_weights.masked_fill(~mask, 0.0).mean()
        if change.get("by_place"):
            losses = losses * torch.arange(1, losses.shape[0] + 1).unsqueeze(1)
        if change.get("mean"):
            return losses.mean(), {}
        if change.get("local_count"):
            return (losses * mask).sum() / mask.sum().clamp(min=1) * counts["dp_size"], {}
        if change.get("no_dp_size"):
            return (losses * mask).sum() / counts["batch_num_tokens"], {}
        return agg_loss(losses, mask, loss_agg_mode, **counts), {}

    return loss


@pytest.mark.parametrize(
    ("mistake", "property_", "part"),
    [
        ("local_count", "micro_batches", r"micro-batches of rows \[\[0\], \[1\]"),
        ("no_dp_size", "dp_size", "2 ranks in turns the value is"),
        ("by_place", "row_order", "rows in the order"),
        ("mean", "padding", "1 columns of padding more"),
        ("mask_late", "masked", r"nan at masked tokens"),
        ("no_mask", "masked", r"breaks 'masked'"),
        ("no_weights", "weights", r"with all weights doubled the value is \S+, and has to be"),
        ("mean_of_weights", "weights", "with all weights doubled"),
    ],
)
def test_mistakes_are_found_and_named(mistake: str, property_: str, part: str) -> None:
    check_policy_loss(wrong())
    with pytest.raises(AssertionError, match=f"loss .token-mean. breaks '{property_}'") as error:
        check_policy_loss(wrong(**{mistake: True}), properties=[property_])
    assert re.search(part, str(error.value)), error.value
    assert "allowed" in str(error.value)


def test_a_check_that_would_say_nothing_fails() -> None:
    def constant(**inputs: Any) -> tuple[Tensor, dict[str, float]]:
        return 0.0 * inputs["log_prob"].sum(), {}

    def infinite(**inputs: Any) -> tuple[Tensor, dict[str, float]]:
        return inputs["log_prob"].sum() / 0.0, {}

    with pytest.raises(AssertionError, match="zero at every token"):
        check_policy_loss(constant)
    with pytest.raises(AssertionError, match="not finite"):
        check_policy_loss(infinite)
    with pytest.raises(ValueError, match="rows_order"):
        check_policy_loss("vanilla", properties=["rows_order"])
    with pytest.raises(ValueError, match="at least 4"):
        check_policy_loss("vanilla", rows=3)


def test_weights_that_act_on_other_rows_are_found() -> None:
    def by_neighbour(**inputs: Any) -> tuple[Tensor, dict[str, float]]:
        inputs["rollout_is_weights"] = inputs["rollout_is_weights"].roll(1, dims=0)
        return POLICY_LOSS_REGISTRY["gpg"](**inputs)

    with pytest.raises(AssertionError, match="with the weights of row 2 doubled the gradient at row 3"):
        check_policy_loss(by_neighbour, properties=["weights"])
    check_policy_loss(wrong(no_weights=True), weights=False)


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (lambda losses: (losses.sum(1), {}), r"policy loss loss returned \(a tensor of shape \(8,\), a dict\)"),
        (lambda losses: losses.sum(), "returned a tensor of shape"),
        (lambda losses: (losses.sum(), None), r"a tensor of shape \(\), None"),
        (lambda losses: (losses.sum(), {"mine/kl": losses}), "its metric mine/kl is a tensor of shape"),
        (lambda losses: (losses.sum(), {"mine/kl": [1.0, 2.0]}), "its metric mine/kl is a list"),
        (lambda losses: (losses.sum(), {"mine/kl": "low"}), "its metric mine/kl is a str"),
        (lambda losses: (losses.sum(), {"mine/kl": None}), "its metric mine/kl is None"),
    ],
)
def test_a_result_that_no_run_could_use_fails_the_check(result: Any, part: str) -> None:
    def loss(**inputs: Any) -> Any:
        return result(inputs["log_prob"].masked_fill(~inputs["response_mask"], 0.0))

    with pytest.raises(AssertionError, match=part):
        check_policy_loss(loss, weights=False)


def test_a_value_loss_by_row_fails_the_check() -> None:
    def by_row(vpreds: Tensor, **_: Any) -> tuple[Tensor, None]:
        return vpreds.sum(1), None

    with pytest.raises(AssertionError, match=r"by_row \(token-mean\) returned a tensor of shape \(8,\)"):
        check_value_loss(by_row)


def test_a_dict_is_a_config_too() -> None:
    strict = {"clip_ratio": 0.2, "policy_loss": {"dro_beta": 0.5}}
    check_policy_loss("vanilla", strict)
    check_policy_loss("dro", strict)
    with pytest.raises(ValueError, match="dro_beta"):
        check_policy_loss("dro", {"policy_loss": {}})


def test_rows_have_an_empty_one_a_masked_one_and_holes() -> None:
    rows = random_rows({"x": (0.0, 1.0)}, "x", rows=6, seed=3)
    assert rows.lengths[1] == 0 and not rows.mask[: rows.lengths[0]].any()
    assert rows.counts() == {"batch_num_tokens": int(rows.mask.sum()), "global_batch_size": 4}
    fields, mask = rows.dense([5, 1, 2], extra=2, fill=-1.0)
    assert fields["x"].shape == (3, max(rows.lengths[5], rows.lengths[2]) + 2) and not mask[1].any()
    assert bool((fields["x"][1] == -1).all())
    again, jagged_mask = rows.jagged([5, 1, 2])
    assert torch.equal(again["x"], rows.dense([5, 1, 2])[0]["x"]) and torch.equal(jagged_mask, mask[:, :-2])
    assert rows.place(sum(rows.lengths) - 1) == (5, rows.lengths[5] - 1)
