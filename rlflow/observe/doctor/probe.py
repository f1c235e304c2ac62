"""Code in a process of its own, so that what hangs or crashes does so there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

# A package may write pages while it is imported; the last lines say why it failed.
_LAST_CHARS = 2000
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Answer:
    """What came of it: `output` (stdout), or `error` in one line when it did not end well."""

    output: str = ""
    error: str = ""


def run_python(code: str, timeout_s: float) -> Answer:
    """Run code in a fresh interpreter; it and what it started are ended when the time is over."""
    process = subprocess.Popen(  # noqa: S603 - our own code
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # something else may hold its pipes
            process.communicate(timeout=_LAST_WORDS_S)
        return Answer(error=f"no answer within {timeout_s:g} s")
    if process.returncode == 0:
        return Answer(output=output)
    if process.returncode < 0:
        return Answer(error=f"ended by {signal.Signals(-process.returncode).name}")
    lines = [line.strip() for line in errors[-_LAST_CHARS:].splitlines() if line.strip()]
    return Answer(error=lines[-1] if lines else f"exit code {process.returncode}")
