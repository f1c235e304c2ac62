"""A run that is killed after a checkpoint goes on from it: step, data cursor, optimizer, RNG."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlflow.checkpoint import find_latest_checkpoint


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / "actor" / "huggingface").glob("*.safetensors")):
        tensors |= load_file(file)
    assert tensors
    return tensors


@pytest.mark.timeout(280)
def test_a_killed_run_resumes_and_ends_where_the_unbroken_run_ends(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tmp_path: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
) -> None:
    common = [
        *tiny_overrides,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.load_contents=[model,optimizer,extra]",
    ]
    run_trainer([*common, f"trainer.default_local_dir={tmp_path}/unbroken"])
    unbroken = read_metrics()
    (tmp_path / "tiny" / "run.jsonl").unlink()

    killed = tmp_path / "killed"
    # Its checkpoints are written while it goes on.
    broken = [*common, f"trainer.default_local_dir={killed}", "actor_rollout_ref.actor.checkpoint.async_save=true"]
    command = [sys.executable, "-m", "rlflow.trainer.main_ppo", *broken]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env["RLFLOW_FILE_LOGGER_ROOT"] = str(tmp_path)
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 150
    while not (killed / "latest_checkpointed_iteration.txt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    # As when the machine goes down: everything the run started ends at once.
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)
    saved = find_latest_checkpoint(killed)
    assert saved is not None
    first = json.loads((saved / "trainer_state.json").read_text())["global_step"]
    assert first < 3

    run_trainer(broken)
    resumed = {line["step"]: line["data"] for line in read_metrics()}
    for line in unbroken:
        if line["step"] <= first:
            continue
        again = resumed[line["step"]]
        for name in ("critic/score/mean", "response_length/mean", "actor/lr", "global_seqlen/mean"):
            assert again[name] == pytest.approx(line["data"][name]), (line["step"], name)
        assert again["actor/grad_norm"] == pytest.approx(line["data"]["actor/grad_norm"], rel=1e-3)

    ours, theirs = weights(killed / "global_step_3"), weights(tmp_path / "unbroken" / "global_step_3")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].float(), value.float(), atol=1e-4, rtol=1e-3, msg=name)
    roots = (killed, tmp_path / "unbroken")
    cursors = [torch.load(root / "global_step_3" / "data.pt", weights_only=True) for root in roots]
    assert cursors[0] == cursors[1]
