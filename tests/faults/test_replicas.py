"""Rollout replicas that die (SIGKILL) or hang (SIGSTOP), in every state they can be in.

Two real servers of a tiny model, real trainer processes without training, client, balancer and supervisor. Whatever
happens, every request is answered once, with the tokens of an undisturbed generation, and the replica comes back with
the weights of the moment before it serves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

import rollout_tiny as tiny
import rollout_worker

from rlflow.checkpoint_engine.manager import CheckpointEngineManager, SyncState
from rlflow.config import SupervisorConfig
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from rlflow.workers.rollout.supervised_sync import SupervisedSync
from rlflow.workers.rollout.supervisor import ReplicaState, ReplicaSupervisor

pytestmark = pytest.mark.timeout(200)

HEARTBEAT_S, HANG_S, BACK_S = 0.5, 2.0, 60.0
TOKENS = 300
SAMPLED = {"temperature": 1.0, "logprobs": True, "max_tokens": TOKENS, "ignore_eos": True}


class System:
    """Two trainer processes, two supervised replicas."""

    def __init__(self, path: str, replicas: int = 2, **supervisor: Any) -> None:
        import ray

        from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        ray.cloudpickle.register_pickle_by_value(rollout_worker)
        self.config = tiny.config(path, load_format="dummy", response_length=TOKENS + 50, max_model_len=TOKENS + 100)
        rollout = self.config.actor_rollout_ref.rollout
        cls = RayClassWithInitArgs(ray.remote(rollout_worker.FeedWorker), path, rollout)
        self.workers = RayWorkerGroup(RayResourcePool([replicas], use_gpu=False), cls, device_name="cpu")
        self.servers = LLMServerManager.create(self.config, self.workers)
        self.workers.bind_rollout(self.servers.handles_by_worker())
        manager = CheckpointEngineManager(rollout.checkpoint_engine, self.workers, self.servers.get_replicas())
        settings = SupervisorConfig(heartbeat_s=HEARTBEAT_S, hang_timeout_s=HANG_S, **supervisor)
        self.supervisor = ReplicaSupervisor(settings, self.servers.get_replicas(), self.servers.global_load_balancer)
        self.sync = SupervisedSync(manager, self.workers, self.servers, self.supervisor)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.supervisor.on_event = lambda name, **facts: self.events.append((name, facts))
        self.supervisor.start()
        self.client = self.servers.get_client(FullyAsyncLLMServerClient)
        self.version = 0

    def update(self) -> None:
        self.version += 1
        self.sync.update_weights(self.version)

    def named(self, name: str) -> list[dict[str, Any]]:
        return [facts for event, facts in self.events if event == name]

    def pid(self, rank: int) -> int:
        return self.servers.rollout_replicas[rank].pids[0]

    def until(self, fulfilled: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + BACK_S
        while not fulfilled():
            assert time.monotonic() < end, (what, self.supervisor.describe(), self.events[-6:])
            time.sleep(0.02)

    def until_all_serve(self) -> None:
        self.until(lambda: all(w.state is ReplicaState.SERVING for w in self.supervisor.watched), "all serve")

    def close(self) -> None:
        self.supervisor.shutdown()
        self.servers.shutdown()
        self.workers.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_model(tmp_path_factory.mktemp("replica-faults"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def system(ray_cluster: None, model_path: str) -> Iterator[System]:
    system = System(model_path, max_restarts=50)
    system.update()
    yield system
    system.close()


async def ask_many(system: System, count: int = 12) -> list[Any]:
    name = time.monotonic_ns()  # new conversations: old ones stay where they are
    return await asyncio.gather(
        *(
            system.client.generate(f"{name}-{i}", prompt_ids=[5 + i, 6], sampling_params={**SAMPLED, "seed": i})
            for i in range(count)
        )
    )


@pytest.fixture(scope="module")
def undisturbed(system: System) -> list[list[int]]:
    """Tokens of each request where nothing happens."""
    return [output.token_ids for output in asyncio.run(ask_many(system))]


async def running_on(system: System, rank: int) -> None:
    replica = system.servers.rollout_replicas[rank]
    while not (await replica.status())["running"]:
        await asyncio.sleep(0)


def check_answers(system: System, outputs: list[Any], expected: list[list[int]]) -> None:
    assert [output.token_ids for output in outputs] == expected, "each request once, with the tokens of its seed"
    for output in outputs:
        spans = output.extra_fields["version_spans"]
        assert output.stop_reason == "length" and len(output.log_probs) == TOKENS
        assert sum(count for _, count in spans) == TOKENS and all(1 <= v <= system.version for v, _ in spans)


@pytest.mark.parametrize("what", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("state", ["idle", "generating", "syncing", "paused"])
def test_a_lost_replica_comes_back_with_the_weights_of_the_moment(
    system: System, undisturbed: list[list[int]], state: str, what: signal.Signals
) -> None:
    system.until_all_serve()
    system.events.clear()
    victim = system.version % 2
    pid, process = system.pid(victim), psutil.Process(system.pid(victim))
    outputs: list[Any] = []
    started = time.monotonic()
    if state == "generating":

        async def disturbed() -> list[Any]:
            work = asyncio.create_task(ask_many(system))
            await asyncio.wait_for(running_on(system, victim), 30)
            os.kill(pid, what)
            return await work

        outputs = asyncio.run(disturbed())
    elif state == "syncing":
        system.workers.strike(pid, int(what), "model.norm.weight")
        system.update()
    elif state == "paused":
        system.sync.abort_replicas()
        os.kill(pid, what)
        system.until(lambda: system.named("replica_restarted"), "started again while the others are paused")
        assert system.supervisor.watched[victim].state is ReplicaState.WAITING
        system.update()
    else:
        os.kill(pid, what)
    system.until(lambda: system.named("replica_serving"), "serves again")
    seconds = time.monotonic() - started
    print(f"{state}, {what.name}: serves again after {seconds:.1f} s")  # noqa: T201
    assert not process.is_running(), "nothing is left of the old server"
    [lost], [serving] = system.named("replica_lost"), system.named("replica_serving")
    assert lost["replica"] == serving["replica"] == victim
    assert lost["cause"].startswith("dead" if what is signal.SIGKILL else "hung"), lost
    assert serving["version"] == system.version
    assert [name for name, _ in system.events] == [
        "replica_lost", "replica_restarting", "replica_restarted", "replica_serving",
    ]  # fmt: skip
    check_answers(system, outputs or asyncio.run(ask_many(system)), undisturbed)
    assert system.sync.state is SyncState.SERVING


def test_a_false_report_of_a_death_takes_a_server_away_only_for_a_moment(system: System) -> None:
    system.until_all_serve()
    system.events.clear()
    balancer, server_id = system.servers.global_load_balancer, system.servers.rollout_replicas[0].server_id
    ray_get(balancer.report_dead.remote(server_id), what="the report", timeout_s=30)
    system.until(lambda: server_id in ray_get(balancer.get_all_servers.remote(), what="", timeout_s=30), "it is back")
    assert system.events == []


def test_a_start_that_fails_costs_one_of_the_tries(system: System) -> None:
    system.until_all_serve()
    system.events.clear()
    replica = system.servers.rollout_replicas[1]
    launch, tries = replica.launch_servers, []

    async def fail_once() -> None:
        tries.append(replica.server_id)
        if len(tries) == 1:
            raise OSError("no room")
        await launch()

    replica.launch_servers = fail_once  # type: ignore[method-assign]
    os.kill(system.pid(1), signal.SIGKILL)
    system.until(lambda: system.named("replica_serving"), "serves again")
    replica.launch_servers = launch  # type: ignore[method-assign]
    causes = [facts["cause"] for facts in system.named("replica_lost")]
    assert causes[0].startswith("dead: ") and causes[1] == "did not start: OSError: no room"
    assert len(set(tries)) == 2, "each life has a name of its own"


def test_one_that_hangs_while_it_gets_its_weights_does_not_hold_up_the_trainer(system: System) -> None:
    """Nobody waits for the deadline of the transfer (minutes)."""
    system.until_all_serve()
    system.events.clear()
    record = system.supervisor.on_event
    assert record is not None

    def stop_the_new_one(name: str, **facts: Any) -> None:
        record(name, **facts)
        if name == "replica_restarted" and len(system.named(name)) == 1:
            system.workers.strike(system.pid(0), int(signal.SIGSTOP), "model.norm.weight")

    system.supervisor.on_event = stop_the_new_one
    try:
        os.kill(system.pid(0), signal.SIGKILL)
        system.until(lambda: len(system.named("replica_lost")) == 2, "lost again")
        system.sync.sleep_replicas()
        system.update()
        system.until(lambda: system.named("replica_serving"), "serves again")
    finally:
        system.supervisor.on_event = record
    assert [facts["cause"].split(":")[0] for facts in system.named("replica_lost")] == ["dead", "hung"]


def test_two_that_die_at_once_while_they_generate(system: System, undisturbed: list[list[int]]) -> None:
    system.until_all_serve()
    system.events.clear()

    async def disturbed() -> list[Any]:
        work = asyncio.create_task(ask_many(system))
        await asyncio.gather(*(asyncio.wait_for(running_on(system, rank), 30) for rank in range(2)))
        for rank in range(2):
            os.kill(system.pid(rank), signal.SIGKILL)
        return await work

    check_answers(system, asyncio.run(disturbed()), undisturbed)
    system.until_all_serve()
    assert sorted(facts["replica"] for facts in system.named("replica_lost")) == [0, 1]
    in_flight = ray_get(system.servers.global_load_balancer.get_total_inflight.remote(), what="leases", timeout_s=30)
    assert in_flight == 0, "every lease was given back"


def test_with_nobody_left_and_no_budget_all_who_wait_are_told_why(system: System) -> None:
    """Last: it ends the replicas for good."""
    system.until_all_serve()
    object.__setattr__(system.supervisor.settings, "max_restarts", 0)

    async def scenario() -> list[Any]:
        work = [asyncio.create_task(ask_many(system, 1)) for _ in range(4)]
        await asyncio.sleep(0.1)
        os.kill(system.pid(0), signal.SIGKILL)
        os.kill(system.pid(1), signal.SIGSTOP)
        return await asyncio.gather(*work, return_exceptions=True)

    started = time.monotonic()
    errors = asyncio.run(scenario())
    assert time.monotonic() - started < 30
    for error in errors:
        assert isinstance(error, RolloutError)
        assert "replica 0 is dead" in str(error) and "replica 1 is hung" in str(error)
    with pytest.raises(RolloutError, match=r"No rollout replica is left: replica 0 is dead.*max_restarts=0 is used up"):
        system.update()
    assert [line.split(" for ")[0] for line in system.supervisor.describe()] == [
        "rollout replica 0 is gone", "rollout replica 1 is gone",
    ]  # fmt: skip
    assert system.supervisor.take_metrics()["supervisor/replicas_serving"] == 0
