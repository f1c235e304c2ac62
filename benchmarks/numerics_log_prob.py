"""Log-probs and entropies of 4096 tokens over 49152 words, forward and backward: chunked from hidden states, as the
trainer does, beside the plain way with the logits of all tokens. Part of `numerics.py`.

Memory is the growth of the process's peak resident size, each side in a process of its own:

    python benchmarks/numerics_log_prob.py chunked
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS, VOCAB, HIDDEN = 4096, 49152, 576  # a micro-batch of SmolLM2-135M


def naive(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The formulas, written down."""
    log_p = torch.log_softmax(hidden @ weight.t(), dim=-1)
    return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What the trainer runs."""
    from rlflow.workers.engine.fsdp.log_prob import linear_log_probs

    stats = linear_log_probs(hidden, weight, labels, with_entropy=True)
    assert stats.entropy is not None
    return stats.log_probs, stats.entropy


SIDES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"naive": naive, "chunked": chunked}


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, output embedding, labels."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=g, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=g).mul_(0.1).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (tokens,), generator=g)


def run(side: str, hidden: Tensor, weight: Tensor, labels: Tensor) -> float:
    """Seconds of one forward and backward."""
    hidden.grad = weight.grad = None
    started = time.perf_counter()
    log_probs, entropy = SIDES[side](hidden, weight, labels)
    (log_probs.mean() + 0.01 * entropy.mean()).backward()
    return time.perf_counter() - started


def peak_bytes(side: str) -> int:
    """How far the peak of this process's memory rises above what it holds before."""
    data = inputs(TOKENS)
    run(side, *inputs(64))  # kernels and threads are there before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
    before = _status("VmRSS")
    run(side, *data)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def measure(rounds: int = 2) -> dict[str, Any]:
    """{"seconds": {side: [...]}, "peak_bytes": {side: ...}}; the sides alternate."""
    peaks = {}
    for side in SIDES:
        command = [sys.executable, str(Path(__file__).resolve()), side]
        peaks[side] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603
    data = inputs(TOKENS)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in SIDES:
        run(side, *inputs(256))
    for _ in range(rounds):
        for side, times in seconds.items():
            times.append(run(side, *data))
    return {"seconds": seconds, "peak_bytes": peaks}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(peak_bytes(sys.argv[1])))
