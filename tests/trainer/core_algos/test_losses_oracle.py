"""Policy losses against their papers' formulas, written as plain loops over Python floats."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlflow.config import FSDPActorConfig, PolicyLossConfig
from rlflow.trainer.ppo import core_algos

LOW, HIGH, BOUND = 0.2, 0.28, 3.0
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
ROWS, WIDTH, SCALE = 6, 5, 50.0


def batch(seed: int = 0, spread: float = 0.4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) - 0.05
    new = old + spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    advantages = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weights = 0.2 + torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.7
    mask[2], mask[3] = False, True
    return {"old": old, "new": new, "advantages": advantages, "weights": weights, "mask": mask}


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


# --- losses of one token: (value, derivative by its log-prob) ---------------------------------------------------------


def vanilla(old: float, new: float, advantage: float) -> tuple[float, float]:
    ratio = math.exp(new - old)
    clipped = clip(ratio, 1 - LOW, 1 + HIGH)
    value = max(-advantage * ratio, -advantage * clipped)
    if advantage < 0 and value > -advantage * BOUND:
        return -advantage * BOUND, 0.0
    return value, -advantage * ratio if value == -advantage * ratio else 0.0


def dppo(valid: Callable[[float, float, float, float], bool]) -> Callable[..., tuple[float, float]]:
    def loss(old: float, new: float, advantage: float) -> tuple[float, float]:
        if not valid(math.exp(new), math.exp(old), new - old, advantage):
            return 0.0, 0.0
        slope = -advantage * min(math.exp(new - old), BOUND)
        return slope * new, slope

    return loss


def tv_valid(p: float, q: float, log_ratio: float, advantage: float) -> bool:
    return p - q <= HIGH if advantage > 0 else q - p <= LOW


def kl_valid(p: float, q: float, log_ratio: float, advantage: float) -> bool:
    kl = -q * log_ratio + (1 - q) * math.log((1 - q) / (1 - p)) if p < 1 else math.inf
    return (kl <= HIGH or p <= q) if advantage > 0 else (kl <= LOW or p >= q)


def sapo(old: float, new: float, advantage: float) -> tuple[float, float]:
    tau = 1.0 if advantage > 0 else 1.05
    ratio = math.exp(new - old)
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -advantage * gate * 4 / tau, -advantage * 4 * gate * (1 - gate) * ratio


def gpg(old: float, new: float, advantage: float) -> tuple[float, float]:
    return -advantage * new, -advantage


def dro(old: float, new: float, advantage: float) -> tuple[float, float]:
    return -(advantage * new - 0.5 / 2 * (new - old) ** 2), -advantage + 0.5 * (new - old)


def cispo(old: float, new: float, advantage: float) -> tuple[float, float]:
    weight = clip(math.exp(new - old), 1 - LOW, 1 + HIGH)
    return -weight * advantage * new, -weight * advantage


TOKEN_LOSSES: dict[str, Callable[[float, float, float], tuple[float, float]]] = {
    "vanilla": vanilla,
    "dppo_tv": dppo(tv_valid),
    "dppo_kl": dppo(kl_valid),
    "sapo": sapo,
    "gpg": gpg,
    "dro": dro,
    "cispo": cispo,
}


# --- whole batches ----------------------------------------------------------------------------------------------------


def factors(mask: list[list[bool]], mode: str) -> list[list[float]]:
    """What a token's loss is multiplied by in the sum over the batch."""
    tokens = sum(map(sum, mask))
    rows = sum(any(row) for row in mask)
    of_row = {
        "token-mean": lambda row: 1 / tokens,
        "token-sum": lambda row: 1.0,
        "seq-mean-token-sum": lambda row: 1 / rows,
        "seq-mean-token-mean": lambda row: 1 / rows / max(sum(row), 1),
        "seq-mean-token-sum-norm": lambda row: 1 / rows / SCALE,
    }[mode]
    return [[of_row(row) if valid else 0.0 for valid in row] for row in mask]


def measure(name: str, data: dict[str, torch.Tensor], mode: str, **options: Any) -> tuple[float, torch.Tensor]:
    settings = {"clip_cov_ratio": 0.2, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0, "kl_cov_ratio": 0.2, "dro_beta": 0.5}
    config = FSDPActorConfig(
        clip_ratio_low=LOW, clip_ratio_high=HIGH, policy_loss=PolicyLossConfig(**(settings | options))
    )
    object.__setattr__(config, "global_batch_info", {"loss_scale_factor": SCALE})
    new = data["new"].clone().requires_grad_()
    loss, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=data["old"],
        log_prob=new,
        advantages=data["advantages"],
        response_mask=data["mask"],
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=data["weights"],
    )
    loss.backward()
    return loss.item(), new.grad


def assert_same(found: tuple[float, torch.Tensor], value: float, gradient: list[list[float]]) -> None:
    assert found[0] == pytest.approx(value, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(found[1], torch.tensor(gradient, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def every(data: dict[str, torch.Tensor]) -> list[tuple[int, int, float, float, float, float]]:
    lists = {name: tensor.tolist() for name, tensor in data.items()}
    return [
        (i, t, lists["old"][i][t], lists["new"][i][t], lists["advantages"][i][t], lists["weights"][i][t])
        for i in range(ROWS)
        for t in range(WIDTH)
        if lists["mask"][i][t]
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_losses_of_single_tokens(name: str, mode: str) -> None:
    for seed, spread in ((0, 0.4), (1, 1.2)):
        data = batch(seed, spread)
        share = factors(data["mask"].tolist(), "seq-mean-token-mean" if name == "sapo" else mode)
        value, gradient = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
        for i, t, old, new, advantage, weight in every(data):
            loss, slope = TOKEN_LOSSES[name](old, new, advantage)
            value += loss * weight * share[i][t]
            gradient[i][t] = slope * weight * share[i][t]
        assert_same(measure(name, data, mode), value, gradient)


def test_gspo_has_one_ratio_a_row_and_the_token_mean_of_its_gradient() -> None:
    data = batch(spread=0.6)
    share = factors(data["mask"].tolist(), "seq-mean-token-mean")
    rows: dict[int, list[float]] = {}
    for i, _, old, new, _, _ in every(data):
        rows.setdefault(i, []).append(new - old)
    value, gradient = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
    for i, t, _, _, advantage, weight in every(data):
        ratio = math.exp(sum(rows[i]) / len(rows[i]))
        loss = max(-advantage * ratio, -advantage * clip(ratio, 1 - LOW, 1 + HIGH))
        value += loss * weight * share[i][t]
        gradient[i][t] = -advantage * ratio * weight * share[i][t] if loss == -advantage * ratio else 0.0
    for mode in MODES:
        assert_same(measure("gspo", data, mode), value, gradient)


def test_geo_mean_is_the_geometric_mean_of_clipped_ratios() -> None:
    data = batch(spread=0.6)
    rows: dict[int, list[tuple[int, float, float, float]]] = {}
    for i, t, old, new, advantage, weight in every(data):
        rows.setdefault(i, []).append((t, new - old, advantage, weight))
    value, gradient = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
    for i, tokens in rows.items():
        n = len(tokens)
        moved = {t: max(x, clip(x, -LOW, HIGH)) if a < 0 else min(x, clip(x, -LOW, HIGH)) for t, x, a, _ in tokens}
        ratio = math.exp(sum(moved.values()) / n)
        advantage = sum(a for _, _, a, _ in tokens) / n
        weight = math.exp(sum(math.log(w) for *_, w in tokens) / n)
        value += -advantage * ratio * weight / len(rows)
        for t, x, _, _ in tokens:
            if moved[t] == x:
                gradient[i][t] = -advantage * ratio * weight / len(rows) / n
    for mode in MODES:
        assert_same(measure("geo_mean", data, mode), value, gradient)


def covariances(data: dict[str, torch.Tensor]) -> dict[tuple[int, int], float]:
    tokens = every(data)
    mean_new = sum(new for _, _, _, new, _, _ in tokens) / len(tokens)
    mean_advantage = sum(a for *_, a, _ in tokens) / len(tokens)
    return {(i, t): (a - mean_advantage) * (new - mean_new) for i, t, _, new, a, _ in tokens}


def test_kl_cov_adds_its_penalty_to_the_tokens_of_highest_covariance() -> None:
    data = batch()
    covariance = covariances(data)
    count = int(0.2 * len(covariance))
    assert count > 1
    chosen = sorted(covariance, key=lambda place: -covariance[place])[:count]
    share = factors(data["mask"].tolist(), "token-mean")
    value, gradient = 0.0, [[0.0] * WIDTH for _ in range(ROWS)]
    for i, t, old, new, advantage, weight in every(data):
        penalty = 0.1 if (i, t) in chosen else 0.0
        value += (-advantage * math.exp(new - old) + penalty * abs(new - old)) * weight * share[i][t]
        slope = -advantage * math.exp(new - old) + penalty * math.copysign(1, new - old)
        gradient[i][t] = slope * weight * share[i][t]
    assert_same(measure("kl_cov", data, "token-mean"), value, gradient)


def test_kl_cov_picks_the_same_of_equal_covariances_in_every_order() -> None:
    data = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in batch().items()}
    data["mask"] = torch.ones_like(data["mask"])
    # Mirrored about both means: all covariances are equal, other numbers are not.
    data["advantages"] = torch.tensor([0.5, -0.5] * (ROWS // 2)).unsqueeze(1).expand(ROWS, WIDTH)
    data["new"] = data["advantages"] - 2
    options = {"kl_cov_ratio": 0.1, "ppo_kl_coef": 10.0}
    _, gradient = measure("kl_cov", data, "token-mean", **options)
    for order in ([1, 0, 3, 2, 5, 4], [5, 4, 3, 2, 1, 0], [2, 5, 1, 4, 0, 3]):
        _, moved = measure("kl_cov", {name: tensor[order] for name, tensor in data.items()}, "token-mean", **options)
        torch.testing.assert_close(moved, gradient[order])


def test_clip_cov_drops_so_many_candidates_and_leaves_the_rest_as_it_is() -> None:
    data = batch()
    covariance = covariances(data)
    share = factors(data["mask"].tolist(), "token-mean")
    value, gradient = measure("clip_cov", data, "token-mean")
    dropped, expected = [], 0.0
    for i, t, old, new, advantage, weight in every(data):
        plain, ratio = -advantage * math.exp(new - old), math.exp(new - old)
        loss = max(plain, -advantage * clip(ratio, 1 - LOW, 1 + HIGH))
        slope = plain if loss == plain else 0.0
        if slope and gradient[i, t] == 0:
            dropped.append((i, t))
            continue
        expected += loss * weight * share[i][t]
        assert float(gradient[i, t]) == pytest.approx(slope * weight * share[i][t], rel=1e-6)
    assert value == pytest.approx(expected, rel=1e-6)
    assert len(dropped) == int(0.2 * len(covariance)) > 1
    assert all(-1 < covariance[place] < 1 for place in dropped)


def test_clip_cov_picks_the_same_tokens_in_every_run_and_order() -> None:
    data = batch()
    before = torch.get_rng_state()
    _, gradient = measure("clip_cov", data, "token-mean")
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    _, moved = measure("clip_cov", {name: tensor[order] for name, tensor in data.items()}, "token-mean")
    torch.testing.assert_close(moved, gradient[order])
    assert torch.equal(torch.get_rng_state(), before)
    # Another step has other numbers, hence another choice: over many batches no place is preferred.
    counts = torch.zeros(ROWS, WIDTH)
    for seed in range(60):
        data = batch(seed, spread=0.01)
        data["mask"] = torch.ones(ROWS, WIDTH, dtype=torch.bool)
        counts += measure("clip_cov", data, "token-mean", clip_cov_lb=-99.0, clip_cov_ub=99.0)[1] == 0
    assert counts.sum() == 60 * 6 and counts.max() < 30


def test_the_covariance_losses_take_at_least_one_token_and_at_most_all() -> None:
    data = batch()
    for name in ("clip_cov", "kl_cov"):
        for ratio in (1e-6, 1.0):
            value, _ = measure(name, data, "token-mean", clip_cov_ratio=ratio, kl_cov_ratio=ratio)
            assert math.isfinite(value)
    # With every token a candidate and a share of 1 nothing is left of clip_cov.
    data["new"] = data["old"].clone()
    value, _ = measure("clip_cov", data, "token-mean", clip_cov_ratio=1.0, clip_cov_lb=-99.0, clip_cov_ub=99.0)
    assert value == 0.0
