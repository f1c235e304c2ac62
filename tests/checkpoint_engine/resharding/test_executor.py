"""Four real ranks change the layout of a model: values are exact, and nothing is received that was there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("reshard_job.py")
WORLD = 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """What each rank counted, by scenario; a failed check fails its process."""
    folder = tmp_path_factory.mktemp("reshard")
    env = {
        **os.environ,
        "PYTHONPATH": str(JOB.parents[3]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run([sys.executable, str(JOB), str(folder), str(WORLD)], env=env, timeout=100)
    assert done.returncode == 0
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(WORLD)]


def test_tensor_parallel_training_receives_what_the_formula_says(reports: list[dict[str, dict[str, int]]]) -> None:
    from rlflow.checkpoint_engine.resharding.groups import plan_hybrid_groups

    plan = plan_hybrid_groups(1, 4, 1, 1, 2)
    for report in reports:
        got = report["tp4_to_tp2"]
        assert got["received"] == got["sent"] == plan.bytes(got["split_bytes"]).received > 0
        # The rank that would gather the whole model gets three times as much.
        assert plan.bytes(got["split_bytes"]).full_gather == 3 * got["received"]


def test_pipeline_training_receives_what_the_formula_says(reports: list[dict[str, dict[str, int]]]) -> None:
    """Stages differ: embedding and head are not even. All ranks together receive what they lack."""
    for report in reports:
        got = report["pp2_tp2_to_tp2"]
        assert got["received"] == got["wanted"] - got["held_wanted"]


def test_fsdp_training_receives_what_a_rank_lacks(reports: list[dict[str, dict[str, int]]]) -> None:
    for rank, report in enumerate(reports):
        got = report["fsdp4_to_tp2"]
        assert got["received"] == got["wanted"] - got["held_wanted"]
        assert 0 < got["received"] < got["full_gather"] * 0.7, rank


def test_a_narrower_wire_type_halves_the_traffic(reports: list[dict[str, dict[str, int]]]) -> None:
    for report in reports:
        assert 2 * report["fsdp4_to_tp2_bf16"]["received"] == report["fsdp4_to_tp2"]["received"]


def test_equal_layouts_move_nothing(reports: list[dict[str, dict[str, int]]]) -> None:
    assert [report["tp4_to_tp4"]["received"] for report in reports] == [0] * WORLD


@pytest.mark.parametrize("model", ["assembled", "phi_assembled", "engine"])
def test_ranks_of_a_replica_put_its_weights_together(reports: list[dict[str, dict[str, int]]], model: str) -> None:
    """One rank feeds a server that wants whole tensors; what it does not get over the network its neighbour writes."""
    from rlflow.checkpoint_engine.resharding.groups import plan_hybrid_groups

    for report in reports:
        got = report[model]
        assert got["received"] == plan_hybrid_groups(1, 4, 1, 1, 2).bytes(got["model"]).received


def test_two_ranks_feed_one_server(reports: list[dict[str, dict[str, int]]]) -> None:
    from rlflow.checkpoint_engine.resharding.groups import plan_hybrid_groups

    for leader in (0, 2):
        got = reports[leader]["weight_sync"]
        assert got["received"] == plan_hybrid_groups(1, 4, 1, 1, 2).bytes(got["model"]).received
    assert reports[1]["weight_sync"] == reports[3]["weight_sync"] == {}
