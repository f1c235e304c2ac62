"""Waits end, and say what they waited for."""

from __future__ import annotations

import asyncio

import pytest

from rlflow.utils.errors import DeadlineError, RlflowError
from rlflow.utils.ray_utils import auto_await, ray_await, ray_get


def test_a_wait_that_runs_out_names_what_was_awaited(ray_cluster: None) -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Sleeper:
        def sleep(self) -> None:
            import time

            time.sleep(60)

    sleeper = Sleeper.remote()
    ref = sleeper.sleep.remote()
    with pytest.raises(DeadlineError, match="the sleeper"):
        ray_get(ref, what="the sleeper", timeout_s=0.2)
    with pytest.raises(DeadlineError, match="the sleeper"):
        asyncio.run(ray_await(ref, what="the sleeper", timeout_s=0.2))
    ray.kill(sleeper)


def test_a_deadline_of_the_call_itself_keeps_its_message() -> None:
    async def overdue() -> None:
        raise DeadlineError("replica 1 was silent")

    with pytest.raises(DeadlineError, match="replica 1 was silent"):
        asyncio.run(ray_await(overdue(), what="the sleeper", timeout_s=5))


def test_auto_await_serves_both_worlds() -> None:
    @auto_await
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    async def from_coroutine() -> int:
        return await double(3)

    async def from_plain_code_inside_a_loop() -> int:
        return (lambda: double(4))()

    assert double(2) == 4
    assert asyncio.run(from_coroutine()) == 6
    assert asyncio.run(from_plain_code_inside_a_loop()) == 8


def test_a_dead_cluster_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of `ray start` outlives its cluster; a cluster that was asked for by name is not replaced silently."""
    import socket

    from ray._private import utils

    from rlflow.utils.ray_utils import cluster_to_join

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        alive = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(utils, "read_ray_address", lambda: alive)
        assert cluster_to_join() == alive
    assert cluster_to_join() == "local"
    with pytest.raises(RlflowError, match="does not answer"):
        cluster_to_join(alive)
    monkeypatch.setenv("RAY_ADDRESS", alive)
    with pytest.raises(RlflowError, match="RAY_ADDRESS"):
        cluster_to_join()
    assert cluster_to_join("local") == "local"
    assert cluster_to_join("ray://head:10001") == "ray://head:10001"
