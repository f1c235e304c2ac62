"""SIGINT, SIGTERM and SIGHUP end a run with clean-up, within a bound.

    first signal    `Interrupted` is raised in the main thread, whose `finally` blocks end the run
    second signal   everything is killed at once
    END_WITHIN_S    after the first one everything is killed, wherever the main thread hangs

Invariants
    - The bound does not depend on the main thread: the interpreter runs signal handlers only between two of its
      instructions, so a thread of its own learns of a signal through a pipe.
    - Whichever way the launcher's work ends, no process of the run stays (see `rlflow.utils.processes`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil

from rlflow.utils.processes import ProcessFamily

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_WITHIN_S = 8.0
# Processes end by themselves when what they depend on has ended; after this they are killed.
GRACE_S = 1.0
# Wrappers (`timeout`, `uv run`) send the launcher again what the terminal has sent to the whole group.
SAME_SIGNAL_S = 0.5


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells count."""
        return 128 + self.signum


class SignalGuard:
    """Handles the signals of a launcher. Only for the main thread; see `guarded`.

    Args:
        exits: the process ends when the launcher's work does. Then it ends within the bound too, whatever hangs.
    """

    def __init__(self, exits: bool) -> None:
        self.received: int | None = None
        self._raised = False
        self._exits = exits
        self._family = ProcessFamily()
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self.take()
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()

    def ray_started(self) -> None:
        """Take the signals back, which `ray.init` takes too, and see to its processes."""
        self._family.entrust()
        self.take()

    def take(self) -> None:
        """Take the signals; raises `Interrupted` when one came while somebody else had them."""
        for signum in SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # started by nohup
            before = signal.signal(signum, self._interrupt)
            self._previous.setdefault(signum, before if before is not None else signal.SIG_DFL)
        self.check()

    def check(self) -> None:
        """Raise `Interrupted` when a signal came whose exception was lost in somebody's code."""
        if self.received is not None:
            raise Interrupted(self.received)

    def close(self, failed: bool) -> None:
        """End what is left of the run, and give the signals back.

        A program that goes on after work that went well may have started processes of its own meanwhile, which are
        left alone.
        """
        if self._exits or failed:
            self._family.kill(grace_s=GRACE_S)
        self._family.release()
        if self._exits and self.received is not None:
            return  # the bound holds until the process is gone
        signal.set_wakeup_fd(self._wakeup_before)
        for signum, before in self._previous.items():
            signal.signal(signum, before)
        os.close(self._writer)  # ends the thread

    def _interrupt(self, signum: int, frame: Any) -> None:
        if not self._raised:  # later ones are for the thread
            self._raised = True
            self.received = self.received or signum
            raise Interrupted(signum)

    def _watch(self) -> None:
        signum = self._next_signal(None)
        if signum is None:
            return
        started = time.monotonic()
        _say(f"{signal.Signals(signum).name}: ending the run; once more kills it at once")
        with contextlib.suppress(psutil.Error):
            self._family.look()
        why = f"the clean-up took over {END_WITHIN_S:g} s"
        while (left := started + END_WITHIN_S - time.monotonic()) > 0:
            try:
                again = self._next_signal(left)
            except TimeoutError:
                break
            if again is None:
                return
            if time.monotonic() - started > SAME_SIGNAL_S:
                why = "a second signal"
                break
        _say(f"{why}: killing every process of the run")
        self._family.kill()
        if self._exits:
            os._exit(128 + signum)

    def _next_signal(self, timeout_s: float | None) -> int | None:
        """The next one of `SIGNALS`; None once the guard is closed. TimeoutError when none comes in time."""
        while select.select([self._reader], [], [], timeout_s)[0]:
            received = os.read(self._reader, 1)
            if not received:
                os.close(self._reader)
                return None
            if received[0] in SIGNALS:
                self.received = self.received or received[0]
                return received[0]
        raise TimeoutError


_active: SignalGuard | None = None


@contextlib.contextmanager
def guarded(*, exits: bool = False) -> Iterator[SignalGuard | None]:
    """A `SignalGuard` around a launcher's work; nested blocks share the outer one.

    None in a thread that cannot handle signals. After a block that failed, and with `exits` always, nothing of the run
    is left.
    """
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield _active
        return
    guard = _active = SignalGuard(exits)
    failed = True
    try:
        yield guard
        failed = False
    finally:
        _active = None
        guard.close(failed)


def _say(text: str) -> None:
    # Past Python's buffers, whose lock the interrupted main thread may hold.
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())
