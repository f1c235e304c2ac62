"""The memory that `rlflow plan` foretells, beside what real workers take.

    python benchmarks/plan_memory.py --model ~/.cache/rlflow/models/SmolLM2-135M-Instruct       # 2 minutes

For each setting a trainer's worker makes two optimizer steps and a rollout server generates a step's answers, each in a
process of its own, on rows of full length. Compared is its highest resident memory, less what it had after its imports,
with the plan's phase. Exit code: 0; 1 when a process failed; with `--check` also when an estimate is off by more than
25 %.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from step import say
from step_sides import HERE, SideFailed, start

GOAL = 0.25
PHASES = {"trainer": "train", "server": "rollout"}
ROLES = {"trainer": "trainer process", "server": "rollout server"}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# setting -> (prompts a step, answers each, tokens of an answer, further overrides)
SETTINGS: dict[str, tuple[int, int, int, list[str]]] = {
    "grpo": (8, 4, 64, [f"{MODEL}.enable_gradient_checkpointing=false"]),
    "grpo with checkpointing": (4, 8, 256, [f"{MODEL}.enable_gradient_checkpointing=true"]),
    "lora": (8, 4, 64, [f"{MODEL}.lora_rank=16", f"{MODEL}.enable_gradient_checkpointing=false"]),
    "ppo": (8, 2, 64, ["algorithm.adv_estimator=gae", f"{MODEL}.enable_gradient_checkpointing=true"]),
}


def write_files(folder: Path) -> None:
    """Files that the checks look for; their rows are never read."""
    for name in ("train", "test"):
        (folder / f"{name}.parquet").write_text("", encoding="utf-8")


def overrides(args: argparse.Namespace, folder: Path, name: str) -> list[str]:
    """The command line of a setting."""
    prompts, answers, tokens, more = SETTINGS[name]
    if "algorithm.adv_estimator=gae" in more:
        more = [*more, f"critic.model.path={args.model}", "critic.model.enable_gradient_checkpointing=true",
                "critic.fsdp.dtype=float32"]  # fmt: skip
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={args.prompt}",
        f"data.max_response_length={tokens}",
        f"{MODEL}.path={args.model}",
        f"{ACTOR}.ppo_mini_batch_size={prompts}",
        f"{ACTOR}.use_dynamic_bsz=true",
        f"{ACTOR}.ppo_max_token_len_per_gpu={args.tokens}",
        f"{ACTOR}.fsdp_config.dtype=float32",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n={answers}",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.ignore_eos=true",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.agent.num_workers=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[file]",
        *more,
    ]


def foretold(command: list[str]) -> dict[str, dict[str, int]]:
    """Role -> bytes of each phase."""
    sys.path.insert(0, str(HERE.parent))
    from rlflow.trainer.plan import make_plan

    devices = {device.name: device.peaks for device in make_plan(command).memory.devices}
    return {role: devices[name] for role, name in ROLES.items()}


def measured(args: argparse.Namespace, root: Path, role: str, command: list[str]) -> int:
    """Highest resident bytes of a process without those of its imports."""
    out = root / f"{role}.json"
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "RLFLOW_DEVICE": "cpu"}
    start(
        [sys.executable, str(HERE / "plan_memory_sides.py"), role, str(out), *command], env, root / "log", args.timeout
    )
    found = json.loads(out.read_text(encoding="utf-8"))
    return int(found["peak"] - found["imports"])


def compare(args: argparse.Namespace, root: Path, name: str) -> list[dict[str, Any]]:
    """One row a process of a setting."""
    command = overrides(args, root, name)
    plan = foretold(command)
    real = {role: measured(args, root, role, command) for role in ROLES}
    rows = []
    for role in ROLES:
        phase = PHASES[role]
        size = plan[role][phase]
        error = size / real[role] - 1
        rows.append(
            {"setting": name, "process": role, "phase": phase, "plan": size, "measured": real[role], "error": error}
        )
        sizes = f"plan {size / 2**20:7.0f} MiB ({phase}), measured {real[role] / 2**20:7.0f} MiB"
        say(f"{name:24} {role:8} {sizes}: {error:+.0%}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Memory of the plan beside that of real processes.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a small causal LM")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="default: all")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: 128)")
    parser.add_argument("--tokens", type=int, default=4096, help="token budget of a forward (default: 4096)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run may take (default: 300)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--check", action="store_true", help="an estimate off by more than 25 %% is an error")
    args = parser.parse_args(argv)
    args.model = args.model.expanduser().resolve()
    with tempfile.TemporaryDirectory(prefix="rlflow_memory_") as folder:
        root = Path(folder)
        write_files(root)
        try:
            rows = [row for name in args.settings for row in compare(args, root, name)]
        except SideFailed as failure:
            say(str(failure))
            return 1
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    worst = max(abs(row["error"]) for row in rows)
    say(f"worst: {worst:.0%} (goal: at most {GOAL:.0%})")
    return 1 if args.check and worst > GOAL else 0


if __name__ == "__main__":
    sys.exit(main())
