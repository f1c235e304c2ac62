"""The processes of a run, found from outside: by descent, and by a mark in their environment.

Invariant: only processes of the run are found. A mark is unique to one launcher, a Ray cluster that was there before
carries none, and children that the launcher had before are left out with all that is below them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable

import psutil

from rlflow.utils.guardian import Guardian

MARK_ENV = "RLFLOW_RUN_MARK"
_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 0.05

Processes = set[psutil.Process]


class ProcessFamily:
    """What this process starts from now on, directly or not."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._guardian = Guardian()
        self._before = set(psutil.Process().children(recursive=True))
        self._seen: Processes = set()
        self._mark_before = os.environ.get(MARK_ENV)
        os.environ[MARK_ENV] = self.mark
        _adopt_orphans(True)
        self._guardian.watch(self.mark)

    def look(self) -> Processes:
        """The living processes of the family. What was seen once is known for good.

        Some processes overwrite their environment with their title; those are found only while their ancestors are.
        """
        found = marked(self.mark)
        for child in set(psutil.Process().children()) - self._before:
            with contextlib.suppress(psutil.Error):
                found |= {child, *child.children(recursive=True)}
        self._seen = {process for process in self._seen | found if _alive(process)}
        return set(self._seen)

    def entrust(self) -> None:
        """Let the guardian know what there is now, in case this process gets killed."""
        self._guardian.watch(self.mark, self.look())

    def kill(self, *, grace_s: float = 0.0, within_s: float = 2.0) -> int:
        """End the family with SIGKILL and wait until it is gone; returns how many had to be killed.

        Args:
            grace_s: seconds to let them end by themselves.
            within_s: seconds after that to go on killing what still turns up.
        """
        end = time.monotonic() + grace_s
        while (alive := self.look()) and time.monotonic() < end:
            psutil.wait_procs(alive, timeout=_AGAIN_S)
        return kill_until_gone(self.look, within_s=within_s) if alive else 0

    def release(self) -> None:
        """Later children of this process are its own matter."""
        self._guardian.dismiss()
        _adopt_orphans(False)
        if self._mark_before is None:
            os.environ.pop(MARK_ENV, None)
        else:
            os.environ[MARK_ENV] = self._mark_before


def marked(mark: str) -> Processes:
    """Living processes (but this one) whose environment carries the mark."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK_ENV) == mark and _alive(process):
                found.add(process)
    return found


def living(named: Iterable[tuple[int, float]]) -> Processes:
    """Of (process id, time of creation): those that still live."""
    found = set()
    for pid, created in named:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.create_time() == created and _alive(process):
                found.add(process)
    return found


def kill_until_gone(look: Callable[[], Processes], *, within_s: float) -> int:
    """SIGKILL what `look` finds until it finds nothing; returns how many that were."""
    end = time.monotonic() + within_s
    killed: Processes = set()
    # Again and again: a process may start another one while it is being ended.
    while (alive := look()) and time.monotonic() < end:
        killed |= alive
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=_AGAIN_S)
    return len(killed)


def _adopt_orphans(wanted: bool) -> None:
    """Orphans of the tree below become children of this process instead of init's, so that they can be found."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
