"""The acceptance table: however ranks, rows and tokens are cut, the same rollouts give the same gradient, weights."""

from __future__ import annotations

import parallel_cases
import pytest
import rank_jobs
import torch
from test_gradients import _relative

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def plain(tiny_model, single_process_group):
    """What one process gives: (critic?) -> result."""
    return {c: rank_jobs.run_case(tiny_model, parallel_cases.PLAIN | {"critic": c}) for c in (False, True)}


def test_no_combination_changes_the_numbers(tiny_model, run_ranks, plain):
    cases = {world: parallel_cases.pairwise(world) for world in WORLDS}
    results = run_ranks(max(WORLDS), "tables", path=tiny_model, cases={w: cases[w] for w in WORLDS if w > 1})
    results[1] = [rank_jobs.run_case(tiny_model, case) for case in cases[1]]
    wrong = [
        f"{world} ranks, {case}: {problem}"
        for world in WORLDS
        for case, result in zip(cases[world], results[world], strict=True)
        for problem in differences(case, result, plain)
    ]
    assert not wrong, "\n".join(wrong)


def differences(case, result, plain):
    """What is not as in the plain run."""
    expected = plain[case["critic"]]
    if result["loss"] != pytest.approx(float(expected["loss"]), rel=1e-5, abs=1e-7):
        yield f"loss {float(result['loss'])} instead of {float(expected['loss'])}"
    for row, (mine, theirs) in enumerate(zip(result["outputs"], expected["outputs"], strict=True)):
        if not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5):
            yield f"outputs of row {row} differ by {float((mine - theirs).abs().max()):.1e}"
    for name in ("grads", "SGD"):
        error = _relative(result[name], expected[name])
        if not error < 1e-5:
            yield f"{name} differ by {error:.1e} of their norm"
    far, entries = 0, 0
    for name, value in expected["AdamW"].items():
        far += int(((result["AdamW"][name] - value).abs() > 0.1 * rank_jobs.ADAMW_LR).sum())
        entries += value.numel()
    if not far <= 1e-3 * entries:
        yield f"{far} of {entries} entries differ after AdamW"


def test_training_moves_the_weights_of_the_table(plain, tiny_model, single_process_group):
    """Otherwise equal weights would say nothing."""
    start = rank_jobs.full_params(rank_jobs.build(tiny_model))
    assert _relative(start, plain[False]["SGD"]) > 1e-4
    moved = torch.cat([(plain[False]["AdamW"][n] - v).abs().flatten() for n, v in start.items()])
    assert float((moved > rank_jobs.ADAMW_LR).float().mean()) > 0.5


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_settings_meets(world):
    met = {pair for case in parallel_cases.pairwise(world) for pair in parallel_cases.pairs_of(case)}
    for a, b in ((a, b) for a in parallel_cases.FACTORS for b in parallel_cases.FACTORS if a < b):
        for x in parallel_cases.FACTORS[a]:
            for y in parallel_cases.FACTORS[b]:
                assert ((a, x), (b, y)) in met or not parallel_cases.allowed({a: x, b: y}, world), (a, x, b, y)
