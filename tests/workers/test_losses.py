"""ppo_loss on jagged rows against the golden numbers."""

from __future__ import annotations

import pytest
import torch

from rlflow.config import FSDPActorConfig, FSDPCriticConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlflow.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.metric import AggregationType
from rlflow.workers.losses import ppo_loss, value_loss


def nested(*rows):
    return tu.nested_from_list([torch.tensor(row) for row in rows])


def data(**extra):
    fields = {
        "response_mask": nested([1, 1, 1], [1]),
        "old_log_probs": nested([-1.0, -1.0, -1.0], [-1.0]),
        "advantages": nested([1.0, 1.0, -1.0], [-1.0]),
    }
    return tu.get_tensordict(fields | extra)


OUTPUT = {"log_probs": nested([-0.5, -1.5, -0.5], [0.5])}


def test_the_vanilla_loss_on_jagged_rows():
    loss, metrics = ppo_loss(FSDPActorConfig(), model_output=OUTPUT, data=data())
    assert float(loss) == pytest.approx(0.710548, abs=1e-5)
    assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(0.25)
    assert metrics["actor/pg_clipfrac"].weights == [4.0]
    assert metrics["actor/ppo_kl"].aggregate() == pytest.approx(-0.5)
    assert metrics["actor/pg_loss"].aggregation is AggregationType.SUM
    assert not {"actor/entropy_loss", "kl_loss"} & set(metrics)


def test_entropy_lowers_and_kl_raises_the_loss():
    config = FSDPActorConfig(entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k1")
    output = OUTPUT | {"entropy": nested([1.0, 2.0, 3.0], [2.0])}
    batch = data(ref_log_prob=nested([-1.0, -2.0, -1.0], [0.0]))
    loss, metrics = ppo_loss(config, model_output=output, data=batch)
    assert float(loss) == pytest.approx(0.710548 - 0.1 * 2.0 + 0.5 * 0.5, abs=1e-5)
    assert metrics["actor/entropy_loss"].aggregate() == pytest.approx(2.0)
    assert metrics["kl_loss"].aggregate() == pytest.approx(0.5)
    assert metrics["kl_coef"].aggregate() == 0.5


def test_counts_of_the_mini_batch_decide_and_the_config_stays():
    config = FSDPActorConfig()
    batch = tu.assign_non_tensor_whole(data(), {"batch_num_tokens": 8, "global_batch_size": 4, "dp_size": 2})
    loss, _ = ppo_loss(config, model_output=OUTPUT, data=batch)
    assert float(loss) == pytest.approx(0.710548 * 4 / 8 * 2, abs=1e-5)
    assert not getattr(config, "global_batch_info", None)


def test_importance_weights_enter_the_loss():
    half = data(rollout_is_weights=nested([0.5, 0.5, 0.5], [0.5]))
    loss, _ = ppo_loss(FSDPActorConfig(), model_output=OUTPUT, data=half)
    assert float(loss) == pytest.approx(0.710548 / 2, abs=1e-5)


def test_bypass_mode_corrects_inside_the_loss_and_its_metrics_know_how_they_combine():
    correction = RolloutCorrectionConfig.bypass_pg_token_icepop(threshold=1.5, threshold_lower=0.7)
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction)
    loss, metrics = ppo_loss(FSDPActorConfig(policy_loss=policy_loss), model_output=OUTPUT, data=data())
    # Ratios e^0.5, e^-0.5, e^0.5, e^1.5: none is within [0.7, 1.5], so every weight is 0.
    assert float(loss) == 0 and metrics["rollout_corr/rollout_is_oob_ratio"].aggregate() == 1
    assert metrics["rollout_corr/rollout_is_eff_sample_size"].aggregate() == 0
    assert metrics["rollout_corr/log_ppl_diff_max"].aggregation is AggregationType.MAX
    assert metrics["actor/ppo_kl"].weights == [4.0] and metrics["actor/ppo_kl"].aggregate() == pytest.approx(-0.5)

    rejecting = RolloutCorrectionConfig.bypass_ppo_clip_k3_rs(rs_threshold=0.3)
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=rejecting)
    counted = tu.assign_non_tensor_whole(data(), {"batch_num_tokens": 4, "global_batch_size": 2, "dp_size": 1})
    loss, metrics = ppo_loss(FSDPActorConfig(policy_loss=policy_loss), model_output=OUTPUT, data=counted)
    # The second row (k3 = 1.98) is rejected; its token still counts among the 4 of the mini-batch.
    assert float(loss) == pytest.approx((-1.2 - 0.606531 + 1.648721) / 4, abs=1e-5)
    assert metrics["actor/pg_clipfrac"].weights == [3.0]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].aggregate() == pytest.approx(0.25)


@pytest.mark.parametrize("mask", [nested([1, 1, 1], [1]), nested([0, 0, 0], [0])])
@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
def test_bypass_mode_without_a_surviving_token_reports_zeros(loss_type, mask):
    rejecting = RolloutCorrectionConfig(
        bypass_mode=True, loss_type=loss_type, rollout_rs="token_k3", rollout_rs_threshold=1e-6
    )
    policy_loss = PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=rejecting)
    config = FSDPActorConfig(policy_loss=policy_loss)
    loss, metrics = ppo_loss(config, model_output=OUTPUT, data=data(response_mask=mask))
    found = {name: metric.aggregate() for name, metric in metrics.items() if name.startswith("actor/")}
    assert float(loss) == 0 and "actor/ppo_kl" in found and not any(found.values())


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (lambda loss: (loss, None), r"policy loss mine returned \(a tensor of shape \(\), None\)"),
        (lambda loss: loss, r"policy loss mine returned a tensor of shape \(\)"),
        (lambda loss: (loss.expand(2), {}), r"policy loss mine returned \(a tensor of shape \(2,\), a dict\)"),
        (lambda loss: (loss, {"x": loss.expand(3)}), r"policy loss mine: its metric x is a tensor of shape \(3,\)"),
        (lambda loss: (loss, {"x": "low"}), "its metric x is a str"),
        (lambda loss: (loss, {"x": [1.0]}), "its metric x is a list"),
    ],
)
def test_what_a_users_loss_returns_wrongly_is_named(monkeypatch, result, part):
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "mine", lambda **inputs: result(inputs["log_prob"].sum()))
    config = FSDPActorConfig(policy_loss=PolicyLossConfig(loss_mode="mine"))
    with pytest.raises(ContractError, match=part):
        ppo_loss(config, model_output=OUTPUT, data=data())


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_null_options_of_the_covariance_losses_are_their_defaults(name):
    options = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    unset = PolicyLossConfig(loss_mode=name, **dict.fromkeys(options))
    losses = [
        float(ppo_loss(FSDPActorConfig(policy_loss=given), model_output=OUTPUT, data=data())[0])
        for given in (unset, PolicyLossConfig(loss_mode=name))
    ]
    assert losses[0] == losses[1]


def test_the_value_loss_on_jagged_rows():
    fields = {"values": nested([0.0, 2.0], [9.0]), "returns": nested([2.0, 0.0], [0.0])}
    batch = tu.get_tensordict(fields | {"response_mask": nested([1, 1], [0])})
    output = {"values": nested([1.0, 2.0], [5.0])}
    loss, metrics = value_loss(FSDPCriticConfig(), model_output=output, data=batch)
    assert float(loss) == pytest.approx(1.5625)
    assert metrics["critic/vf_loss"].aggregation is AggregationType.SUM
    assert metrics["critic/vf_clipfrac"].aggregate() == 0.5 and metrics["critic/vf_clipfrac"].weights == [2.0]
    assert metrics["critic/vpred_mean"].aggregate() == pytest.approx(1.5)
    with pytest.raises(ContractError, match="needs returns"):
        value_loss(FSDPCriticConfig(), model_output=output, data=tu.get_keys(batch, ["response_mask", "values"]))


def test_rows_that_do_not_line_up_are_refused():
    with pytest.raises(ContractError, match="advantages do not line up"):
        ppo_loss(FSDPActorConfig(), model_output=OUTPUT, data=data(advantages=nested([1.0, 1.0], [1.0, 1.0])))
    with pytest.raises(ContractError, match="needs ref_log_prob"):
        ppo_loss(FSDPActorConfig(use_kl_loss=True), model_output=OUTPUT, data=data())
    dense = data(advantages=torch.ones(2, 3))
    with pytest.raises(ContractError, match="dense"):
        ppo_loss(FSDPActorConfig(), model_output=OUTPUT, data=dense)
