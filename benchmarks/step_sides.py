"""How `step.py` runs its two sides, each in processes of its own."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from step_figures import first_rollout, read_notes, step_figures

HERE = Path(__file__).resolve().parent
# glibc: no separate mappings, nothing trimmed, one arena.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "64000000000", "MALLOC_ARENA_MAX": "1"}


class SideFailed(Exception):
    """A side did not end well."""


def start(command: Sequence[str], env: dict[str, str], log: Path, timeout_s: float) -> None:
    """Run a command in a process group of its own and wait for it; its output goes to `log`.

    Raises:
        SideFailed: another exit code than 0, or not done in time (it gets SIGTERM, then SIGKILL).
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, env=env, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, cwd=log.parent
        )
        try:
            code = process.wait(timeout_s)
        except BaseException as error:
            for number in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(process.pid, number)
                try:
                    process.wait(30)
                    break
                except subprocess.TimeoutExpired:
                    continue
            if isinstance(error, subprocess.TimeoutExpired):
                raise SideFailed(f"not done in {timeout_s:.0f} s; its output is in {log}") from None
            raise
    if code != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        raise SideFailed(f"exit code {code}; the end of {log}:\n    " + "\n    ".join(last))


# ----- our side -------------------------------------------------------------------------------------------------------


def demo_overrides(args: argparse.Namespace, run: Path, steps: int) -> list[str]:
    """The demo's command line, with what this benchmark changes behind it."""
    spec = importlib.util.spec_from_file_location("run_demo", HERE.parent / "examples" / "demo" / "run_demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules["run_demo"] = demo
    sys.path.insert(0, str(HERE.parent))  # the demo uses the package of this clone
    spec.loader.exec_module(demo)
    options = argparse.Namespace(steps=steps, data=args.data, model=args.model, quick=False, seed=0, device="cpu")
    return [
        *demo.overrides(options, run),
        f"data.train_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.rollout.n={args.group}",
        f"data.max_response_length={args.new_tokens}",
        f"actor_rollout_ref.actor.optim.lr={args.lr}",
        f"actor_rollout_ref.actor.fsdp_config.dtype={args.dtype}",
        f"actor_rollout_ref.rollout.dtype={args.rollout_dtype}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "data.shuffle=false",
        "actor_rollout_ref.model.external_lib=step_probe",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run}",
        "trainer.validation_data_dir=null",
        "trainer.logger=[console]",
        "+ray_kwargs.ray_init.address=local",  # never a cluster that somebody else runs or left behind
        *args.override,
    ]


def run_ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One round of our side: {"startup_s", "wall_s", "steps"}; the steps to warm up are left out."""
    folder.mkdir()
    run, probe = folder / "run", folder / "probe"
    probe.mkdir()
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "RLFLOW_STEP_PROBE": str(probe)}
    env.pop("OMP_NUM_THREADS", None)  # the job divides the cores itself
    overrides = demo_overrides(args, run, args.warm_up + args.steps)
    started = time.time()
    start([sys.executable, "-m", "rlflow.trainer.main_ppo", *overrides], env, folder / "log.txt", args.timeout)
    wall = time.time() - started
    steps = step_figures(run, probe)
    if len(steps) != args.warm_up + args.steps:
        raise SideFailed(f"{len(steps)} steps were noted, {args.warm_up + args.steps} expected; see {folder}")
    return {"startup_s": first_rollout(read_notes(probe)) - started, "wall_s": wall, "steps": steps[args.warm_up :]}


# ----- TRL's side -----------------------------------------------------------------------------------------------------


class TrlWay(NamedTuple):
    """How TRL runs: arithmetic of training, rows of one forward and backward, and whether the C library keeps freed
    memory instead of returning it to the system (and paying for the pages again).
    """

    dtype: str
    micro_batch: int
    keep_memory: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}, micro-batches of {self.micro_batch}{', freed memory kept' if self.keep_memory else ''}"


def run_trl(args: argparse.Namespace, folder: Path, way: TrlWay, warm_up: int, steps: int) -> dict[str, Any]:
    """One round of TRL: what `step_trl.py` wrote, without the steps to warm up."""
    folder.mkdir()
    out = folder / "figures.json"
    options = {
        "model": args.model,
        "data": args.data / "train.parquet",
        "out": out,
        "prompts": args.prompts,
        "group": args.group,
        "steps": warm_up + steps,
        "new-tokens": args.new_tokens,
        "lr": args.lr,
        "dtype": way.dtype,
        "micro-batch": way.micro_batch,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"OMP_NUM_THREADS": str(args.threads), **(KEEP_MEMORY if way.keep_memory else {})}
    start([args.trl_python, str(HERE / "step_trl.py"), *flags], env, folder / "log.txt", args.timeout)
    figures = json.loads(out.read_text(encoding="utf-8"))
    figures["steps"] = figures["steps"][warm_up:]
    return figures


def tune_trl(args: argparse.Namespace, root: Path, say: Callable[[str], None]) -> tuple[TrlWay, dict[str, float]]:
    """The fastest way of TRL, on one step each after one to warm up, and the seconds of all that were tried.

    First the types, then with the best one the other micro-batches, then the memory.
    """
    tried: dict[TrlWay, float] = {}

    def best() -> TrlWay:
        return min(tried, key=tried.__getitem__)

    def attempt(way: TrlWay) -> None:
        tried[way] = run_trl(args, root / f"trl-tune-{len(tried) + 1}", way, 1, 1)["steps"][0]["seconds"]
        say(f"  TRL, {way}: {tried[way]:.1f} s a step")

    first, *others = args.trl_micro_batch
    if len(args.trl_dtype) == 1 and not others:
        return TrlWay(args.trl_dtype[0], first), {}
    for dtype in args.trl_dtype:
        attempt(TrlWay(dtype, first))
    for micro_batch in others:
        attempt(TrlWay(best().dtype, micro_batch))
    attempt(best()._replace(keep_memory=True))
    return best(), {str(way): seconds for way, seconds in tried.items()}
