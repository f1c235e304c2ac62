"""`python -m rlflow.utils.guardian`: ends the processes of a run when its launcher was killed.

A launcher that gets SIGKILL cleans up nothing. Ray's own processes notice that sooner or later (its agents after a
minute); this process notices it at once, because its standard input then ends.

Protocol, one line each: `mark M`, `process PID CREATED`, and `done` when there is nothing to guard any more.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterable

import psutil


class Guardian:
    """The launcher's side."""

    def __init__(self) -> None:
        # A session of its own: the terminal's signals are for the launcher.
        self._process = subprocess.Popen(  # noqa: S603 -- this module, in this interpreter
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )

    @property
    def pid(self) -> int:
        """Of the guardian."""
        return self._process.pid

    def watch(self, mark: str, processes: Iterable[psutil.Process] = ()) -> None:
        """Name what is to be ended: everything that carries the mark, and these processes."""
        lines = [f"mark {mark}"]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                lines.append(f"process {process.pid} {process.create_time()}")
        self._send(lines)

    def dismiss(self) -> None:
        """End the guardian; nothing is ended by it any more."""
        self._send(["done"])
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)

    def _send(self, lines: list[str]) -> None:
        # A guardian that is gone guards nothing; the run itself does not depend on it.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write("\n".join(lines) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]


def main() -> None:
    """Read lines until the end; without a `done` before it, end what they named."""
    from rlflow.utils.processes import kill_until_gone, living, marked

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    mark: str | None = None
    named: set[tuple[int, float]] = set()
    for line in sys.stdin:
        kind, *values = line.split()
        if kind == "done":
            return
        if kind == "mark":
            mark = values[0]
        else:
            named.add((int(values[0]), float(values[1])))
    if mark is not None:
        found = mark
        kill_until_gone(lambda: living(named) | marked(found), within_s=5.0)


if __name__ == "__main__":
    main()
