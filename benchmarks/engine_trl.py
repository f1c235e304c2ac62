"""TRL's side of `engine.py`: the optimisation step of its GRPOTrainer on a given batch, in an environment of its own.

    TRL_PYTHON benchmarks/engine_trl.py --model ... --rows rows.json --out trl.json

Only the generation is replaced: where the trainer would generate and score, it gets the rows of the file. Loss,
backward, clipping, AdamW and the trainer's loop are TRL's. A step lasts from the end of one optimizer step to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def given_inputs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What `_generate_and_score_completions` returns: prompts padded left, completions right."""
    import torch

    longest_prompt = max(len(row["prompt"]) for row in rows)
    longest = max(len(row["response"]) for row in rows)
    left = [longest_prompt - len(row["prompt"]) for row in rows]
    right = [longest - len(row["response"]) for row in rows]
    return {
        "prompt_ids": torch.tensor([[0] * n + row["prompt"] for n, row in zip(left, rows, strict=True)]),
        "prompt_mask": torch.tensor([[0] * n + [1] * (longest_prompt - n) for n in left]),
        "completion_ids": torch.tensor([row["response"] + [0] * n for n, row in zip(right, rows, strict=True)]),
        "completion_mask": torch.tensor([[1] * (longest - n) + [0] * n for n in right]),
        "advantages": torch.tensor([row["advantage"] for row in rows], dtype=torch.float32),
        "num_items_in_batch": torch.tensor(sum(len(row["response"]) for row in rows)),
    }


def build_trainer(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Any:
    """The trainer, ready for `train()`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class GivenBatch(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return given_inputs(rows)

    config = GRPOConfig(
        output_dir=str(args.out.with_suffix(".trainer")),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=len(rows) // args.micro_batch,
        num_generations=args.group,
        max_completion_length=max(len(row["response"]) for row in rows),
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dapo",  # the mean over all tokens of the batch: `token-mean`
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        shuffle_dataset=False,
        max_steps=args.steps,
        seed=0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    prompts = [{"prompt": "the batch is given"}] * (len(rows) * args.steps)
    return GivenBatch(
        model=str(args.model),
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list(prompts),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train `args.steps` steps; the seconds of each and the gradient norms."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = json.loads(args.rows.read_text(encoding="utf-8"))
    ends: list[float] = []
    norms: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = build_trainer(args, rows)
    trainer.add_callback(Clock())
    clip = trainer.accelerator.clip_grad_norm_

    def noted(*positional: Any, **named: Any) -> Any:
        norm = clip(*positional, **named)
        norms.append(float(norm))
        return norm

    trainer.accelerator.clip_grad_norm_ = noted
    trainer.train()
    packages = ("trl", "torch", "transformers", "accelerate")
    return {
        "seconds": [ends[i + 1] - ends[i] for i in range(len(ends) - 1)],
        "norms": norms,
        "versions": {name: version(name) for name in packages},
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="JSON: [{prompt, response, advantage}]")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of one forward and backward")
    parser.add_argument("--lr", type=float, default=1e-6)
    return parser.parse_args(argv)


def main() -> int:
    """Run and write the figures."""
    args = parse_args()
    args.out.write_text(json.dumps(run(args), indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
