"""From rows to groups: jagged in and out, padding, masked samples, several outputs of one session, missing fields."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlflow.trainer.ppo import advantage, core_algos
from rlflow.trainer.ppo.core_algos import AdvantageEstimator, FixedKLController
from rlflow.utils.errors import ContractError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.nested import nested_from_list, nested_from_values, nested_lengths, nested_to_padded, nested_values

NAMES = [name.value for name in AdvantageEstimator]
OUTCOME = [name for name in NAMES if core_algos.get_outcome_fn(core_algos.get_adv_estimator_fn(name)) is not None]
TOKEN_LEVEL = [name for name in NAMES if name not in OUTCOME]


def config(name: str = "grpo", **options: Any) -> SimpleNamespace:
    common = {"norm_adv_by_std_in_grpo": True, "gamma": 0.9, "lam": 0.8, "gdpo_reward_keys": ["score"]}
    return SimpleNamespace(adv_estimator=name, **common | options)


def rows(*values: list[float]) -> Tensor:
    return nested_from_list([torch.tensor(row, dtype=torch.float32) for row in values])


def outcome_batch(scores: list[float], masks: list[list[float]]) -> dict[str, Tensor]:
    """Each row's score lies on its last token."""
    rewards = [[0.0] * (len(mask) - 1) + [score] for score, mask in zip(scores, masks, strict=True)]
    return {"response_mask": rows(*masks), "rm_scores": rows(*rewards)}


def lists(tensor: Tensor) -> list[list[float]]:
    return [row.tolist() for row in tensor.unbind()]


def random_data(seed: int, lengths: list[int]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def field(values: Tensor) -> Tensor:
        return nested_from_values(values, lengths)

    log_probs = -3 * torch.rand(total, generator=rng)
    mask = (torch.rand(total, generator=rng) < 0.8).long()
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = 1  # no row without a token
    return {
        "response_mask": field(mask),
        "rm_scores": field(torch.rand(total, generator=rng).round(decimals=1)),
        "values": field(torch.rand(total, generator=rng)),
        "old_log_probs": field(log_probs),
        "sum_pi_squared": field((2 * log_probs).exp() + 0.1),
        "rollout_is_weights": field(0.5 + torch.rand(total, generator=rng)),
    }


def test_groups_of_two_prompts() -> None:
    keys = [f"u{prompt}_{session}_0" for prompt in "AB" for session in range(3)]
    data = outcome_batch([1, 0, 0, 0, 1, 1], [[1, 1], [1], [1, 1, 1], [1], [1], [1, 1]])
    result, returns = advantage.compute_advantages(keys, data, config())
    expected = [1.1547, -0.5774, -0.5774, -1.1547, 0.5774, 0.5774]
    for row, value, length in zip(lists(result), expected, (2, 1, 3, 1, 1, 2), strict=True):
        assert row == pytest.approx([value] * length, abs=1e-4)
    assert returns is result
    (result + data["response_mask"]).values()  # the rows line up without a copy of offsets


@pytest.mark.parametrize("name", NAMES)
def test_jagged_rows_give_what_the_padded_estimator_gives(name: str) -> None:
    lengths, keys = [5, 1, 3, 7, 2, 4], ["a_0_0", "b_0_0", "a_1_0", "b_1_0", "a_2_0", "b_2_0"]
    data = random_data(3, lengths)
    baselines = torch.rand(6)
    scores = {"score": nested_to_padded(data["rm_scores"]).sum(-1)}
    got = advantage.compute_advantages(
        keys, data, config(name), reward_baselines=baselines, components=scores if name == "gdpo" else None
    )
    padded = {field: nested_to_padded(value).float() for field, value in data.items()}
    expected = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=padded.pop("rm_scores"),
        index=[key[0] for key in keys],
        config={"gamma": 0.9, "norm_adv_by_std_in_grpo": True},
        gamma=0.9,
        lam=0.8,
        reward_baselines=baselines,
        **padded,
    )
    for actual, dense in zip(got, expected, strict=True):
        assert nested_lengths(actual).tolist() == lengths
        valid = nested_to_padded(data["response_mask"]).bool()
        torch.testing.assert_close(nested_to_padded(actual)[valid], dense[valid], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_estimators_build_nothing_padded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advantage, "nested_to_padded", None)
    keys, data = ["u_0_0", "u_1_0"], outcome_batch([1, 0], [[1], [1, 1]])
    advantage.compute_advantages(keys, data, config(name), components={"score": [1.0, 0.0]})


@pytest.mark.parametrize("name", OUTCOME)
def test_masked_samples_and_padding_rows_move_no_statistic(name: str) -> None:
    keys, scores, masks = ["u_0_0", "u_1_0", "u_2_0", "v_0_0", "v_1_0"], [1, 0, 0, 2, 0], [[1, 1]] * 5
    small = outcome_batch(scores, masks)
    # An invalid row of group u, and padding: one row of a group of its own.
    large = outcome_batch([*scores, 7, 0], [*masks, [0, 0], [0]])
    components = {"score": [*scores, float("nan"), float("nan")]}
    few, _ = advantage.compute_advantages(keys, small, config(name), components={"score": scores})
    many, _ = advantage.compute_advantages([*keys, "u_3_0", "pad5_0_0"], large, config(name), components=components)
    assert lists(many)[:5] == lists(few)
    assert lists(many)[5:] == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", OUTCOME)
def test_a_batch_without_a_valid_row_is_all_zero(name: str) -> None:
    data = outcome_batch([1, 2], [[0, 0], [0]])
    result, _ = advantage.compute_advantages(["u_0_0", "u_1_0"], data, config(name), components={"score": [0, 0]})
    assert lists(result) == [[0.0, 0.0], [0.0]]


@pytest.mark.parametrize("name", OUTCOME)
def test_only_the_last_output_of_a_session_enters_the_group_with_the_tokens_of_all(name: str) -> None:
    # Rows of a session in any order; index 10 is after 9.
    keys = ["u_0_10", "u_0_9", "u_1_0", "u_2_0"]
    data = outcome_batch([1, 1, 0, 0], [[0, 1], [1, 1], [1, 1], [1, 0]])
    result, _ = advantage.compute_advantages(keys, data, config(name), components={"score": [1, 1, 0, 0]})
    one_row_each, _ = advantage.compute_advantages(
        ["u_0_0", "u_1_0", "u_2_0"],
        outcome_batch([1, 0, 0], [[1, 1, 1], [1, 1], [1]]),
        config(name),
        components={"score": [1, 0, 0]},
    )
    first, second, third = (row[0] for row in lists(one_row_each))
    assert lists(result) == [[0, first], [first, first], [second, second], [third, 0]]


@pytest.mark.parametrize("name", ["reinforce_plus_plus_baseline", "gdpo"])
def test_whitening_counts_every_token_of_a_session(name: str) -> None:
    keys, lengths, scores = ["u_0_0", "u_0_1", "u_0_2", "u_1_0"], [50, 50, 5, 5], [1, 1, 1, 0]
    data = outcome_batch(scores, [[1] * length for length in lengths])
    result, _ = advantage.compute_advantages(keys, data, config(name), components={"score": scores})
    tokens = nested_values(result)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-5) and tokens.std().item() == pytest.approx(1, abs=1e-5)


def test_a_rejected_token_keeps_its_reward_in_the_row() -> None:
    data = {"response_mask": rows([1, 1, 0], [1, 1, 1]), "rm_scores": rows([0, 0, 1], [0, 0, 0])}
    keys = ["u_0_0", "u_1_0"]
    result, _ = advantage.compute_advantages(keys, data, config("remax"), reward_baselines=[0.5, 0.5])
    assert lists(result) == [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_a_reward_outside_the_mask_counts_as_one_on_the_last_valid_token_before_it(name: str) -> None:
    keys, data = ["u_0_0", "u_1_0", "v_0_0", "v_1_0"], random_data(1, [4, 4, 4, 3])
    mask = rows([1, 1, 1, 0], [1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1])
    moved = rows([0, 0, 1, 0], [0.5, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0])
    stray = rows([0, 0, 0, 1], [0, 0.5, 0, 0], [2, 0, 0, 0], [0, 0, 0])
    found, expected = (
        advantage.compute_advantages(
            keys, data | {"response_mask": mask, "rm_scores": scores}, config(name), reward_baselines=[0.5] * 4
        )[0]
        for scores in (stray, moved)
    )
    valid = nested_values(mask).bool()
    assert torch.equal(nested_values(found)[valid], nested_values(expected)[valid])


def test_moving_rewards_keeps_the_sum_of_every_row_with_a_token() -> None:
    rng = torch.Generator().manual_seed(0)
    rewards = torch.randint(-3, 4, (64, 9), generator=rng).float()
    mask = (torch.rand(64, 9, generator=rng) < torch.rand(64, 1, generator=rng)).float()
    mask[:2] = torch.tensor([[0.0], [1.0]])
    moved = advantage.rewards_on_valid_tokens(rewards, mask)
    assert torch.equal(moved.sum(-1), rewards.sum(-1))
    has_token = mask.any(-1)
    assert not moved[has_token][mask[has_token] == 0].any() and torch.equal(moved[~has_token], rewards[~has_token])
    assert torch.equal(moved[1], rewards[1])


@pytest.mark.parametrize("score", [0.9, 100.7])
@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
def test_equal_scores_push_no_token_of_a_large_batch(name: str, score: float) -> None:
    count, length = 128, 1000
    rewards = torch.zeros(count, length)
    rewards[:, -1] = score
    fields = {"response_mask": torch.ones(count, length), "rm_scores": rewards, "values": torch.zeros(count, length)}
    data = {field: nested_from_values(value.flatten(), [length] * count) for field, value in fields.items()}
    result, _ = advantage.compute_advantages(
        [f"u{i}_0_0" for i in range(count)], data, config(name, gamma=1.0, lam=1.0), components={"score": [score] * 128}
    )
    assert nested_values(result).abs().max().item() < 1e-6


def test_an_invalid_last_output_silences_its_session() -> None:
    data = outcome_batch([5, 9, 1, 0], [[1], [0], [1], [1]])
    result, _ = advantage.compute_advantages(["u_0_0", "u_0_1", "u_1_0", "u_2_0"], data, config())
    assert lists(result)[:2] == [[0.0], [0.0]]
    assert lists(result)[2] == pytest.approx([0.7071], abs=1e-4)


def test_gae_gets_values_gamma_and_lambda_and_sees_every_output_of_a_session() -> None:
    data = {
        "response_mask": rows([1, 1], [1, 1], [0, 0]),
        "rm_scores": rows([0, 1], [0, 2], [9, 9]),
        "values": rows([1, 4], [0, 2], [7, 7]),
    }
    keys, options = ["u_0_0", "u_0_1", "u_1_0"], config("gae", gamma=0.5, lam=0.0)
    advantages, returns = advantage.compute_advantages(keys, data, options)
    # lam=0: one-step targets, r + gamma V(next)
    assert lists(returns)[:2] == [[2.0, 1.0], [1.0, 2.0]]
    raw = torch.tensor([1.0, -3.0, 1.0, 0.0])
    expected = (raw - raw.mean()) / raw.std()
    assert sum(lists(advantages)[:2], []) == pytest.approx(expected.tolist(), abs=1e-5)


def test_rewards_with_a_kl_penalty_replace_the_scores() -> None:
    data = outcome_batch([1, 0], [[1], [1, 1]])
    given = rows([0], [0, 1])
    result, _ = advantage.compute_advantages(["u_0_0", "u_1_0"], data, config("rloo"), rewards=given)
    assert lists(result) == [[-1.0], [1.0, 1.0]]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "gdpo"])
def test_dr_grpo_reaches_every_estimator_that_divides(name: str) -> None:
    data = outcome_batch([4, 0, 1, 1], [[1], [1], [1], [1]])
    keys = [f"u_{k}_0" for k in range(4)]
    components = {"score": [4, 0, 1, 1]}
    results = [
        advantage.compute_advantages(keys, data, config(name, norm_adv_by_std_in_grpo=flag), components=components)[0]
        for flag in (True, False)
    ]
    ratio = nested_values(results[1])[0] / nested_values(results[0])[0]
    # Whitening undoes the common factor of a single component and group.
    std = torch.tensor([4.0, 0, 1, 1]).std()
    assert ratio.item() == pytest.approx(1.0 if name == "gdpo" else std.item(), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "absent", "message"),
    [
        ("gae", "values", r"no critic wrote them.*critic\.enable"),
        ("optimal_token_baseline", "sum_pi_squared", "calculate_sum_pi_squared=true"),
        ("tir_optimal_token_baseline", "sum_pi_squared", "calculate_sum_pi_squared=true"),
        ("optimal_token_baseline", "old_log_probs", "compute_old_log_prob"),
    ],
)
def test_a_missing_field_says_what_to_set(name: str, absent: str, message: str) -> None:
    data = random_data(0, [2, 3])
    del data[absent]
    with pytest.raises(ContractError, match=message):
        advantage.compute_advantages(["u_0_0", "u_1_0"], data, config(name))


def test_remax_names_the_row_without_a_baseline() -> None:
    keys, data = ["u_0_0", "u_1_0", "pad_0_0"], outcome_batch([1, 0, 0], [[1], [1, 1], [0]])
    with pytest.raises(ContractError, match=r"the batch has none.*rloo"):
        advantage.compute_advantages(keys, data, config("remax"))
    nan = float("nan")
    with pytest.raises(ContractError, match="1 of 3 rows have no reward baseline, the first is u_1_0"):
        advantage.compute_advantages(keys, data, config("remax"), reward_baselines=[0.5, nan, nan])
    result, _ = advantage.compute_advantages(keys, data, config("remax"), reward_baselines=[0.5, 0.25, nan])
    assert lists(result) == [[0.5], [-0.25, -0.25], [0.0]]


def test_gdpo_without_components_says_what_to_set() -> None:
    data = outcome_batch([1, 0], [[1], [1]])
    with pytest.raises(ValueError, match="no reward has score"):
        advantage.compute_advantages(["u_0_0", "u_1_0"], data, config("gdpo"))
    with pytest.raises(ValueError, match="gdpo_reward_keys names none"):
        advantage.compute_advantages(["u_0_0", "u_1_0"], data, config("gdpo", gdpo_reward_keys=None))


def test_kl_in_reward_uses_the_coefficient_before_it_adapts_and_counts_rows_with_tokens() -> None:
    class Controller(FixedKLController):
        def update(self, current_kl: float, n_steps: int) -> None:
            self.value, self.seen = 9.0, (current_kl, n_steps)

    data = {
        "old_log_probs": rows([-1, -1], [-1, -1, -2], [-5]),
        "ref_log_prob": rows([-1.5, float("nan")], [-1, -2, -2], [-1]),
        "rm_scores": rows([0, 1], [0, 0, 2], [0]),
        "response_mask": rows([1, 0], [1, 1, 1], [0]),
    }
    controller = Controller(0.1)
    rewards, metrics = advantage.apply_kl_penalty(data, controller, "kl")
    assert [pytest.approx(row) for row in lists(rewards)] == [[-0.05, 1.0], [0.0, -0.1, 2.0], [0.0]]
    current = (0.5 + 1 / 3) / 2
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(current)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert controller.seen == (pytest.approx(current), 2)


def test_one_nan_in_the_kl_reaches_no_other_token_and_not_the_next_step() -> None:
    data = {
        "old_log_probs": rows([-1, float("nan")], [-1]),
        "ref_log_prob": rows([-1, -1], [-2]),
        "rm_scores": rows([0, 1], [1]),
        "response_mask": rows([1, 1], [1]),
    }
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.5, target_kl=0.1, horizon=10)
    for _ in range(2):
        rewards, metrics = advantage.apply_kl_penalty(data, controller, "kl")
        assert nested_values(rewards).isnan().tolist() == [False, True, False]
        assert np.isnan(metrics["actor/reward_kl_penalty"]) and controller.value == 0.5


USERS_FILE = """
import torch
from rlflow.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

def rows(scores, group, lengths, config=None, components=None, **kwargs):
    return scores * lengths + components["style"]

@register_adv_est("users_rows", outcome=rows)
def users_rows(token_level_rewards, response_mask, index, **kwargs):
    raise NotImplementedError

@register_adv_est("users_dense")
def users_dense(token_level_rewards, response_mask, index, config=None, non_tensor_batch=None, **kwargs):
    assert token_level_rewards.shape == response_mask.shape == kwargs["rollout_is_weights"].shape
    assert list(index[:2]) == ["u", "alone:u_1_0"] and config.users_key == 3
    return config.users_key * response_mask, torch.tensor(non_tensor_batch["style"]).unsqueeze(1) * response_mask

@register_policy_loss("users_loss")
def users_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, **kwargs):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}
"""


@pytest.fixture
def users_names(tmp_path: Any) -> Iterator[None]:
    (tmp_path / "algorithms.py").write_text(USERS_FILE)
    import_external_libs(str(tmp_path / "algorithms.py"))
    yield
    for name in ("users_rows", "users_dense"):
        del core_algos.ADV_ESTIMATOR_REGISTRY[name]
    del core_algos.POLICY_LOSS_REGISTRY["users_loss"]


def test_a_file_outside_the_package_adds_estimators_and_losses(users_names: None) -> None:
    data = random_data(0, [2, 3])
    data["response_mask"] = rows([1, 1], [0, 0, 0])
    data["rm_scores"] = rows([0, 0.5], [0, 0, 7])
    keys = ["u_0_0", "u_1_0"]
    style = {"style": np.array([0.5, 0.25])}
    per_row, _ = advantage.compute_advantages(keys, data, config("users_rows"), components=style)
    assert lists(per_row) == [[1.5, 1.5], [0.0, 0.0, 0.0]]
    advantages, returns = advantage.compute_advantages(keys, data, config("users_dense", users_key=3), components=style)
    assert lists(advantages) == [[3.0, 3.0], [0.0, 0.0, 0.0]]
    assert lists(returns) == [[0.5, 0.5], [0.0, 0.0, 0.0]]
    ones = torch.ones(1, 2)
    loss, _ = core_algos.get_policy_loss_fn("users_loss")(ones, -2 * ones, ones, ones)
    assert loss.item() == 2.0


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda mask: (mask[0], mask), r"broken: the advantages must have shape \(2, 3\), one for each token .*\(3,\)"),
        (lambda mask: (mask, mask[:, :1]), r"broken: the returns must have shape \(2, 3\).*\(2, 1\)"),
        (lambda mask: (mask, None), r"broken: the returns must have shape \(2, 3\).*NoneType"),
    ],
)
def test_a_token_level_estimator_that_returns_another_shape_is_named(give: Any, message: str) -> None:
    core_algos.register_adv_est("broken")(lambda response_mask, **kwargs: give(response_mask))
    try:
        with pytest.raises(ContractError, match=message):
            advantage.compute_advantages(["u_0_0", "u_1_0"], outcome_batch([1, 0], [[1], [1, 1, 1]]), config("broken"))
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["broken"]


@pytest.mark.parametrize("give", [lambda scores: scores[:1], lambda scores: scores.mean(), lambda scores: scores[None]])
def test_an_outcome_function_that_returns_another_shape_is_named(give: Any) -> None:
    core_algos.register_adv_est("broken", outcome=lambda scores, *args, **kwargs: give(scores))(lambda **kwargs: None)
    try:
        with pytest.raises(ContractError, match=r"broken: the values of its outcome function must have shape \(2,\)"):
            advantage.compute_advantages(["u_0_0", "u_1_0"], outcome_batch([1, 0], [[1], [1, 1, 1]]), config("broken"))
    finally:
        del core_algos.ADV_ESTIMATOR_REGISTRY["broken"]


def test_a_function_put_under_a_built_in_name_does_not_inherit_its_per_row_form() -> None:
    original = core_algos.ADV_ESTIMATOR_REGISTRY["rloo"]
    core_algos.ADV_ESTIMATOR_REGISTRY["rloo"] = lambda response_mask, **kwargs: (response_mask, response_mask)
    try:
        result, _ = advantage.compute_advantages(["u_0_0"], outcome_batch([5], [[1, 0]]), config("rloo"))
    finally:
        core_algos.ADV_ESTIMATOR_REGISTRY["rloo"] = original
    assert lists(result) == [[1.0, 0.0]]
