"""Signals end a launcher's work: with clean-up when there is time, within the bound in any case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

pytestmark = pytest.mark.alone

LAUNCHER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests themselves run under nohup
from rlflow.trainer import interrupt
interrupt.END_WITHIN_S = 1.5
interrupt.SAME_SIGNAL_S = 0.2
interrupt.GRACE_S = 0.2

def hang():
    while True:  # a handler's exception does not end this
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            print("swallowed", flush=True)
            while True:
                time.sleep(60)

def child():
    # A child that leaves its parent, its session and its group, and ignores polite signals.
    code = "import signal,time;signal.signal(signal.SIGTERM,signal.SIG_IGN);print('up',flush=True);time.sleep(600)"
    script = f"exec setsid {sys.executable} -c \\"{code}\\" &"
    out = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    out.stdout.readline()

def work():
    child()
    BODY

try:
    with interrupt.guarded(exits=EXITS):
        work()
except interrupt.Interrupted as error:
    print("interrupted", error.exit_code, flush=True)
    AFTER
    sys.exit(error.exit_code)
"""


def launch(
    body: str = "print('ready', flush=True); time.sleep(60)", exits: bool = True, after: str = "pass"
) -> subprocess.Popen[str]:
    code = textwrap.dedent(LAUNCHER).replace("BODY", body).replace("EXITS", str(exits)).replace("AFTER", after)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_MARK": f"{os.getpid()}-{time.monotonic()}"},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=20)
    return process


def living(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Living processes that were started below the launcher, wherever they hang now."""
    mark = psutil.Process(process.pid).environ()["TEST_MARK"]
    found = []
    for other in psutil.process_iter():
        try:
            if other.pid != process.pid and other.environ().get("TEST_MARK") == mark:
                found.append(other)
        except psutil.Error:
            continue
    assert found, "the child and the guardian"
    return found


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_interrupts_the_work_and_nothing_stays(signum: int, code: int) -> None:
    process = launch()
    others = living(process)
    process.send_signal(signum)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (code, f"interrupted {code}\n"), err
    assert f"{signal.Signals(signum).name}: ending the run; once more kills it at once" in err
    assert gone(others)


def test_work_that_does_not_end_is_ended_at_the_bound() -> None:
    process = launch("hang()")
    others = living(process)
    started = time.monotonic()
    process.terminate()
    out, err = process.communicate(timeout=20)
    assert 1.0 < time.monotonic() - started < 6
    assert (process.returncode, out) == (143, "swallowed\n")
    assert "the clean-up took over 1.5 s: killing every process of the run" in err
    assert gone(others)


def test_a_second_signal_kills_at_once_but_an_echo_of_the_first_does_not() -> None:
    process = launch("interrupt.END_WITHIN_S, interrupt.SAME_SIGNAL_S = 60, 1.5; hang()")
    others = living(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "swallowed\n"
    process.send_signal(signal.SIGTERM)  # as `timeout` and other wrappers do
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.0)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert gone(others)


def test_a_program_that_lives_on_gets_its_signals_back() -> None:
    after = "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler; time.sleep(2); print('lives')"
    process = launch(exits=False, after=after)
    others = living(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert out == "interrupted 130\nlives\n", err
    assert gone(others)


def test_a_launcher_that_is_killed_takes_everything_with_it() -> None:
    process = launch()
    others = living(process)
    process.kill()
    process.communicate(timeout=20)
    assert gone(others)


def test_a_launcher_that_ends_well_leaves_what_it_had_before_and_nothing_else() -> None:
    before = "old = subprocess.Popen(['sleep', '600'])\n"
    code = before + textwrap.dedent(LAUNCHER).replace("BODY", "pass").replace("EXITS", "True").replace("AFTER", "pass")
    code += "\nassert old.poll() is None\nold.kill()\nfrom psutil import Process\nassert not Process().children()[1:]\n"
    code = "import subprocess\n" + code
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr
