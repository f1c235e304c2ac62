"""The update step of the training engine: its ways beside each other, beside a bare PyTorch loop and beside TRL.

    python benchmarks/engine.py --model MODEL --trl-python TRL_VENV/bin/python      # under 6 minutes on 2 cores
    python benchmarks/engine.py --model MODEL                                       # our side and the bare loop

MODEL is the folder of a small causal LM, such as the demo's SmolLM2-135M-Instruct. A batch is `--prompts` prompts of
4 x `--response` tokens with `--group` responses each, in float32, one optimizer step (clipped loss, AdamW). Padded,
packed and shared-prompt steps, and the bare loop on rows of one length, take turns in one process; TRL gets the same
rows in a process of its own. Memory is measured in fresh processes. Medians count.

Exit code: 0; 1 when a side failed or the gradient norms differ; with `--check` also when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_sides import WAYS, add_options, make_rows
from step import cpu, say
from step_sides import HERE, KEEP_MEMORY, SideFailed, start

GOALS = {"shared": 2.5, "overhead": 0.05, "trl": 1.0}
MEMORY = {
    "neither": [],
    "chunked logits": ["--chunked"],
    "activation checkpointing": ["--recompute"],
    "both": ["--recompute", "--chunked"],
}
SAME_NORM = 0.01


def run_side(args: argparse.Namespace, root: Path, name: str, part: str, flags: list[str]) -> dict[str, Any]:
    """One process of `engine_sides.py`."""
    out = root / f"{name}.json"
    options = {"model": args.model, "prompts": args.prompts, "group": args.group, "response": args.response}
    options |= {"micro-batch": args.micro_batch, "lr": args.lr, "rounds": args.rounds, "out": out}
    texts = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads), "RLFLOW_DEVICE": "cpu"}
    if part == "measure":
        env |= KEEP_MEMORY
    command = [sys.executable, str(HERE / "engine_sides.py"), part, *texts, *flags]
    start(command, env, root / f"{name}.log", args.timeout)
    return json.loads(out.read_text(encoding="utf-8"))


def run_trl(args: argparse.Namespace, root: Path, micro_batch: int, steps: int) -> dict[str, Any]:
    """TRL over the same rows, the first step left out of the seconds; memory is kept, its fastest way on a CPU."""
    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    rows = root / "rows.json"
    batch = make_rows(args.prompts, args.group, args.response, config["vocab_size"], equal=False)
    rows.write_text(json.dumps(batch), encoding="utf-8")
    out = root / f"trl-{micro_batch}-{steps}.json"
    options = {"model": args.model, "rows": rows, "out": out, "group": args.group, "steps": steps + 1}
    options |= {"micro-batch": micro_batch, "lr": args.lr}
    texts = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"OMP_NUM_THREADS": str(args.threads), **KEEP_MEMORY}
    start([args.trl_python, str(HERE / "engine_trl.py"), *texts], env, out.with_suffix(".log"), args.timeout)
    figures = json.loads(out.read_text(encoding="utf-8"))
    figures["seconds"] = figures["seconds"][1:]
    return figures


def best_trl(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """TRL with the faster of two micro-batches, all rows at once and ours."""
    tried = {size: run_trl(args, root, size, 1) for size in (args.micro_batch, args.prompts * args.group)}
    for size, figures in tried.items():
        say(f"  TRL, micro-batches of {size}: {figures['seconds'][0]:.2f} s a step")
    size = min(tried, key=lambda key: tried[key]["seconds"][0])
    figures = run_trl(args, root, size, args.rounds)
    figures["norms"] = tried[size]["norms"]
    return figures | {"micro_batch": size}


def summary(ours: dict[str, Any], trl: dict[str, Any] | None) -> dict[str, float]:
    """Medians and the ratios that have goals."""
    seconds = {name: statistics.median(times) for name, times in ours["seconds"].items()}
    tokens = ours["tokens"]
    result = {f"{way}_tokens_per_s": tokens["varied"] / seconds[way] for way in WAYS}
    result["packed_over_padded"] = seconds["padded"] / seconds["packed"]
    result["shared_over_packed"] = seconds["packed"] / seconds["shared"]
    result["bare_tokens_per_s"] = tokens["equal"] / seconds["bare"]
    result["equal_tokens_per_s"] = tokens["equal"] / seconds["equal"]
    result["overhead"] = seconds["equal"] / seconds["bare"] - 1
    if trl is not None:
        theirs = statistics.median(trl["seconds"])
        result["trl_tokens_per_s"] = tokens["varied"] / theirs
        result["packed_over_trl"] = theirs / seconds["packed"]
        result["shared_over_trl"] = theirs / seconds["shared"]
    return result


def same_work(ours: dict[str, Any], trl: dict[str, Any] | None) -> bool:
    """Whether all sides had the same first gradient norm with (nearly) the same weights; says where not."""
    norms = ours["norms"]
    pairs = [("equal", norms["equal"], "the bare loop", norms["bare"])]
    if trl is not None:
        pairs.append(("packed", norms["packed"], "TRL", trl["norms"][0]))
    same = True
    for name, mine, other, theirs in pairs:
        if abs(mine - theirs) > SAME_NORM * theirs:
            say(f"NOT COMPARABLE: the first gradient norm of {name} is {mine:.5f}, of {other} {theirs:.5f}")
            same = False
    return same


def goals(result: dict[str, float]) -> list[tuple[str, str, bool]]:
    """(what, measured beside the goal, whether it is met)."""
    ratio, share = result["shared_over_packed"], result["overhead"]
    lines = [
        ("shared prompts / packed", f"{ratio:.2f} x (goal >= {GOALS['shared']:g})", ratio >= GOALS["shared"]),
        ("overhead over a bare loop", f"{share:+.1%} (goal <= {GOALS['overhead']:.0%})", share <= GOALS["overhead"]),
    ]
    if "shared_over_trl" in result:
        ratio = result["shared_over_trl"]
        lines.append(("rlflow / TRL", f"{ratio:.2f} x (goal > {GOALS['trl']:g})", ratio > GOALS["trl"]))
    return lines


def report(result: dict[str, float], peaks: dict[str, dict[str, float]]) -> None:
    """The table, and which goals are met."""
    say()
    for name in [name for name in result if name.endswith("_tokens_per_s")]:
        say(f"{name.removesuffix('_tokens_per_s'):<10} {result[name]:8.0f} tokens/s")
    for name in [name for name in result if "_over_" in name]:
        say(f"{name.replace('_over_', ' / '):<20} {result[name]:5.2f} x")
    for name, figures in peaks.items():
        say(f"peak memory, {name:<26} {figures['bytes'] / 2**30:6.2f} GiB   {figures['seconds']:6.1f} s (first step)")
    for name, text, met in goals(result):
        say(f"{'met   ' if met else 'MISSED'} {name}: {text}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--trl-python", help="interpreter of an environment with trl; without it TRL is left out")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory figures out")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one process")
    parser.add_argument("--keep", type=Path, help="folder for logs and figures (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed")
    args = parser.parse_args(argv)
    args.model = args.model.expanduser().resolve()
    if not (args.model / "config.json").is_file():
        parser.error(f"no file {args.model / 'config.json'}; ./demo.sh makes such a folder")
    if args.prompts * args.group % args.micro_batch:
        parser.error(f"{args.prompts} x {args.group} rows do not divide into micro-batches of {args.micro_batch}")
    args.threads = cpu()["cores"]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, report, write."""
    args = parse_args(argv)
    root = (args.keep or Path(tempfile.mkdtemp(prefix="rlflow-engine-"))).expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    machine = cpu()
    say(f"{machine['model']}, {machine['cores']} cores, {' '.join(machine['flags'])}; load {os.getloadavg()[0]:.1f}")
    say(f"{args.prompts} prompts of {4 * args.response} tokens x {args.group} of {args.response}; logs in {root}")
    try:
        ours = run_side(args, root, "measure", "measure", [])
        trl = best_trl(args, root) if args.trl_python else None
        parts = {} if args.no_memory else MEMORY
        peaks = {name: run_side(args, root, name.replace(" ", "-"), "memory", flags) for name, flags in parts.items()}
    except SideFailed as error:
        say(f"failed: {error}")
        return 1
    result = summary(ours, trl)
    report(result, peaks)
    same = same_work(ours, trl)
    if args.json:
        record = {"machine": machine, "options": vars(args), "summary": result, "ours": ours, "trl": trl}
        args.json.write_text(json.dumps(record | {"memory": peaks}, indent=2, default=str), encoding="utf-8")
    missed = any(not met for _, _, met in goals(result))
    return int(not same or (args.check and missed))


if __name__ == "__main__":
    sys.exit(main())
