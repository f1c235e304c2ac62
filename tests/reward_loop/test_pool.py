"""Reward functions in killable processes: whatever they do, the caller gets a score or a reason, in time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlflow.reward_loop.pool import ScorerPool
from rlflow.reward_loop.result import InvalidRewardError
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError

SCORERS = str(Path(__file__).with_name("scorers.py"))
SPEC = ScorerSpec(SCORERS)
ASYNC_SPEC = ScorerSpec(SCORERS, "compute_score_async")


def run_in_pool(test, spec=SPEC, timeout_s=20.0, size=1):
    """Run `await test(pool)`; afterwards no process of the pool may be left."""

    async def main():
        pool = ScorerPool(spec, timeout_s, size)
        await pool.start()
        before = set(pool.pids())
        try:
            return await test(pool)
        finally:
            pids = before | set(pool.pids())
            await pool.close()
            assert_groups_gone(pids)

    return asyncio.run(main())


def call(pool, action="", text="abc", **info):
    return pool.call(data_source="s", solution_str=text, ground_truth=action, extra_info=info)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_groups_gone(pgids):
    def members():
        return [p.pid for p in psutil.process_iter() if p.pid and _pgid(p.pid) in pgids and alive(p.pid)]

    wait_until(lambda: not members())


def _pgid(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def test_a_score_is_what_the_function_returned():
    async def test(pool):
        assert await call(pool, text="abc") == 3.0
        seen = await call(pool, "see", index=4)
        assert seen == {"score": 1.0, "seen": ["s", "abc", ["index"], {"bonus": 2}]}
        return await call(pool, "surrogate")

    assert run_in_pool(test, ScorerSpec(SCORERS, kwargs={"bonus": 2}))["note"] == "\ud800\x00"


def test_a_process_that_the_function_forked_does_not_answer_for_it():
    async def test(pool):
        return [await call(pool, "fork") for _ in range(5)]

    assert run_in_pool(test) == [1.0] * 5


def test_config_keywords_win_over_the_calls():
    async def test(pool):
        return await call(pool, "see", text="from the call")

    spec = ScorerSpec(SCORERS, kwargs={"solution_str": "from the config"})
    assert run_in_pool(test, spec)["seen"][1] == "from the config"


@pytest.mark.parametrize("text", ["\x00", "\ud800", "{" * 1_000_000, "9**9**9", "__import__('os').abort()"])
def test_poisoned_texts_pass_through_unharmed(text):
    async def test(pool):
        return await call(pool, text=text)

    assert run_in_pool(test) == float(len(text))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("raise", "RuntimeError: no idea of that"),
        ("exit", "SystemExit: 3"),
        ("crash", "exited with code 7"),
        ("kill", "SIGKILL"),
        ("recurse", "RecursionError"),
        ("nan", "the score is nan"),
        ("string", "the score is a str"),
        ("huge", "bytes long"),
        ("deep", "Recursion"),
    ],
)
def test_a_function_without_a_score_gives_a_reason_and_the_pool_goes_on(action, reason):
    async def test(pool):
        with pytest.raises(InvalidRewardError, match=reason):
            await call(pool, action)
        assert await call(pool, text="abcd") == 4.0

    run_in_pool(test)


@pytest.mark.parametrize("action", ["hang", "hang holding the GIL"])
def test_a_hanging_function_is_killed_at_its_deadline_and_replaced(action):
    async def test(pool):
        started = time.monotonic()
        with pytest.raises(InvalidRewardError, match=r"no score within 0\.5 s"):
            await call(pool, action)
        assert time.monotonic() - started < 3.0
        pool.timeout_s = 20.0
        assert await call(pool, text="ab") == 2.0

    run_in_pool(test, timeout_s=0.5)


def test_a_reply_that_is_none_is_taken_as_invalid():
    async def test(pool):
        with pytest.raises(InvalidRewardError, match="no valid reply"):
            await call(pool, "garbage")
        assert await call(pool, text="ab") == 2.0

    run_in_pool(test)


def test_what_a_scorer_started_dies_with_it(tmp_path):
    pid_file = tmp_path / "pid"

    async def test(pool):
        with pytest.raises(InvalidRewardError, match="no score within"):
            await call(pool, "hang with a child", pid_file=str(pid_file))

    run_in_pool(test, timeout_s=1.0)
    wait_until(lambda: not alive(int(pid_file.read_text())))


def test_one_hanging_call_does_not_hold_up_the_others():
    async def test(pool):
        pool.timeout_s = 2.0
        hanging = asyncio.create_task(call(pool, "hang"))
        await asyncio.sleep(0)
        others = [await call(pool, text="x" * n) for n in range(5)]
        assert others == [0.0, 1.0, 2.0, 3.0, 4.0] and not hanging.done()
        with pytest.raises(InvalidRewardError):
            await hanging

    run_in_pool(test, size=2)


def test_waiting_for_a_process_does_not_count_against_the_deadline():
    async def test(pool):
        results = await asyncio.gather(*(call(pool, "hang") for _ in range(3)), call(pool), return_exceptions=True)
        assert [type(result) for result in results[:3]] == [InvalidRewardError] * 3
        assert results[3] == 3.0

    run_in_pool(test, timeout_s=0.4)


def test_a_cancelled_call_frees_its_process():
    async def test(pool):
        hanging = asyncio.create_task(call(pool, "hang"))
        await asyncio.sleep(0.2)
        hanging.cancel()
        assert await call(pool, text="ab") == 2.0

    run_in_pool(test)


def test_coroutine_functions_run_side_by_side_in_one_process():
    async def test(pool):
        started = time.monotonic()
        results = await asyncio.gather(*(call(pool, text="0.5") for _ in range(20)))
        assert time.monotonic() - started < 3.0
        assert len({result["pid"] for result in results}) == 1
        with pytest.raises(InvalidRewardError, match="the judge did not answer"):
            await call(pool, "own timeout", text="0")

    run_in_pool(test, ASYNC_SPEC)


def test_a_coroutine_function_is_cancelled_at_its_deadline_without_losing_the_process():
    async def test(pool):
        before = pool.pids()
        with pytest.raises(InvalidRewardError, match="was cancelled"):
            await call(pool, text="3600")
        assert pool.pids() == before

    run_in_pool(test, ASYNC_SPEC, timeout_s=0.3)


def test_calls_that_shared_a_process_with_a_culprit_run_again():
    async def test(pool):
        innocent = asyncio.create_task(call(pool, text="0.8"))
        await asyncio.sleep(0.1)
        with pytest.raises(InvalidRewardError, match="killed"):
            await call(pool, "block the loop", text="0")
        return await innocent

    assert run_in_pool(test, ASYNC_SPEC, timeout_s=1.0)["score"] == 1.0


def test_the_built_in_routing_is_the_default():
    async def test(pool):
        row = {"solution_str": "#### 72", "ground_truth": "72", "extra_info": {}}
        assert await pool.call(data_source="openai/gsm8k", **row) == 1.0
        with pytest.raises(InvalidRewardError, match="no scorer belongs to data_source='my/data'"):
            await pool.call(data_source="my/data", **row)

    run_in_pool(test, ScorerSpec())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ScorerSpec(SCORERS, "grade"), "it defines compute_score, compute_score_async"),
        (ScorerSpec("pkg://no.such.module"), "cannot be imported"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_config_error(spec, message):
    async def main():
        pool = ScorerPool(spec, 1.0)
        with pytest.raises(ConfigError, match=message):
            await pool.start()
        await pool.close()

    asyncio.run(main())


def test_a_file_that_raises_or_exits_on_import_is_a_config_error(tmp_path):
    for code, message in (("1/0", "ZeroDivisionError"), ("import os; os._exit(5)", "exited with code 5")):
        file = tmp_path / f"reward_{len(code)}.py"
        file.write_text(code)

        async def main(file=file, message=message):
            with pytest.raises(ConfigError, match=message):
                await ScorerPool(ScorerSpec(str(file)), 1.0).start()

        asyncio.run(main())


def test_scorers_die_when_their_worker_is_killed(tmp_path):
    """SIGKILL gives the worker no chance to clean up; the guard of each scorer process does."""
    pid_file = tmp_path / "pid"
    code = f"""
import asyncio
from rlflow.reward_loop.pool import ScorerPool
from rlflow.reward_loop.scorer import ScorerSpec

async def main():
    pool = ScorerPool(ScorerSpec({SCORERS!r}), 600.0, 2)
    await pool.start()
    info = {{"pid_file": {str(pid_file)!r}}}
    calls = [pool.call(data_source="s", solution_str="", ground_truth=action, extra_info=info)
             for action in ("hang with a child", "hang holding the GIL")]
    asyncio.get_running_loop().call_later(1.5, lambda: print(*pool.pids(), flush=True))
    await asyncio.gather(*calls)

asyncio.run(main())
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in worker.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert_groups_gone(set(pids))
    assert not alive(int(pid_file.read_text()))
