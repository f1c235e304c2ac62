"""The socket to a controller on the same node: it does what Ray does; and what happens when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import rlflow.transfer_queue as tq
from rlflow.transfer_queue import lane as lane_module
from rlflow.transfer_queue import runtime
from rlflow.transfer_queue.lane import Lane, LanePort
from rlflow.transfer_queue.lane_server import ANSWER, ERROR, HEAD, HELLO, LARGEST_REPLY, LARGEST_REQUEST, LaneServer
from rlflow.transfer_queue.ports import RayPort, drive
from rlflow.utils.errors import ContractError, DeadlineError
from rlflow.utils.ray_utils import ray_get


class Target:
    """Answers what the message says."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.may_go = asyncio.Event()

    async def put_packed(self, message: bytes) -> bytes:
        self.calls.append(message)
        if message == b"wait":
            await self.may_go.wait()
        if message == b"known":
            raise tq.DtypeConflictError("no \udc80 dtype")
        if message == b"general":
            raise ContractError("a promise")
        if message == b"foreign":
            raise ZeroDivisionError("by 0")
        return message * 2

    async def locate_packed(self, message: bytes) -> bytes:
        return b"at " + message


class Handle:
    """In the place of an actor handle that must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called through Ray")


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A running event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture
def target(loop: asyncio.AbstractEventLoop) -> Target:
    """What the served socket calls."""
    return Target()


@pytest.fixture
def name(loop: asyncio.AbstractEventLoop, target: Target, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a served socket."""
    monkeypatch.setattr("rlflow.transfer_queue.lane_server.own_node", lambda: "here")
    node, name = asyncio.run_coroutine_threadsafe(LaneServer(target).open(), loop).result(10)
    assert node == "here"
    return name


def port_to(name: str, handle: Any = None, timeout_s: float = 20.0) -> RayPort:
    return LanePort(handle or Handle(), "controller", timeout_s, Lane(name)).blocking()


def call(port: RayPort, method: str, message: bytes, extra_s: float = 0.0) -> bytes:
    async def one() -> bytes:
        return await port.call(method, message, extra_s=extra_s)

    return drive(one())


# -- what a call brings ------------------------------------------------------------------------------------------------


def test_answers_and_errors_come_back(name):
    port = port_to(name)
    assert call(port, "put_packed", b"ab") == b"abab"
    assert call(port, "locate_packed", b"") == b"at "
    large = os.urandom(LARGEST_REQUEST)
    assert call(port, "put_packed", large) == large * 2
    with pytest.raises(tq.DtypeConflictError, match="no \udc80 dtype"):
        call(port, "put_packed", b"known")
    with pytest.raises(ContractError, match="a promise"):
        call(port, "put_packed", b"general")
    with pytest.raises(tq.TransferQueueError, match="ZeroDivisionError.*by 0") as caught:
        call(port, "put_packed", b"foreign")
    assert type(caught.value) is tq.TransferQueueError
    assert call(port, "put_packed", b"c") == b"cc"


def test_a_late_answer_is_never_taken_for_another(name, target, loop):
    port = port_to(name, timeout_s=0.2)
    with pytest.raises(DeadlineError, match="Waited 1 s for put_packed of the controller and got no answer"):
        call(port, "put_packed", b"wait", extra_s=0.4)
    assert call(port, "put_packed", b"a") == b"aa"
    port.call("put_packed", b"left alone")
    loop.call_soon_threadsafe(target.may_go.set)
    assert [call(port, "put_packed", bytes([65 + number])) for number in range(9)] == [
        bytes([65 + number]) * 2 for number in range(9)
    ]


def test_a_call_that_waits_holds_up_nobody(name, target, loop):
    port = port_to(name)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, port, "put_packed", b"wait")
        while b"wait" not in target.calls:
            time.sleep(0.01)
        assert call(port, "put_packed", b"a") == b"aa"
        assert not waiting.done()
        loop.call_soon_threadsafe(target.may_go.set)
        assert waiting.result(10) == b"waitwait"


def test_many_threads_get_their_own_answers(name):
    port = port_to(name)

    def work(number: int) -> bool:
        messages = [f"{number}.{i}".encode() * (1 + 500 * (i % 7)) for i in range(50)]
        return all(call(port, "put_packed", message) == message * 2 for message in messages)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(32)))


def test_a_forked_child_has_its_own_connection(name, target):
    port = port_to(name)
    assert call(port, "put_packed", b"parent") == b"parentparent"
    child = os.fork()
    if child == 0:
        good = False
        try:
            good = all(call(port, "put_packed", b"child %d" % i) == b"child %d" % i * 2 for i in range(100))
        finally:
            os._exit(0 if good else 1)
    assert all(call(port, "put_packed", b"p%d" % i) == b"p%d" % i * 2 for i in range(100))
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ended == (child, 0)
    assert len(target.calls) == 201


# -- a side that breaks the rules --------------------------------------------------------------------------------------


def test_a_broken_client_loses_its_connection_only(name):
    port = port_to(name)
    call(port, "put_packed", b"a")
    for wrong in (HEAD.pack(LARGEST_REQUEST + 1, 0), HEAD.pack(1, 99), b"\xff" * 100):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(f"\0{name}")
            assert client.recv(100) == HELLO
            client.sendall(wrong)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(100) == b""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"\0{name}")
        client.sendall(HEAD.pack(1000, 0) + b"half a message")
    assert call(port, "put_packed", b"b") == b"bb"


@pytest.fixture
def fake() -> Iterator[Callable[[bytes, bytes], str]]:
    """Serves one answer to one message, and closes: at once after half an answer, else when the client does."""
    threads = []

    def serve(hello: bytes, answer: bytes) -> str:
        name = f"rlflow-test-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}")
        listener.listen()

        def run() -> None:
            with contextlib.suppress(ConnectionError), listener, listener.accept()[0] as client:
                client.sendall(hello)
                client.settimeout(10)
                if hello == HELLO and client.recv(1000):
                    client.sendall(answer)
                    if len(answer) >= HEAD.size and not answer.endswith(b"half"):
                        client.recv(1)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return name

    yield serve
    for thread in threads:
        thread.join(10)


@pytest.fixture(scope="module")
def actors(ray_cluster: None) -> Iterator[Callable[[], Any]]:
    """Starts actors that answer by Ray."""
    import ray

    class Answers:
        def session(self) -> str:
            return "alive"

        def put_packed(self, message: bytes) -> bytes:
            return b"by Ray: " + message

    started = []

    def start() -> Any:
        started.append(ray.remote(num_cpus=0)(Answers).remote())
        ray_get(started[-1].session.remote(), what="an actor", timeout_s=60)
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


@pytest.mark.parametrize(
    "answer",
    [b"", HEAD.pack(10, ANSWER) + b"half", b"\xff" * 99, HEAD.pack(LARGEST_REPLY + 1, ERROR), HEAD.pack(1, 7) + b"x"],
)
def test_what_may_have_been_done_is_not_repeated(fake, actors, answer):
    port = port_to(fake(HELLO, answer), actors(), timeout_s=5.0)
    with pytest.raises(tq.QueueUnavailableError, match="put_packed, although it is alive"):
        call(port, "put_packed", b"a")
    assert not port.gone
    # The socket is closed by now; nothing can be sent, so Ray carries the call.
    assert call(port, "put_packed", b"b") == b"by Ray: b"


def test_where_nothing_was_sent_ray_carries_the_call(fake, actors):
    actor = actors()
    for name in ("rlflow-test-nobody", fake(b"what?", b"")):
        assert call(port_to(name, actor), "put_packed", b"a") == b"by Ray: a"
    async_form = LanePort(actor, "controller", 20.0, Lane("rlflow-test-nobody"))
    assert asyncio.run(_awaited(async_form)) == b"by Ray: a"


async def _awaited(port: RayPort) -> Any:
    return await port.call("put_packed", b"a")


def test_a_message_that_is_too_large_goes_through_ray(name, target, actors):
    port = port_to(name, actors())
    assert len(call(port, "put_packed", bytes(LARGEST_REQUEST + 1))) == LARGEST_REQUEST + 9
    assert target.calls == []


def test_a_controller_that_died_during_a_call_is_gone(fake, actors):
    import ray

    actor = actors()
    ray.kill(actor)
    with pytest.raises(ray.exceptions.RayActorError):  # until it has ended
        while True:
            ray_get(actor.session.remote(), what="a killed actor", timeout_s=10)
    port = port_to(fake(HELLO, b""), actor)
    with pytest.raises(tq.QueueUnavailableError, match="controller is gone"):
        call(port, "put_packed", b"a")
    assert port.gone


# -- the table ---------------------------------------------------------------------------------------------------------


def outcomes(partition: str) -> list[Any]:
    """What calls return or raise, good ones and bad ones."""
    found: list[Any] = []

    def note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            result = function(*args, **kwargs)
        except tq.TransferQueueError as error:
            found.append((type(error), str(error).replace(partition, "P")))
        else:
            found.append(result)

    note(lambda: tq.kv_put("a", partition, {"x": torch.arange(3)}, {"n": 1, "s": "é"}).tags)
    note(lambda: tq.kv_put("a", partition, None, {"m": [1, None]}).tags)
    note(lambda: tq.kv_put("a", partition, None, {"m": 2}, expect={"n": 5}).tags)
    note(lambda: tq.kv_put("b", partition, {"x": torch.ones(3)}))
    note(lambda: tq.kv_batch_get("a", partition)["x"].values().tolist())
    note(lambda: tq.kv_batch_get(["a", "z"], partition))
    note(lambda: tq.kv_batch_get("a", partition, select_fields=["y"]))
    note(lambda: tq.kv_list(partition))
    return found[:-1]


def test_the_table_says_the_same_both_ways(shared_ray_table, partition, monkeypatch):
    client = runtime.attached_client()
    assert isinstance(client.controller, LanePort)
    sent = []
    begin = Lane.begin
    monkeypatch.setattr(Lane, "begin", lambda *args: sent.append(begin(*args)) or sent[-1])
    by_lane = outcomes(partition)
    assert len(sent) == 8 and sent.index(None) == 7, "all but the list take the lane"
    monkeypatch.setattr(Lane, "begin", lambda *_: None)
    by_ray = outcomes(partition + "ray")
    assert [str(each).replace("Pray", "P") for each in by_ray] == [str(each) for each in by_lane]
    kinds = {each[0] for each in by_lane if isinstance(each, tuple)}
    assert kinds == {tq.TagConflictError, tq.DtypeConflictError, tq.StorageKeyNotFoundError, tq.MissingFieldError}


def test_other_nodes_go_through_ray(ray_cluster):
    assert type(lane_module.controller_port(None, "c", 1.0, ("another node", "n"))) is RayPort
    assert type(lane_module.controller_port(None, "c", 1.0, None)) is RayPort


def test_a_put_that_waits_for_room_and_a_table_that_ends(ray_cluster):
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1, "total_storage_size": 1}}})
    tq.kv_put("a", "train", {"x": torch.ones(3)})
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(tq.kv_put, "b", "train", {"x": torch.ones(3)})
        time.sleep(0.3)
        tq.kv_put("a", "train", None, {"seen": True})
        assert not waiting.done()
        tq.kv_clear("a", "train")
        assert waiting.result(10).keys == ["b"]

        client = runtime.attached_client()
        waiting = pool.submit(tq.kv_put, "c", "train", {"x": torch.ones(3)})
        time.sleep(0.3)
        tq.close()
        with pytest.raises(tq.QueueUnavailableError, match="is gone|cannot be reached"):
            waiting.result(15)
    with pytest.raises(tq.QueueUnavailableError, match="is gone"):
        runtime.run_on(client, lambda it: it.async_put_row("d", "train", None, {"n": 1}, None))
    assert client.controller.gone
