"""Advantage estimators once more, from their formulas: plain loops over Python floats (float64), no tensors.

A batch is lists of rows of one width. Each oracle returns advantages at all positions; outside the mask they are 0
(None where the definition says nothing about them), so that tests can compare valid positions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Matrix = list[list[float]]


def scores_of(rewards: Matrix) -> list[float]:
    return [math.fsum(row) for row in rewards]


def members(index: list[str]) -> dict[str, list[int]]:
    rows = defaultdict(list)
    for row, name in enumerate(index):
        rows[name].append(row)
    return rows


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def sample_std(values: list[float]) -> float:
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def over_tokens(per_row: list[float], mask: Matrix) -> Matrix:
    return [[a * m for m in row] for a, row in zip(per_row, mask, strict=True)]


def whiten(values: Matrix, mask: Matrix) -> Matrix:
    valid = [v for row, ms in zip(values, mask, strict=True) for v, m in zip(row, ms, strict=True) if m]
    if not valid:
        return [[0.0 for _ in row] for row in values]
    centre = mean(valid)
    variance = math.fsum((v - centre) ** 2 for v in valid) / max(len(valid) - 1, 1)
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(v - centre) * scale if m else 0.0 for v, m in zip(row, ms, strict=True)]
        for row, ms in zip(values, mask, strict=True)
    ]


Rule = Callable[[list[float], list[int]], list[float]]


def grouped(rule: Rule, scores: list[float], index: list[str]) -> list[float]:
    """Apply a rule (scores of a group, its rows) to every group."""
    result = [0.0] * len(scores)
    for rows in members(index).values():
        for row, value in zip(rows, rule([scores[r] for r in rows], rows), strict=True):
            result[row] = value
    return result


def grpo_values(scores: list[float], index: list[str], by_std: bool = True, epsilon: float = 1e-6) -> list[float]:
    def rule(group: list[float], rows: list[int]) -> list[float]:
        centre, std = (mean(group), sample_std(group)) if len(group) > 1 else (0.0, 1.0)
        return [(s - centre) / (std + epsilon) if by_std else s - centre for s in group]

    return grouped(rule, scores, index)


def grpo(rewards: Matrix, mask: Matrix, index: list[str], by_std: bool = True, **unused: Any) -> Matrix:
    return over_tokens(grpo_values(scores_of(rewards), index, by_std), mask)


def grpo_passk(rewards: Matrix, mask: Matrix, index: list[str], by_std: bool = True, **unused: Any) -> Matrix:
    def rule(group: list[float], rows: list[int]) -> list[float]:
        first, second = sorted(group, reverse=True)[:2]
        gap = (first - second) / (sample_std(group) + 1e-6 if by_std else 1.0)
        best = group.index(first)
        return [gap if k == best else 0.0 for k in range(len(group))]

    return over_tokens(grouped(rule, scores_of(rewards), index), mask)


def rloo(rewards: Matrix, mask: Matrix, index: list[str], alone: float | None = None, **unused: Any) -> Matrix:
    def rule(group: list[float], rows: list[int]) -> list[float]:
        if len(group) == 1:
            return group if alone is None else [alone]
        return [s - mean(group[:k] + group[k + 1 :]) for k, s in enumerate(group)]

    return over_tokens(grouped(rule, scores_of(rewards), index), mask)


def rloo_vectorized(rewards: Matrix, mask: Matrix, index: list[str], **unused: Any) -> Matrix:
    return rloo(rewards, mask, index, alone=0.0)


def opo(rewards: Matrix, mask: Matrix, index: list[str], **unused: Any) -> Matrix:
    lengths = [sum(row) for row in mask]

    def rule(group: list[float], rows: list[int]) -> list[float]:
        tokens = sum(lengths[r] for r in rows)
        if len(group) == 1 or tokens == 0:
            return group
        baseline = math.fsum(lengths[r] * s for r, s in zip(rows, group, strict=True)) / tokens
        return [s - baseline for s in group]

    return over_tokens(grouped(rule, scores_of(rewards), index), mask)


def gpg(rewards: Matrix, mask: Matrix, index: list[str], **unused: Any) -> Matrix:
    scores = scores_of(rewards)
    alpha = len(scores) / max(sum(s != 0 for s in scores), 1)
    return over_tokens([alpha * a for a in grpo_values(scores, index, by_std=False)], mask)


def reinforce_plus_plus_baseline(rewards: Matrix, mask: Matrix, index: list[str], **unused: Any) -> Matrix:
    return whiten(over_tokens(grpo_values(scores_of(rewards), index, by_std=False), mask), mask)


def gdpo(rewards: Matrix, mask: Matrix, index: list[str], by_std: bool = True, **unused: Any) -> Matrix:
    return whiten(over_tokens(grpo_values(scores_of(rewards), index, by_std), mask), mask)


def gdpo_of_components(components: list[list[float]], weights: list[float], mask: Matrix, index: list[str]) -> Matrix:
    parts = [[w * a for a in grpo_values(c, index)] for w, c in zip(weights, components, strict=True)]
    return whiten(over_tokens([math.fsum(column) for column in zip(*parts, strict=True)], mask), mask)


def returns_to_go(rewards: Matrix, mask: Matrix) -> Matrix:
    return [
        [math.fsum(r * m for r, m in zip(row[t:], ms[t:], strict=True)) for t in range(len(row))]
        for row, ms in zip(rewards, mask, strict=True)
    ]


def reinforce_plus_plus(rewards: Matrix, mask: Matrix, gamma: float, **unused: Any) -> tuple[Matrix, Matrix]:
    returns = []
    for row, ms in zip(rewards, mask, strict=True):
        gs = []
        for t in range(len(row)):
            # r_t and what follows it, up to the next token outside the mask.
            total, k = row[t], t + 1
            while k < len(row) and ms[k]:
                total += gamma ** (k - t) * row[k]
                k += 1
            gs.append(total)
        returns.append(gs)
    return whiten(returns, mask), returns


def remax(rewards: Matrix, mask: Matrix, baselines: list[float], **unused: Any) -> tuple[Matrix, Matrix]:
    returns = returns_to_go(rewards, mask)
    advantages = [
        [(g - b) * m for g, m in zip(row, ms, strict=True)] for row, b, ms in zip(returns, baselines, mask, strict=True)
    ]
    return advantages, returns


def gae(rewards: Matrix, mask: Matrix, values: Matrix, gamma: float, lam: float) -> tuple[Matrix, Matrix]:
    """On the valid tokens of each row only, as the sum of discounted temporal differences (eq. 16)."""
    raw, returns = [], []
    for row, ms, vs in zip(rewards, mask, values, strict=True):
        steps = [t for t, m in enumerate(ms) if m]
        deltas = [
            row[t] + (gamma * vs[steps[k + 1]] if k + 1 < len(steps) else 0.0) - vs[t] for k, t in enumerate(steps)
        ]
        a = dict.fromkeys(range(len(row)), 0.0)
        for k, t in enumerate(steps):
            a[t] = math.fsum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(steps)))
        raw.append([a[t] for t in range(len(row))])
        returns.append([a[t] + vs[t] for t in range(len(row))])
    return whiten(raw, mask), returns


def optimal_token_baseline(
    rewards: Matrix,
    mask: Matrix,
    index: list[str],
    old_log_probs: Matrix,
    sum_pi_squared: Matrix,
    rho: Matrix | None = None,
    handle_zero_tail: bool = True,
    compact: bool = False,
) -> tuple[Matrix, Matrix]:
    """Both optimal token baselines; `compact` counts columns in valid tokens (the multi-turn form)."""
    width = len(rewards[0])
    returns = returns_to_go(rewards, mask)
    # Of each row: column -> (G, W, position).
    cells: list[dict[int, tuple[float, float, int]]] = []
    for i, ms in enumerate(mask):
        total, cell, k = 0.0, {}, 0
        for t in range(width):
            if ms[t]:
                norm = 1 - 2 * math.exp(old_log_probs[i][t]) + sum_pi_squared[i][t]
                total += norm * (rho[i][t] ** 2 if rho else 1.0)
                cell[k if compact else t] = (returns[i][t], total, t)
                k += 1
        cells.append(cell)
    advantages = [[0.0] * width for _ in mask]
    for rows in members(index).values():
        if compact:
            rows = [r for r in rows if cells[r]]
        for r in rows:
            others = [len(cells[q]) for q in rows if q != r]
            for column, (g, _, t) in cells[r].items():
                here = [cells[q][column] for q in rows if column in cells[q]]
                baseline = math.fsum(x * w for x, w, _ in here) / (math.fsum(w for _, w, _ in here) + 1e-8)
                lonely = bool(others) and len(cells[r]) > max(others) and column >= max(others)
                if not others or (handle_zero_tail and lonely):
                    baseline = 0.0
                advantages[r][t] = g - baseline
    return advantages, returns
