"""The memory that `rlflow plan` foretells, beside what the processes of the run take.

    python benchmarks/plan_memory.py --model ~/.cache/rlflow/models/SmolLM2-135M-Instruct       # 2 minutes a setting

Each setting is planned, then run for two steps on one CPU process with answers of full length. Compared is the highest
resident memory of the trainer and of the rollout server, less what they had after their imports, with the plan's worst
phase. Exit code: 0; 1 when a run failed; with `--check` also when an estimate is off by more than 25 %.
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
WORDS = 80
ROLES = {"trainer": "trainer process", "server": "rollout server"}
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
# setting -> (prompts a step, answers each, tokens of an answer, further overrides)
SETTINGS: dict[str, tuple[int, int, int, list[str]]] = {
    "grpo": (8, 4, 64, [f"{MODEL}.enable_gradient_checkpointing=false"]),
    "grpo with checkpointing": (4, 8, 256, [f"{MODEL}.enable_gradient_checkpointing=true"]),
    "lora": (8, 4, 64, [f"{MODEL}.lora_rank=16", f"{MODEL}.enable_gradient_checkpointing=false"]),
    "ppo": (8, 2, 64, ["algorithm.adv_estimator=gae", f"{MODEL}.enable_gradient_checkpointing=true"]),
}


def write_prompts(folder: Path) -> None:
    """Prompts of equal length."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "seven " * WORDS
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number % 10} {text}"}],
            "data_source": "memory",
            "reward_model": {"style": "rule", "ground_truth": "7"},
            "extra_info": {"index": number},
        }
        for number in range(16)
    ]
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(solution_str, **_):\n    return float(len(solution_str) % 7)\n"
    )


def prompt_tokens(model: Path, folder: Path) -> int:
    """Tokens of the prompts, all of which are as long."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    prompts = pq.read_table(folder / "train.parquet").column("prompt").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(model)
    lengths = [
        len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        for prompt in prompts
    ]
    return max(lengths)


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
        f"data.max_prompt_length={prompt_tokens(args.model, folder)}",
        f"data.max_response_length={tokens}",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.num_workers=1",
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
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.plots=false",
        f"trainer.default_local_dir={folder}/{name.replace(' ', '_')}",
        *more,
    ]


def foretold(command: list[str]) -> dict[str, dict[str, int]]:
    """Role -> bytes of each phase."""
    sys.path.insert(0, str(HERE.parent))
    from rlflow.trainer.plan import make_plan

    devices = {device.name: device.peaks for device in make_plan(command).memory.devices}
    return {role: devices[name] for role, name in ROLES.items()}


def measured(args: argparse.Namespace, root: Path, command: list[str]) -> dict[str, int]:
    """Role -> highest resident bytes without those of the imports."""
    notes = Path(tempfile.mkdtemp(dir=root, prefix="notes"))
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "RLFLOW_MEMORY_PROBE": str(notes), "RAY_ADDRESS": "local"}
    probe = f"{MODEL}.external_lib=plan_memory_probe"
    start([sys.executable, "-m", "rlflow.trainer.main_ppo", *command, probe], env, notes / "run.log", args.timeout)
    found = [json.loads(file.read_text(encoding="utf-8")) for file in notes.glob("*.json")]
    return {role: max(one["peak"] - one["imports"] for one in found if one["role"] == role) for role in ROLES}


def compare(args: argparse.Namespace, root: Path, name: str) -> list[dict[str, Any]]:
    """One row a process of a setting."""
    command = overrides(args, root, name)
    plan, real = foretold(command), measured(args, root, command)
    rows = []
    for role in ROLES:
        phase, size = max(plan[role].items(), key=lambda item: item[1])
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
    parser.add_argument("--tokens", type=int, default=4096, help="token budget of a forward (default: 4096)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a run may take (default: 300)")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--check", action="store_true", help="an estimate off by more than 25 %% is an error")
    args = parser.parse_args(argv)
    args.model = args.model.expanduser().resolve()
    with tempfile.TemporaryDirectory(prefix="rlflow_memory_") as folder:
        root = Path(folder)
        write_prompts(root)
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
