"""The table, beside the public package TransferQueue, `ray.put`/`ray.get` and a copy of the same bytes, in one run.

    python benchmarks/transfer_queue.py --peer-python TQ_VENV/bin/python
    python benchmarks/transfer_queue.py                                     # our side and the yardsticks alone
    python benchmarks/transfer_queue.py --scale                             # 64 clients, a million rows; ours only

The public package has an environment of its own, as it may want other versions than ours. Each side is a process with a
Ray instance and a table of its own, both with their default settings; they take turns, work by work, `--rounds` times,
after a warm-up each. The yardsticks are measured in our side's process between the turns. Medians count; the goals are
those for two idle cores.

What a get is: the call that returns a TensorDict of the whole batch. Ours may return views of shared memory, whose
pages the reader maps when it touches them; hence the lines "every byte read", in which the sum of every tensor is part
of the time, for both sides and for the copy.

Exit code: 0; 1 when a side failed, or, with `--check`, when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from transfer_queue_report import Figures, Samples, say, say_goals, say_table

HERE = Path(__file__).resolve().parent
SIDES = HERE / "transfer_queue_sides"

# Work -> samples of a turn. Yardsticks of a work have its name and a further word.
TIMES = {"large": 2, "large.bytes": 2, "small": 20, "small.bytes": 20, "jagged": 2, "jagged.bytes": 2,
         "tag": 100, "tag.calls": 100, "tags": 2, "columns": 4, "held": 2, "wake": 3}  # fmt: skip


class SideFailed(Exception):
    """A side did not end well, or did not answer in time."""


class Side:
    """A process that measures; see `transfer_queue_sides/serve.py`."""

    def __init__(self, name: str, python: str, options: argparse.Namespace, logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._timeout_s = options.timeout
        env = {**os.environ, "PYTHONPATH": str(HERE.parent) if name == "rlflow" else ""}
        env.pop("RAY_ADDRESS", None)
        command = [python, str(SIDES / "serve.py"), name, *(["--quick"] if options.quick else [])]
        self._process = subprocess.Popen(  # noqa: S603 - our own command
            command, env=env, cwd=logs, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("wb"),
            start_new_session=True,
        )  # fmt: skip

    def order(self, **what: Any) -> Any:
        """Send an order and wait for its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(what).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            self._fail(what, "it has ended")
        if not select.select([stdout], [], [], self._timeout_s)[0]:
            self._fail(what, f"no answer in {self._timeout_s:.0f} s")
        line = stdout.readline()
        if not line:
            self._fail(what, "it has ended")
        return json.loads(line)

    def _fail(self, what: dict[str, Any], why: str) -> None:
        last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        raise SideFailed(f"{self.name}: {what}: {why}; the end of {self.log}:\n    " + "\n    ".join(last))

    def end(self) -> None:
        """Let it end by itself, else kill its process group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


def measure(sides: list[Side], options: argparse.Namespace) -> Samples:
    """All samples: work by work, in each round each side in turn, the order changing from round to round."""
    samples: Samples = defaultdict(lambda: defaultdict(list))
    for work in options.works:
        turns = [(side, name) for side in sides for name in _names(side, work)]
        for side, name in turns:
            side.order(do="prepare", work=name)
            side.order(do="sample", work=name, times=1 + TIMES[name] // 10)  # warm-up
        for number in range(options.rounds):
            for side, name in turns if number % 2 == 0 else turns[::-1]:
                for sample in side.order(do="sample", work=name, times=TIMES[name]):
                    for figure, seconds in sample.items():
                        samples[side.name, name][figure].append(seconds)
        for side, name in turns:
            side.order(do="finish", work=name)
        say(f"  {work} done, load average {os.getloadavg()[0]:.1f}")
    return {key: dict(figures) for key, figures in samples.items()}


def _names(side: Side, work: str) -> list[str]:
    if side.name == "public":
        return {"wake": ["held"]}.get(work, [work])
    return [name for name in TIMES if name == work or name.startswith(f"{work}.")]


def compare(options: argparse.Namespace) -> int:
    """Both sides and the yardsticks."""
    logs = Path(tempfile.mkdtemp(prefix="rlflow-transfer-queue-"))
    pythons = {"rlflow": sys.executable, **({"public": options.peer_python} if options.peer_python else {})}
    sides: list[Side] = []
    try:
        for name, python in pythons.items():
            sides.append(Side(name, python, options, logs))
            about = sides[-1].order(do="about")
            say(f"{name}: {', '.join(f'{package} {number}' for package, number in about.items())}")
        samples = measure(sides, options)
    except SideFailed as error:
        say(f"failed: {error}")
        return 1
    finally:
        for side in sides:
            side.end()
    figures = Figures(samples)
    say()
    say_table(figures)
    say()
    met = True if options.quick else say_goals(figures)
    if options.json:
        record = {f"{side}/{work}/{figure}": seconds for (side, work), found in samples.items()
                  for figure, seconds in found.items()}  # fmt: skip
        goals = [{**goal._asdict(), "met": goal.met} for goal in figures.goals()]
        machine = {"nproc": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
        options.json.write_text(json.dumps({"machine": machine, "goals": goals, "seconds": record}, indent=1))
    return int(options.check and not met)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    names = [name for name in TIMES if "." not in name and name != "held"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter of an environment with TransferQueue==0.1.11 and ray")
    parser.add_argument("--works", nargs="+", choices=names, default=names, help="only these (default: all)")
    parser.add_argument("--rounds", type=int, help="turns of each side (default: 5, 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a look whether it runs; no goals")
    parser.add_argument("--scale", action="store_true", help="the scale run instead of the comparison")
    parser.add_argument("--rows", type=int, help="rows of the scale run (default: 1000000, 40000 with --quick)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one turn of one side")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit code 1 when a goal is missed")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.rows = options.rows or (40_000 if options.quick else 1_000_000)
    if options.json:
        options.json = options.json.expanduser().resolve()
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure, report, write."""
    options = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the sides, too
    say(f"{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}")
    if options.scale:
        from transfer_queue_scale import scale_run

        return scale_run(options.rows, options.json)
    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
