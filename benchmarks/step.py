"""One whole GRPO step of the main job, its stages and its overhead, beside TRL's GRPOTrainer in the same run.

    python benchmarks/step.py --model MODEL --data FOLDER --trl-python TRL_VENV/bin/python
    python benchmarks/step.py --model MODEL --data FOLDER                                    # our side alone

MODEL and FOLDER (`train.parquet`, `test.parquet`) are what `./demo.sh` makes. Our side is the demo's own command line,
`python -m rlflow.trainer.main_ppo ...` on Ray, with the options below; TRL's side is `step_trl.py` under its own
interpreter. Both get the first prompts of the file in order, 8 completions each, the same number of new tokens
whatever EOS does, the same learning rate, optimizer, clipping and threads, and make one optimizer step a batch.

TRL is tried in float32 and in bfloat16 (mixed precision), with several micro-batches and with an allocator that keeps
its memory; its fastest way counts. Then the sides take turns, `--rounds` times: a fresh process, `--warm-up` steps,
`--steps` measured ones. Medians count.

Exit code: 0; 1 when a side failed or the token counts differ; with `--check` also when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from step_figures import StepFigures
from step_sides import SideFailed, run_ours, run_trl, tune_trl

GOALS = {"ratio": 2.0, "overhead": 0.05, "to_stage_ms": 20.0, "startup_s": 45.0}


def say(text: str = "") -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ----- report ---------------------------------------------------------------------------------------------------------


def cpu() -> dict[str, Any]:
    """Model, cores and matrix units of this machine's CPU."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    units = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag} " in text.replace("\n", " ")]
    return {"model": names[0] if names else "unknown", "cores": len(os.sched_getaffinity(0)), "flags": units}


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what is there; None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def middles(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of every name that any step has; a step without it counts as 0."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def summary(ours: list[dict[str, Any]], trl: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of all rounds."""
    steps: list[StepFigures] = [step for figures in ours for step in figures["steps"]]
    mine = statistics.median(step.rows / step.seconds for step in steps)
    result: dict[str, Any] = {
        "trajectories_per_s": mine,
        "step_s": middle([step.seconds for step in steps]),
        "overhead": middle([step.overhead_s / step.seconds for step in steps]),
        "to_stage_ms": middle([step.to_stage_ms for step in steps]),
        "to_engine_ms": middle([step.to_engine_ms for step in steps]),
        "startup_s": middle([figures["startup_s"] for figures in ours]),
        "stages": middles([step.stages for step in steps]),
        "work": middles([step.work for step in steps]),
        "gaps": middles([step.gaps for step in steps]),
    }
    theirs = [step for figures in trl for step in figures["steps"]]
    if theirs:
        result["trl_trajectories_per_s"] = statistics.median(step["rows"] / step["seconds"] for step in theirs)
        result["trl_step_s"] = middle([step["seconds"] for step in theirs])
        result["trl_generate_s"] = middle([step["generate_s"] for step in theirs])
        result["trl_reward_s"] = middle([step["reward_s"] for step in theirs])
        result["ratio"] = mine / result["trl_trajectories_per_s"]
    return result


def same_tokens(ours: list[dict[str, Any]], trl: list[dict[str, Any]]) -> bool:
    """Whether the k-th steps of all rounds had the same rows, prompt tokens and new tokens; says where not."""
    same = True
    counts = [[(s.rows, s.prompt_tokens, s.new_tokens) for s in figures["steps"]] for figures in ours]
    counts += [[(s["rows"], s["prompt_tokens"], s["new_tokens"]) for s in figures["steps"]] for figures in trl]
    for number, found in enumerate(zip(*counts, strict=True)):
        if len(set(found)) > 1:
            say(
                f"NOT COMPARABLE: measured step {number + 1} has (rows, prompt tokens, new tokens) {sorted(set(found))}"
            )
            same = False
    return same


def print_summary(result: dict[str, Any]) -> None:
    """The table, and which goals are met."""
    say()
    say(f"rlflow   {result['trajectories_per_s']:6.2f} trajectories/s   {result['step_s']:6.2f} s a step")
    stages = {name: seconds for name, seconds in result["stages"].items() if name != "step"}
    for name, seconds in stages.items():
        say(f"    {name:<24} {seconds:7.2f} s   {seconds / result['step_s']:5.1%}")
    rest = result["step_s"] - sum(stages.values())
    say(f"    {'between the stages':<24} {rest:7.2f} s   {rest / result['step_s']:5.1%}")
    say("  work in the other processes")
    for name, seconds in result["work"].items():
        say(f"    {name:<24} {seconds:7.2f} s   {seconds / result['step_s']:5.1%}")
    say(f"    {'nobody: overhead':<24} {result['overhead'] * result['step_s']:7.2f} s   {result['overhead']:5.1%}")
    for name, seconds in sorted(result["gaps"].items(), key=lambda item: -item[1]):
        say(f"        {name:<28} {1e3 * seconds:7.1f} ms")
    say(f"  last trajectory's arrival to the trainer's first computation: {result['to_engine_ms']:.1f} ms")
    if "ratio" in result:
        step, gen = result["trl_step_s"], result["trl_generate_s"]
        say(f"TRL      {result['trl_trajectories_per_s']:6.2f} trajectories/s   {step:6.2f} s a step")
        say(f"    generation {gen:.2f} s, rewards {result['trl_reward_s']:.3f} s, the rest {step - gen:.2f} s")
    say()
    for name, text, met in goals(result):
        say(f"{'met   ' if met else 'MISSED'} {name}: {text}")


def goals(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(what, measured beside the goal, whether it is met) of everything that was measured."""
    lines = []
    if "ratio" in result:
        ratio = result["ratio"]
        lines.append(("rlflow / TRL", f"{ratio:.2f} (goal >= {GOALS['ratio']:g})", ratio >= GOALS["ratio"]))
    share = result["overhead"]
    lines.append(("controller overhead", f"{share:.1%} (goal <= {GOALS['overhead']:.0%})", share <= GOALS["overhead"]))
    wait = result["to_stage_ms"]
    if wait is not None:
        text = f"{wait:.1f} ms (goal <= {GOALS['to_stage_ms']:g} ms)"
        lines.append(("last arrival to the next stage", text, wait <= GOALS["to_stage_ms"]))
    begin = result["startup_s"]
    text = f"{begin:.1f} s (goal <= {GOALS['startup_s']:g} s)"
    lines.append(("start to the first rollout", text, begin <= GOALS["startup_s"]))
    return lines


# ----- the run --------------------------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    fast = "bfloat16" if "amx_bf16" in cpu()["flags"] else "float32"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--trl-python", help="interpreter of an environment with trl; without it only our side runs")
    parser.add_argument("--prompts", type=int, default=8, help="a step (default %(default)s)")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of every completion (default %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of a round that do not count")
    parser.add_argument("--steps", type=int, default=3, help="of a round that count (default %(default)s)")
    parser.add_argument("--dtype", default=fast, help="arithmetic of our training (default here: %(default)s)")
    parser.add_argument("--rollout-dtype", default=fast, help="weights of our rollout (default here: %(default)s)")
    parser.add_argument("--override", action="append", default=[], help="key=value for our side; may be repeated")
    parser.add_argument("--trl-dtype", nargs="+", default=["float32", "bfloat16"], help="types TRL is tried with")
    parser.add_argument("--trl-micro-batch", nargs="+", type=int, default=[64, 16, 8], help="rows TRL is tried with")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds of one round of one side")
    parser.add_argument("--keep", type=Path, help="folder for logs and run folders (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed")
    args = parser.parse_args(argv)
    for name in ("model", "data"):
        setattr(args, name, getattr(args, name).expanduser().resolve())
    for path in (args.model / "config.json", args.data / "train.parquet", args.data / "test.parquet"):
        if not path.is_file():
            parser.error(f"no file {path}; ./demo.sh makes it")
    args.threads = cpu()["cores"]
    return args


def listed(seconds: Iterable[float]) -> str:
    """`8.21 8.30 s`."""
    return " ".join(f"{value:.2f}" for value in seconds) + " s"


def measure(
    args: argparse.Namespace, root: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
    """(rounds of our side, rounds of TRL, what tuning TRL found)."""
    ours: list[dict[str, Any]] = []
    trl: list[dict[str, Any]] = []
    tried: dict[str, float] = {}
    if args.trl_python:
        way, tried = tune_trl(args, root, say)
        say(f"  TRL counts with {way}")
    for number in range(1, args.rounds + 1):
        say(f"  round {number}: load average {os.getloadavg()[0]:.1f}")
        ours.append(run_ours(args, root / f"rlflow-{number}"))
        begin = ours[-1]["startup_s"]
        say(f"  round {number}: rlflow {listed(s.seconds for s in ours[-1]['steps'])}, first rollout at {begin:.1f} s")
        if args.trl_python:
            trl.append(run_trl(args, root / f"trl-{number}", way, args.warm_up, args.steps))
            say(f"  round {number}: TRL    {listed(s['seconds'] for s in trl[-1]['steps'])}")
    return ours, trl, tried


def main(argv: list[str] | None = None) -> int:
    """Measure, report, write."""
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the side that runs, too
    root = args.keep or Path(tempfile.mkdtemp(prefix="rlflow-step-"))
    root = root.expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    machine = cpu()
    versions = {name: version(name) for name in ("torch", "transformers", "ray", "tensordict")}
    say(f"{machine['model']}, {machine['cores']} cores, {' '.join(machine['flags'])}; {args.threads} threads a side")
    say(f"rlflow with {', '.join(f'{name} {number}' for name, number in versions.items())}")
    say(f"{args.prompts} prompts x {args.group}, {args.new_tokens} new tokens each; logs in {root}")
    try:
        ours, trl, tried = measure(args, root)
    except (SideFailed, ValueError) as error:
        say(f"failed: {error}")
        return 1
    if trl:
        say(f"TRL with {', '.join(f'{name} {number}' for name, number in trl[0]['versions'].items())}")
    result = summary(ours, trl)
    print_summary(result)
    same = same_tokens(ours, trl)
    if args.json:
        record = {
            "machine": machine, "versions": versions, "trl_versions": trl[0]["versions"] if trl else None,
            "options": vars(args),
            "same_tokens": same, "summary": result, "trl_tried": tried, "trl": trl,
            "ours": [{**figures, "steps": [step.as_dict() for step in figures["steps"]]} for figures in ours],
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=2, default=str), encoding="utf-8")
    missed = any(not met for _, _, met in goals(result))
    return int(not same or (args.check and missed))


if __name__ == "__main__":
    sys.exit(main())
