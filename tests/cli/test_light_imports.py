"""What a quick answer may import: the time of these commands is the time of their imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "ray", "transformers", "tensordict", "vllm", "sglang"}
PROBE = """
import contextlib, io, json, sys
from {module} import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    try:
        code = main({arguments!r})
    except SystemExit as stop:
        code = stop.code
print(json.dumps([code, sorted(set({heavy!r}) & set(sys.modules))]))
"""


def imported(module: str, *arguments: str) -> tuple[int, set[str]]:
    import json

    code = PROBE.format(module=module, arguments=list(arguments), heavy=sorted(HEAVY | {"omegaconf", "hydra"}))
    environment = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    exit_code, names = json.loads(done.stdout.splitlines()[-1])
    return exit_code, set(names)


def test_help_reads_no_configuration() -> None:
    assert imported("rlflow.cli.main", "--help") == (0, set())


@pytest.mark.parametrize("module", ["rlflow.trainer.main_ppo", "rlflow.cli.main"])
def test_a_bad_key_is_answered_without_heavy_imports(module: str) -> None:
    bad = ["trainer.total_epoch=3", "actor_rollout_ref.rollout.name=hf"]
    code, names = imported(module, *(["plan"] if module.endswith("cli.main") else []), *bad)
    assert code == 2 and not names & HEAVY


def test_a_key_is_explained_without_heavy_imports() -> None:
    code, names = imported("rlflow.cli.main", "config", "explain", "*.optim.lr")
    assert code == 0 and not names & HEAVY


def test_a_plan_starts_and_imports_no_ray_and_no_transformers(tmp_path: Path) -> None:
    for name in ("train.parquet", "val.parquet"):
        (tmp_path / name).write_text("no parquet: its rows are not known")
    (tmp_path / "config.json").write_text("{}")
    overrides = [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/val.parquet",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={tmp_path}",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "algorithm.adv_estimator=grpo",
        "trainer.device=cpu",
        "trainer.logger=[file]",
    ]
    code, names = imported("rlflow.cli.main", "plan", *overrides)
    assert code == 0 and not names & {"ray", "transformers", "vllm", "sglang"}
