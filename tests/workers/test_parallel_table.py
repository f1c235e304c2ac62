"""The acceptance table: however ranks, rows and tokens are cut, the same rollouts give the same gradient, weights."""

from __future__ import annotations

import itertools

import parallel_cases
import pytest
import rank_jobs
import torch
from test_gradients import _relative

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def plain(table_models, single_process_group):
    """What one process gives: kind of case -> result."""
    return rank_jobs.plain_results(table_models)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the first cases of a table save their checkpoints."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def tables(table_models, start_ranks, folder, plain):
    """World size -> (case, result) of every combination."""
    cases = {world: parallel_cases.pairwise(world) for world in WORLDS}
    several = {world: cases[world] for world in WORLDS if world > 1}
    results = start_ranks(max(WORLDS), "tables", models=table_models, cases=several, folder=str(folder))
    results[1] = [rank_jobs.run_case(table_models, case) for case in cases[1]]
    return {world: list(zip(cases[world], results[world], strict=True)) for world in WORLDS}


@pytest.mark.parametrize("world", WORLDS)
def test_no_combination_changes_the_numbers(tables, plain, world):
    wrong = [f"{case}: {problem}" for case, result in tables[world] for problem in differences(case, result, plain)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 4])
def test_checkpoints_of_any_mesh_go_on_in_one_process(tables, folder, table_models, world):
    """Sequences over several ranks, replicated groups, plain shards."""
    cases = [case for case, _ in tables[world]]
    for i in parallel_cases.savers(cases):
        load = str(folder / f"{world}_{i}")
        (alone,) = (c for c in parallel_cases.plain_cases() if parallel_cases.kind(c) == parallel_cases.kind(cases[i]))
        engine = rank_jobs.build_case(table_models, alone, load=load)
        for name, value in rank_jobs.trained_params(engine).items():
            assert torch.equal(value, tables[world][i][1]["AdamW"][name]), (cases[i], name)
        after = rank_jobs.step_on(engine, rank_jobs.table_loss(alone), alone)
        assert _relative(after, tables[world][i][1]["next"]) < 1e-5, cases[i]


@pytest.mark.parametrize("world", [2, 4])
def test_a_mesh_loads_what_another_one_saved(tables, world):
    savers = parallel_cases.savers([case for case, _ in tables[world]])
    assert len(savers) > 1
    for before, i in itertools.pairwise(savers):
        for name, value in tables[world][before][1]["AdamW"].items():
            assert torch.equal(tables[world][i][1]["loaded"][name], value), name


def differences(case, result, plain):
    """What is not as in the plain run."""
    expected = plain[parallel_cases.kind(case)]
    if result["loss"] != pytest.approx(float(expected["loss"]), rel=1e-5, abs=1e-7):
        yield f"loss {float(result['loss'])} instead of {float(expected['loss'])}"
    for row, (mine, theirs) in enumerate(zip(result["outputs"], expected["outputs"], strict=True)):
        if not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5):
            yield f"outputs of row {row} differ by {float((mine - theirs).abs().max()):.1e}"
    # A prompt that rows share is routed once, and padding is not counted at all.
    if case["layout"] == "packed" and result["load"] != pytest.approx(expected["load"], rel=1e-5):
        yield f"load {result['load']} instead of {expected['load']}"
    for name in ("grads", "SGD", "exported"):
        error = _relative(result[name], expected[name])
        if not error < 1e-5:
            yield f"{name} differ by {error:.1e} of their norm"
    far, entries = 0, 0
    for name, value in expected["AdamW"].items():
        far += int(((result["AdamW"][name] - value).abs() > 0.1 * rank_jobs.ADAMW_LR).sum())
        entries += value.numel()
    if not far <= 1e-3 * entries:
        yield f"{far} of {entries} entries differ after AdamW"


def test_training_moves_the_weights_of_the_table(plain, table_models):
    """Otherwise equal weights would say nothing."""
    for case in parallel_cases.plain_cases():
        result = plain[parallel_cases.kind(case)]
        start = rank_jobs.trained_params(rank_jobs.build_case(table_models, case))
        assert _relative(start, result["SGD"]) > 1e-4, case
        moved = torch.cat([(result["AdamW"][n] - v).abs().flatten() for n, v in start.items()])
        assert float((moved > rank_jobs.ADAMW_LR).float().mean()) > 0.3, case


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_settings_meets(world):
    met = {pair for case in parallel_cases.pairwise(world) for pair in parallel_cases.pairs_of(case)}
    for a, b in ((a, b) for a in parallel_cases.FACTORS for b in parallel_cases.FACTORS if a < b):
        for x in parallel_cases.FACTORS[a]:
            for y in parallel_cases.FACTORS[b]:
                assert ((a, x), (b, y)) in met or not parallel_cases.allowed({a: x, b: y}, world), (a, x, b, y)
