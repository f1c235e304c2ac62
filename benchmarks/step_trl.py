"""TRL's side of `step.py`: its GRPOTrainer on the same model, prompts and token counts, in an environment of its own.

    TRL_PYTHON benchmarks/step_trl.py --model ... --data train.parquet --steps 4 --new-tokens 16 --out trl.json

Its fastest way on a CPU: `generate` of transformers with its cache, no gradient checkpointing, fused AdamW, no
reference model (beta 0), no evaluation, log or checkpoint. One generation batch, one optimizer step, hence no pass for
old log-probs. EOS is suppressed by `min_new_tokens`, so that every completion has the same length.

A step lasts from the end of the optimizer step before it to the end of its own: data, generation, scores, advantages,
update. The first one also holds the start of the trainer, so at least one is to be left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def read_prompts(path: Path, count: int) -> list[dict[str, Any]]:
    """The first rows of the parquet file, as TRL's columns."""
    import pyarrow.parquet as pq

    rows = pq.read_table(path, columns=["prompt", "reward_model"]).slice(0, count).to_pylist()
    return [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]


class Scorer:
    """1 when the last number of the answer is the right one; also counts what was generated."""

    __name__ = "last_number"

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.tokens: list[int] = []

    def __call__(
        self, completions: list[Any], completion_ids: list[list[int]], ground_truth: list[str], **_: Any
    ) -> list[float]:
        self.rows.append(len(completion_ids))
        self.tokens.append(sum(map(len, completion_ids)))
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [float(self._last(text) == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    @staticmethod
    def _last(text: str) -> str | None:
        found = NUMBER.findall(text)
        return found[-1] if found else None


def clocked(owner: Any, name: str, seconds: list[float]) -> None:
    """Add up the time of a method's calls in the last element of `seconds`."""
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[-1] += time.perf_counter() - start

    setattr(owner, name, call)


def build_trainer(args: argparse.Namespace, scorer: Scorer) -> Any:
    """The trainer, ready for `train()`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = args.prompts * args.group
    # bfloat16: mixed precision over fp32 weights, as TRL does by default; float32: no autocast.
    config = GRPOConfig(
        output_dir=str(Path(args.out).with_suffix(".trainer")),
        use_cpu=True,
        bf16=args.dtype == "bfloat16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=rows // args.micro_batch,
        num_generations=args.group,
        max_completion_length=args.new_tokens,
        generation_kwargs={"min_new_tokens": args.new_tokens},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        num_iterations=1,
        loss_type="dapo",  # the mean over all tokens of the batch: `token-mean`
        scale_rewards="group",
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
    return GRPOTrainer(
        model=args.model,
        args=config,
        reward_funcs=scorer,
        train_dataset=Dataset.from_list(read_prompts(Path(args.data), args.prompts * args.steps)),
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train `args.steps` steps; the figures of each."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    started = time.time()
    ends: list[float] = []
    seen: list[int] = [0]
    generation, scoring = [0.0], [0.0]

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            ends.append(time.perf_counter())
            seen.append(int(state.num_input_tokens_seen))
            generation.append(0.0)
            scoring.append(0.0)

    scorer = Scorer()
    trainer = build_trainer(args, scorer)
    clocked(trainer, "_generate", generation)
    clocked(trainer, "_calculate_rewards", scoring)
    trainer.add_callback(Clock())
    trainer.train()
    steps = [
        {
            "seconds": ends[i + 1] - ends[i],
            "generate_s": generation[i],
            "reward_s": scoring[i],
            "rows": scorer.rows[i],
            "new_tokens": scorer.tokens[i],
            "prompt_tokens": seen[i + 1] - seen[i] - scorer.tokens[i],
        }
        for i in range(len(ends) - 1)
    ]
    packages = ("trl", "torch", "transformers", "accelerate", "datasets")
    return {
        "steps": steps,
        "threads": torch.get_num_threads(),
        "seconds": time.time() - started,
        "versions": {name: version(name) for name in packages},
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; rows must divide into micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="parquet with `prompt` and `reward_model`")
    parser.add_argument("--out", required=True, help="JSON file of the figures")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch", type=int, default=64, help="rows of one forward and backward")
    args = parser.parse_args(argv)
    if args.prompts * args.group % args.micro_batch:
        parser.error(f"{args.prompts} x {args.group} rows do not divide into micro-batches of {args.micro_batch}")
    return args


def main() -> int:
    """Run and write the figures."""
    args = parse_args()
    Path(args.out).write_text(json.dumps(run(args), indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
