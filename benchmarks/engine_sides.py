"""Our side of `engine.py` and the bare loop, in this process; `python engine_sides.py memory ...` is one memory figure.

The bare loop is what one would write by hand for the same step: a transformers model over equally long rows (so that
nothing is padded), log-probs at the response positions, the clipped loss, clipping, fused AdamW. No engine, no options.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

# The ways of our engine, as options of a batch.
WAYS: dict[str, dict[str, Any]] = {
    "padded": {"use_remove_padding": False, "share_prompts": False},
    "packed": {"use_remove_padding": True, "share_prompts": False},
    "shared": {"use_remove_padding": True, "share_prompts": True},
}
CLIP = 0.2


def make_rows(prompts: int, group: int, response: int, vocab: int, *, equal: bool) -> list[dict[str, Any]]:
    """Random rows: `group` responses to a prompt of 4 x `response` tokens; lengths 0.5 to 1.5 of the mean, or equal."""
    g = np.random.default_rng(0)
    low, high = (response, response) if equal else (response // 2, response + response // 2)
    rows = []
    for _ in range(prompts):
        prompt = g.integers(3, vocab, 4 * response).tolist()
        for _ in range(group):
            length = int(g.integers(low, high + 1))
            rows.append({"prompt": prompt, "response": g.integers(3, vocab, length).tolist(), "advantage": g.normal()})
    return rows


def to_batch(rows: list[dict[str, Any]]) -> Any:
    """The rows as a policy update reads them, without old log-probs."""
    from rlflow.utils import tensordict_utils as tu

    fields: dict[str, list[Tensor]] = {}
    for row in rows:
        response = torch.tensor(row["response"])
        values = {
            "input_ids": torch.tensor(row["prompt"] + row["response"]),
            "responses": response,
            "response_mask": torch.ones_like(response),
            "advantages": torch.full((len(response),), row["advantage"], dtype=torch.float32),
        }
        for name, value in values.items():
            fields.setdefault(name, []).append(value)
    return tu.get_tensordict({name: tu.nested_from_list(values) for name, values in fields.items()})


def build_engine(model: str, lr: float, *, recompute: bool = False) -> Any:
    """A policy engine on this process alone, in float32."""
    from rlflow.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from rlflow.workers.engine.fsdp.engine import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=model, enable_gradient_checkpointing=recompute),
        FSDPEngineConfig(dtype="float32", use_dynamic_bsz=False),
        FSDPOptimizerConfig(lr=lr, total_training_steps=1000),
    )
    engine.initialize()
    return engine


def with_options(batch: Any, micro_batch: int, way: str) -> Any:
    """A copy of the batch that asks for one way, in micro-batches of so many rows."""
    from rlflow.utils import tensordict_utils as tu

    options = WAYS[way] | {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro_batch}
    return tu.assign_non_tensor_whole(batch.copy(), options)


def with_budget(batch: Any, tokens: int, way: str) -> Any:
    """A copy of the batch that asks for one way, in micro-batches of at most so many computed tokens."""
    from rlflow.utils import tensordict_utils as tu

    options = WAYS[way] | {"use_dynamic_bsz": True, "max_token_len_per_gpu": tokens}
    return tu.assign_non_tensor_whole(batch.copy(), options)


def add_old_log_probs(engine: Any, batch: Any, micro_batch: int) -> Any:
    """The batch with the log-probs that the engine's weights give."""
    with engine.eval_mode():
        output = engine.infer_batch(with_options(batch, micro_batch, "packed"))
    return batch.set("old_log_probs", output["model_output"]["log_probs"])


class BareLoop:
    """The same step by hand, for rows of one length.

    Args:
        model: folder of the model.
        lr: learning rate.
        rows: of `make_rows`, equally long.
        micro_batch: rows of one forward.
    """

    def __init__(self, model: str, lr: float, rows: list[dict[str, Any]], micro_batch: int) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01, fused=True)
        self.ids = torch.tensor([row["prompt"] + row["response"] for row in rows])
        self.advantages = torch.tensor([row["advantage"] for row in rows], dtype=torch.float32)[:, None]
        self.responses = len(rows[0]["response"])
        self.micro_batch = micro_batch
        self.old = torch.zeros(0)

    def log_probs(self, ids: Tensor) -> Tensor:
        """Log-probs of the responses, [rows, response]."""
        logits = self.model(ids, use_cache=False, logits_to_keep=self.responses + 1).logits[:, :-1]
        return torch.log_softmax(logits, -1).gather(-1, ids[:, -self.responses :, None]).squeeze(-1)

    def remember(self) -> None:
        """Take the present log-probs as the old ones."""
        with torch.no_grad():
            self.old = torch.cat([self.log_probs(ids) for ids in self.ids.split(self.micro_batch)])

    def step(self) -> float:
        """One optimizer step; the gradient norm."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.ids.shape[0] * self.responses
        parts = (part.split(self.micro_batch) for part in (self.ids, self.advantages, self.old))
        for ids, advantages, old in zip(*parts, strict=True):
            ratio = (self.log_probs(ids) - old).exp()
            losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
            (losses.sum() / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(norm)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of every way and of the bare loop, which take turns, and their first gradient norms."""
    from rlflow.config import FSDPActorConfig
    from rlflow.workers.losses import ppo_loss

    loss = partial(ppo_loss, config=FSDPActorConfig(clip_ratio=CLIP, clip_ratio_c=1e9))
    engine = build_engine(str(args.model), args.lr)
    vocab = engine.hf_config.vocab_size
    varied = make_rows(args.prompts, args.group, args.response, vocab, equal=False)
    equal = make_rows(args.prompts, args.group, args.response, vocab, equal=True)
    batches = {"varied": to_batch(varied), "equal": to_batch(equal)}
    for batch in batches.values():
        add_old_log_probs(engine, batch, args.micro_batch)
    bare = BareLoop(str(args.model), args.lr, equal, args.micro_batch)
    bare.remember()

    budget = args.micro_batch * max(len(row["prompt"]) + len(row["response"]) for row in varied)

    def ours(batch: Any) -> float:
        return float(engine.train_batch(batch, loss)["metrics"]["grad_norm"])

    steps = {
        "equal": partial(ours, with_options(batches["equal"], args.micro_batch, "packed")),
        "bare": bare.step,
        **{way: partial(ours, with_budget(batches["varied"], budget, way)) for way in WAYS},
    }
    norms, seconds = {}, {name: [] for name in steps}
    with engine.train_mode():
        for name, step in steps.items():  # kernels, optimizer state and memory are there before
            norms[name] = step()
        for _ in range(args.rounds):
            for name, step in steps.items():
                started = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - started)
    tokens = {"varied": [len(r["prompt"]) + len(r["response"]) for r in varied]}
    tokens["equal"] = [len(r["prompt"]) + len(r["response"]) for r in equal]
    return {"seconds": seconds, "norms": norms, "tokens": {name: sum(n) for name, n in tokens.items()}}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of one optimizer step beyond what the imports take, bytes, and its seconds."""
    from rlflow.config import FSDPActorConfig
    from rlflow.workers.engine.fsdp import engine as _  # noqa: F401 - everything that a step imports
    from rlflow.workers.engine.fsdp import log_prob
    from rlflow.workers.losses import ppo_loss

    imported = psutil.Process().memory_info().rss
    if not args.chunked:
        log_prob.CPU_CHUNK_ELEMENTS = 2**62
    engine = build_engine(str(args.model), args.lr, recompute=args.recompute)
    if not args.chunked:
        engine.module.chunk_limit = None
    rows = make_rows(args.prompts, args.group, args.response, engine.hf_config.vocab_size, equal=True)
    batch = to_batch(rows)
    batch.set("old_log_probs", batch["advantages"] * 0 - 10.0)
    with engine.train_mode():
        started = time.perf_counter()
        engine.train_batch(
            with_options(batch, len(rows), "packed"), partial(ppo_loss, config=FSDPActorConfig(clip_ratio=CLIP))
        )
        seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - imported, "seconds": seconds}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the driver and its processes agree on."""
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--prompts", type=int, default=2, help="a step (default %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="responses a prompt (default %(default)s)")
    parser.add_argument("--response", type=int, default=32, help="mean response tokens; a prompt has 4 x as many")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of one forward (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-7, help="so low that the norms of all sides stay comparable")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps of each way (default %(default)s)")


def main() -> int:
    """One part, its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("measure", "memory"))
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--chunked", action="store_true", help="a chunk of the logits at a time")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    figures = measure(args) if args.part == "measure" else memory(args)
    args.out.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
