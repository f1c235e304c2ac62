"""Where a run can die: loaded by every process of a run through `actor_rollout_ref.model.external_lib`.

A point is a text: "before gen 2" and "after gen 2" for the stages of a step, and for what is done to a file below the
run folder, just before it is done, "write", "rename" or "remove" and its name (and the step, where a file of the runner
does not tell it). `plan.json` beside this file says what happens there:

    {"run": folder, "kill": point}             all processes of the run get SIGKILL
    {"run": folder, "full": point}             the disk is full for the file that is about to be written
    {"run": folder, "snapshots": folder}       a copy of the run folder is made: what a kill would leave on the disk

Points are written to `points.txt`, one a line; the n-th line belongs to the n-th snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_lock = threading.RLock()
_busy = False
_step = ""  # known to the runner only


def reach(point: str) -> None:
    """Do what the plan says."""
    global _busy
    with _lock:
        if _busy:
            return
        _busy = True
        try:
            plan = json.loads((HERE / "plan.json").read_text())
            if plan.get("kill") == point:
                kill_the_run()
            if plan.get("full") == point:
                # The kernel answers every write to this device with "no space left".
                os.symlink("/dev/full", Path(plan["run"]) / point.split(" ")[1])
            if plan.get("snapshots"):
                snapshot(point, Path(plan["run"]), Path(plan["snapshots"]))
        finally:
            _busy = False


def kill_the_run() -> None:
    (HERE / "killed.txt").write_text(f"{os.getpid()}\n")
    # The others are owned by the runner and end with it; this one is the runner, or a worker in the middle of a save.
    os.kill(int((HERE / "runner.pid").read_text()), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def snapshot(point: str, run: Path, snapshots: Path) -> None:
    with (HERE / "points.txt").open("a+") as points:
        points.seek(0)
        number = len(points.read().splitlines())
        points.write(point + "\n")
    target = snapshots / f"{number:04d}"
    target.mkdir(parents=True)
    for entry in run.iterdir():
        if entry.is_dir():
            # Files of a checkpoint that has its name never change, so a link is a copy.
            copy = os.link if entry.name.startswith("global_step_") else shutil.copy2
            shutil.copytree(entry, target / entry.name, copy_function=copy)
        else:
            with contextlib.suppress(FileNotFoundError):  # renamed by another thread meanwhile
                shutil.copy2(entry, target / entry.name)


def watch_files(run: Path) -> None:
    """Reach a point at every change of a file below `run` by this process."""
    prefix = f"{run}/"

    def name_of(path: Any) -> str | None:
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        return path[len(prefix) :] if path.startswith(prefix) else None

    def heard(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(c in mode for c in "wax+") if mode else bool(flags & (os.O_WRONLY | os.O_RDWR))
            if writes and (name := name_of(path)):
                reach(f"write {name}{step_of(name)}")
        elif event == "os.rename" and (name := name_of(args[0])):
            reach(f"rename {name}{step_of(name)}")
        elif event in ("os.remove", "shutil.rmtree") and (name := name_of(args[0])):
            reach(f"remove {name}{step_of(name)}")

    sys.addaudithook(heard)
    # These write without Python's knowledge; each takes the path as its second argument.
    import safetensors.torch
    import tokenizers
    import torch

    for owner, function in ((safetensors.torch, "save_file"), (torch, "save"), (tokenizers.Tokenizer, "save")):
        watch_function(owner, function, name_of)


def step_of(name: str) -> str:
    return f" {_step}" if _step and "global_step_" not in name else ""


def watch_function(owner: Any, name: str, name_of: Any) -> None:
    original = getattr(owner, name)

    def watched(value: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if file := name_of(path):
            reach(f"write {file}")
        return original(value, path, *args, **kwargs)

    setattr(owner, name, watched)
    for loaded in list(sys.modules.values()):  # who imported it by name
        if getattr(loaded, "__name__", "").startswith("rlflow") and vars(loaded).get(name) is original:
            setattr(loaded, name, watched)


def watch_stages(trainer_cls: Any) -> None:
    """Reach a point before and after every stage of a step."""
    original = trainer_cls._stage

    @contextlib.contextmanager
    def stage(self: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        global _step
        _step = str(self.global_steps)
        reach(f"before {name} {self.global_steps}")
        with original(self, name, *args, **kwargs):
            yield
        reach(f"after {name} {self.global_steps}")

    trainer_cls._stage = stage


# Only in the processes of the run, not in the launcher, which imports this file to check it.
if os.environ.get("RLFLOW_FULL_DETERMINISM") == "1":
    base = sys.modules.get("rlflow.trainer.ppo.trainer_base")
    if base is not None:
        (HERE / "runner.pid").write_text(str(os.getpid()))
        watch_stages(base.PPOTrainer)
    watch_files(Path(json.loads((HERE / "plan.json").read_text())["run"]))
