"""Speed and memory of the numerics: each figure beside the plain way to compute the same, in one run on one machine.

    python benchmarks/numerics.py                        # about two minutes on 2 cores, 6 GB of memory
    python benchmarks/numerics.py --only balance packing --json numerics.json

Sides alternate and the best round of each counts, so that a change in the machine's load hits both. Goals are printed
beside the figures; `--check` makes a missed one an error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own helpers
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this clone

import numpy as np


class Figure(NamedTuple):
    """A measured number and its goal; None: it is reported only."""

    name: str
    value: float
    goal: float | None
    unit: str
    better: Literal["higher", "lower"]

    @property
    def reached(self) -> bool:
        """Whether the goal is met."""
        if self.goal is None:
            return True
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    def __str__(self) -> str:
        goal = "" if self.goal is None else f" (goal {'>=' if self.better == 'higher' else '<='} {self.goal:g})"
        return f"{self.name:76s} {self.value:10.6g} {self.unit}{goal}{'' if self.reached else '   MISSED'}"


Part = tuple[list[Figure], Any]


def advantage(rounds: int) -> Part:
    """Scores to group advantages beside a loop; the whole advantage stage."""
    import numerics_advantage as bench

    raw = bench.measure()
    return [Figure(**figure) for figure in raw], raw


def log_prob(rounds: int) -> Part:
    """Chunked log-prob + entropy beside the logits of all tokens."""
    import numerics_log_prob as bench

    raw = bench.measure(rounds)
    seconds = {side: min(times) for side, times in raw["seconds"].items()}
    peaks = raw["peak_bytes"]
    name = f"log-prob + entropy, {bench.TOKENS} tokens x {bench.VOCAB} words"
    return [
        Figure(f"{name}: peak memory, naive / chunked", peaks["naive"] / peaks["chunked"], 6, "x", "higher"),
        Figure(f"{name}: peak memory, chunked", peaks["chunked"] / 2**20, None, "MiB", "lower"),
        Figure(
            f"{name}: forward + backward, chunked / naive", seconds["chunked"] / seconds["naive"], 1.6, "x", "lower"
        ),
        Figure(f"{name}: forward + backward, chunked", seconds["chunked"], None, "s", "lower"),
    ], raw


def packing(rounds: int) -> Part:
    """A packed update beside a padded one."""
    import numerics_packing as bench

    raw = bench.measure(rounds)
    seconds = {way: min(times) for way, times in raw["seconds"].items()}
    name = f"update of {bench.ROWS} rows, lognormal lengths"
    return [
        Figure(f"{name}: padded / packed", seconds["padded"] / seconds["packed"], 1.8, "x", "higher"),
        Figure(f"{name}: tokens padded / packed", raw["padded_tokens"] / raw["tokens"], None, "x", "higher"),
        Figure(f"{name}: packed", seconds["packed"], None, "s", "lower"),
    ], raw


def balance(rounds: int) -> Part:
    """4096 rows of lognormal lengths over 8 ranks, any number of rows a rank and equally many."""
    from rlflow.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    lengths = np.random.default_rng(0).lognormal(np.log(300) - 0.32, 0.8, 4096).clip(8, 8192).astype(np.int64)
    work = calculate_workload(lengths).tolist()
    figures, raw = [], {}
    for name, equal_size in (("any number of rows a rank", False), ("equally many rows a rank", True)):
        times = []
        for _ in range(5 * rounds):
            started = time.perf_counter()
            parts = get_seqlen_balanced_partitions(work, 8, equal_size)
            times.append(time.perf_counter() - started)
        loads = [sum(work[i] for i in part) for part in parts]
        raw[name] = {"seconds": times, "loads": loads}
        name = f"balance of 4096 rows over 8 ranks, {name}"
        figures += [
            Figure(f"{name}: largest / mean", max(loads) / (sum(loads) / 8), 1.001, "x", "lower"),
            Figure(f"{name}: time", min(times) * 1e3, 5, "ms", "lower"),
        ]
    return figures, raw


PARTS: dict[str, Callable[[int], Part]] = {
    "advantage": advantage,
    "log_prob": log_prob,
    "packing": packing,
    "balance": balance,
}


def say(text: str) -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure what was asked for, report, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), default=list(PARTS), help="parts to measure")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each side")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a goal is missed")
    parser.add_argument("--json", type=Path, help="write figures and raw times to this file")
    args = parser.parse_args()

    say(
        f"{time.strftime('%Y-%m-%d')}, {processor()}, {os.environ['OMP_NUM_THREADS']} threads, load average "
        f"{os.getloadavg()[0]:.1f}"
    )
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    for name in args.only:
        started = time.perf_counter()
        found, raw[name] = PARTS[name](args.rounds)
        for figure in found:
            say(f"  {figure}")
        say(f"    {name}: {time.perf_counter() - started:.0f} s")
        figures += found
    if args.json:
        report = {"figures": [figure._asdict() | {"reached": figure.reached} for figure in figures], "raw": raw}
        args.json.write_text(json.dumps(report, indent=2))
    if args.check and not all(figure.reached for figure in figures):
        raise SystemExit(1)


def processor() -> str:
    """The name of the CPU."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


if __name__ == "__main__":
    main()
