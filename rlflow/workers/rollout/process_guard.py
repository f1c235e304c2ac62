"""Nothing of an engine outlives its server, however the server ends.

An engine runs in processes of its own, and a server that is killed cannot end them. So before it starts an engine the
server marks its own environment, which every descendant inherits, and starts this file as a small process that waits
for the server's death and then kills whatever bears the mark. A mark cannot be mistaken for another's, as a reused
process id can.

Imports nothing but the standard library: it runs as a script, without the package.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK_ENV = "RLFLOW_ENGINE_TREE"
_POLL_S = 0.5


def start_guard() -> str:
    """Mark this process's descendants from now on and start their guard. Returns the mark."""
    mark = secrets.token_hex(16)
    # A session of its own: a signal to the server's group is not for the guard.
    subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
    )
    os.environ[MARK_ENV] = mark
    return mark


def marked(mark: str) -> list[int]:
    """Ids of the processes that bear the mark, except this one. Linux; elsewhere there are none to be seen."""
    wanted = f"{MARK_ENV}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> list[int]:
    """SIGKILL to the processes that bear the mark, also to those that start meanwhile. Returns them."""
    killed: list[int] = []
    while left := [pid for pid in marked(mark) if pid not in killed]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed += left
    return killed


def wait_for_end(pid: int) -> None:
    """Return once the process is gone (or a zombie)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no pidfd: an old kernel, or not Linux
        while Path(f"/proc/{pid}").exists():
            time.sleep(_POLL_S)
        return
    select.select([fd], [], [])
    os.close(fd)


def main() -> None:
    """Arguments: process id of the server, mark."""
    server, mark = int(sys.argv[1]), sys.argv[2]
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # what ends the server must not end its guard first
    wait_for_end(server)
    kill_marked(mark)


if __name__ == "__main__":
    main()
