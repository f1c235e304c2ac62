#!/usr/bin/env python3
"""Run the demo's training job and say what it changed. `./demo.sh` prepares model and data and starts this.

The job itself is a plain `python -m rlflow.trainer.main_ppo key=value ...`; the command is printed, so that it can be
copied and varied. Afterwards this script reads what the run wrote (metrics.jsonl, validation/N.jsonl, global_step_N/)
and prints accuracy before and after, answers before and after, and where the checkpoint lies.

Exit code: that of the job; 1 when the job left nothing to report.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.utils.device import cpu_has_slow_bf16

# Chosen on 2 cores: the full demo stays under 15 minutes after set-up, --quick under 4.
STEPS = 20
QUICK_STEPS = 3
QUICK_VALIDATION_PROMPTS = 64


@dataclass(frozen=True)
class Answer:
    """One validation prompt, its answer and score."""

    prompt: str
    answer: str
    truth: str
    score: float

    @property
    def right(self) -> bool:
        return self.score > 0.5


def overrides(args: argparse.Namespace, run: Path) -> list[str]:
    """The job's command line: what differs from the defaults, and only that."""
    steps = args.steps
    # The fastest exact arithmetic of the machine, the same on both sides: the rollout's log-probs are the trainer's.
    dtype = "float32" if args.device == "cpu" and cpu_has_slow_bf16() else "bfloat16"
    return [
        f"data.train_files={args.data}/train.parquet",
        f"data.val_files={args.data}/test.parquet",
        f"data.val_max_samples={QUICK_VALIDATION_PROMPTS if args.quick else -1}",
        f"data.seed={args.seed}",
        "data.train_batch_size=8",
        "data.max_prompt_length=96",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={args.model}",
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.fuse_old_log_prob=true",  # one optimizer step a batch: no pass of its own for them
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={args.seed}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "algorithm.adv_estimator=grpo",
        f"trainer.device={args.device}",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
        "trainer.project_name=demo",
        f"trainer.experiment_name={run.name}",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=true",
        f"trainer.test_freq={steps}",
        f"trainer.save_freq={steps}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run}",
        f"trainer.validation_data_dir={run}/validation",
    ]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def user_text(prompt: str) -> str:
    """The user's part of a decoded chat prompt (special tokens are already gone)."""
    return prompt.rpartition("user\n")[2].removesuffix("assistant\n").removesuffix("assistant").strip()


def read_answers(run: Path, step: int) -> list[Answer]:
    rows = read_jsonl(run / "validation" / f"{step}.jsonl")
    # The score of an invalid reward is null: no answer to count as right.
    return [Answer(user_text(r["input"]), r["output"].strip(), str(r["gts"]), float(r["score"] or 0.0)) for r in rows]


def accuracy(answers: list[Answer]) -> float:
    return sum(a.right for a in answers) / len(answers)


def pick_samples(before: list[Answer], after: list[Answer], count: int = 6) -> list[tuple[Answer, Answer]]:
    """Pairs of answers to the same prompt: mostly newly right ones, but also what stayed or turned wrong."""
    old = {a.prompt: a for a in before}
    pairs = [(old[a.prompt], a) for a in after if a.prompt in old]
    gained = [p for p in pairs if not p[0].right and p[1].right]
    lost = [p for p in pairs if p[0].right and not p[1].right]
    still_wrong = [p for p in pairs if not p[0].right and not p[1].right]
    kept = [p for p in pairs if p[0].right and p[1].right]
    honest = still_wrong[:1] + lost[:1] + kept[:1]
    return (gained[: count - len(honest)] + honest)[:count]


def latest_checkpoint(run: Path) -> Path | None:
    tracker = run / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    folder = tracker.parent / f"global_step_{tracker.read_text().strip()}"
    return folder if folder.is_dir() else None


def step_summary(metrics: list[dict[str, Any]]) -> str:
    """Time a step and mean reward at the start and the end, where the metrics have them."""
    steps = [m["data"] for m in metrics if "timing_s/step" in m["data"]]
    if not steps:
        return ""
    seconds = [s["timing_s/step"] for s in steps]
    text = f"{len(steps)} steps, {sum(seconds) / len(seconds):.1f} s each"
    rewards = [s["critic/score/mean"] for s in steps if "critic/score/mean" in s]
    if len(rewards) > 1:
        third = max(1, len(rewards) // 3)
        first, last = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
        text += f"; mean reward of sampled answers {first:.2f} (first {third}) -> {last:.2f} (last {third})"
    return text


def report(run: Path, steps: int) -> int:
    """Print what the run changed; 1 when its validation files are missing."""
    before, after = read_answers(run, 0), read_answers(run, steps)
    if not before or not after:
        missing = [f"{step}.jsonl" for step, rows in ((0, before), (steps, after)) if not rows]
        print(f"demo: the job ended without {' and '.join(missing)} in {run / 'validation'}", file=sys.stderr)
        return 1
    print()
    print(f"Greedy accuracy on {len(after)} held-out prompts")
    print(f"    before   {accuracy(before):6.3f}")
    print(f"    after    {accuracy(after):6.3f}   ({accuracy(after) - accuracy(before):+.3f})")
    summary = step_summary(read_jsonl(run / "metrics.jsonl"))
    if summary:
        print(f"    {summary}")
    print()
    print("Sample answers (right answer in brackets)")
    for old, new in pick_samples(before, after):
        print(f"    {old.prompt}   [{old.truth}]")
        print(f"        before {'+' if old.right else '-'} {old.answer!r}")
        print(f"        after  {'+' if new.right else '-'} {new.answer!r}")
    print()
    checkpoint = latest_checkpoint(run)
    print(f"Checkpoint   {checkpoint if checkpoint else 'none was written'}")
    print(f"Metrics      {run / 'metrics.jsonl'}")
    print(f"Look inside  {Path(sys.executable).with_name('rlflow')} view {run} --open")
    return 0


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo.sh", description="Teach SmolLM2-135M-Instruct one-digit sums with GRPO."
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps and fewer held-out prompts")
    parser.add_argument("--seed", type=int, default=0, help="of data order and sampling (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=None, help=f"training steps (default {STEPS})")
    parser.add_argument("--model", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where torch sees a GPU")
    args = parser.parse_args(argv)
    args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    for name in ("model", "data", "runs"):
        setattr(args, name, getattr(args, name).expanduser().resolve())
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    for path in (args.model / "config.json", args.data / "train.parquet", args.data / "test.parquet"):
        if not path.is_file():
            print(f"demo: no file {path}; ./demo.sh makes it", file=sys.stderr)
            return 1
    args.device = args.device or default_device()
    run = args.runs / f"demo-{time.strftime('%Y%m%d-%H%M%S')}-seed{args.seed}"
    run.mkdir(parents=True)
    command = [sys.executable, "-m", "rlflow.trainer.main_ppo", *overrides(args, run)]
    print(f"Run folder: {run}\n{shlex.join(command)}\n", flush=True)
    start = time.monotonic()
    job = subprocess.Popen(command)
    while True:
        try:
            code = job.wait()
            break
        except KeyboardInterrupt:  # the job got the signal too and ends in order; its exit code is what counts
            continue
    if code != 0:
        print(f"demo: the training job failed with exit code {code}; its last words are above, its files in {run}",
              file=sys.stderr)  # fmt: skip
        return code if code > 0 else 128 - code
    print(f"\nTraining took {(time.monotonic() - start) / 60:.1f} minutes.")
    return report(run, args.steps)


if __name__ == "__main__":
    sys.exit(main())
