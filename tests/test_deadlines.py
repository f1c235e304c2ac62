"""Every wait in the package has a deadline, or is listed here with the reason why it needs none.

What a wait hands to another function is that function's business: `ray_get` has a deadline by default, a collective has
that of its process group (`actor_rollout_ref.nccl_timeout`), `asyncio.to_thread` and `gather` end with what they run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlflow

PACKAGE = Path(rlflow.__file__).parent

# file::function -> why this wait may be without a deadline of its own.
ALLOWED = {
    "agent_loop/session.py::within_deadline": "the task is done",
    "checkpoint/background.py::CheckpointWriter.write": "the writer was made with a limit",
    "observe/tracking/guard.py::Background._work": "its own thread, waiting for work; who waits for it has a limit",
    "reward_loop/child.py::Channel.start_guard": "the guard lives until its worker's pipe closes; that is its purpose",
    "reward_loop/child.py::serve_async": "waits for the worker's next request or for the end of its pipe",
    "reward_loop/client.py::RewardWorkerClient.score": "a session or a batch (call_timeout_s) holds the deadline",
    "reward_loop/pool.py::ScorerPool.call": "a place in the queue; every call before it is bounded by reward.timeout_s",
    "reward_loop/pool.py::ScorerPool._call_alone": "as above",
    "reward_loop/process.py::ScorerProcess._end": "inside asyncio.timeout",
    "reward_loop/process.py::ScorerProcess.kill": "inside asyncio.timeout",
    "reward_loop/worker.py::RewardLoopWorker._within_deadline": "the task is done",
    "single_controller/base/decorator.py::_resolve": "a call's future; it has the group's call_timeout_s",
    "observe/doctor/__init__.py::examine": "each part runs its processes with timeout_s",
    "trainer/ppo/background_save.py::PreparedCheckpoint._complete": "BackgroundFiles was made with a limit",
    "transfer_queue/capacity.py::RoomQueue.commit": "the future is done",
    "transfer_queue/ports.py::LocalPort.finish": "a loop of this process; what its calls wait for has deadlines",
    "transfer_queue/runtime.py::LoopThread.run": "the calls in the coroutine have rpc_timeout_s",
    "transfer_queue/segment.py::Segment.retire": "it gives the lock back",
    "transfer_queue/storage_simple_client.py::SimpleStorageClient._return_unused": "called when the reply is there",
    "utils/ray_utils.py::run_coroutine": "the calls in the coroutine have deadlines",
    "workers/rollout/load_balancer.py::GlobalRequestLoadBalancer._until": "inside asyncio.timeout",
    "workers/rollout/supervisor.py::ReplicaSupervisor._main": "its own thread, until shutdown",
    "workers/rollout/supervisor.py::_until": "inside asyncio.timeout",
    "workers/rollout/hf/score_queue.py::ScoreQueue._run": "its own task, waiting for work; each request has a deadline",
    "workers/rollout/hf/score_queue.py::ScoreQueue.close": "one forward; who calls the server has CALL_TIMEOUT_S",
    "workers/rollout/hf/scoring_server.py::HFScoringServer._load": "loading the model; the launcher waits as below",
    "workers/rollout/hf/server.py::HFServer.__init__": "loading the model; the launcher waits LAUNCH_TIMEOUT_S for it",
    "workers/rollout/process_guard.py::wait_for_end": "the guard lives until its server ends; that is its purpose",
    "workers/rollout/request_gate.py::RequestGate.enter": "inside the request's asyncio.timeout",
    "workers/rollout/request_gate.py::RequestGate._quiet": "inside asyncio.timeout",
}


def no_arguments(call: ast.Call) -> bool:
    return not call.args and not call.keywords


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg in names), None)


def is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def waits_for_ever(call: ast.Call) -> str | None:
    """The name of the call when it may wait for ever."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    timeout = keyword(call, "timeout", "timeout_s")
    unbounded = False
    if owner == "ray" and name in ("get", "wait"):
        unbounded = timeout is None or is_none(timeout)
    elif name in ("ray_get", "ray_await"):
        unbounded = is_none(timeout)
    elif owner == "asyncio" and name in ("wait", "wait_for"):
        unbounded = is_none(timeout) or (timeout is None and (name == "wait" or len(call.args) < 2))
    elif name in ("init_process_group", "new_group"):
        unbounded = timeout is None
    elif owner == "subprocess" and name in ("run", "call", "check_call", "check_output"):
        unbounded = timeout is None
    elif name in ("urlopen", "create_connection") or (owner in ("requests", "httpx") and name in ("get", "post")):
        unbounded = timeout is None
    elif name == "flock":
        unbounded = "LOCK_NB" not in ast.unparse(call)
    elif name == "select" and owner == "select":
        unbounded = len(call.args) < 4 or is_none(call.args[3])
    elif name == "wait_for":
        unbounded = is_none(timeout) or (timeout is None and len(call.args) < 2)
    elif name in ("result", "join", "wait", "acquire", "communicate", "get", "poll", "recv", "waitpid", "wait_procs"):
        polls = name in ("poll",) and owner.split(".")[-1] in ("process", "_process")
        unbounded = (no_arguments(call) and not polls) or is_none(timeout)
    return f"{owner}.{name}" if unbounded else None


def find(tree: ast.AST, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """(function, call, line) of every wait without a deadline."""
    for node in ast.iter_child_nodes(tree):
        scope = inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = (*inside, node.name)
        if isinstance(node, ast.Call) and (name := waits_for_ever(node)):
            yield ".".join(scope[:2]), name, node.lineno
        yield from find(node, scope)


def test_no_wait_in_the_package_is_without_a_deadline() -> None:
    found: dict[str, str] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE).as_posix()
        for function, name, line in find(ast.parse(file.read_text())):
            found[f"{relative}::{function}"] = f"rlflow/{relative}:{line}: {name}() may wait for ever, in {function}"
    new = [text for place, text in found.items() if place not in ALLOWED]
    assert not new, "give it a deadline (rlflow.utils.ray_utils.ray_get), or list it here with a reason:\n" + "\n".join(
        new
    )
    assert not sorted(set(ALLOWED) - set(found)), "these exceptions are not needed any more"


@pytest.mark.parametrize(
    "code",
    [
        "ray.get(x)", "ray.wait([x], num_returns=1)", "ray.get(x, timeout=None)", "future.result()", "thread.join()",
        "event.wait()", "condition.wait_for(f)", "lock.acquire()", "queue.get()", "asyncio.wait({t})",
        "process.communicate()", "subprocess.run(['x'])", "select.select([a], [], [])", "poller.poll()",
        "ray_get(x, what='', timeout_s=None)", "dist.init_process_group('gloo')", "fcntl.flock(f, fcntl.LOCK_EX)",
        "urllib.request.urlopen(u)", "asyncio.wait_for(t, timeout=None)", "condition.wait(timeout=None)",
    ],
)  # fmt: skip
def test_the_search_finds(code: str) -> None:
    assert list(find(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "ray.get(x, timeout=3)", "future.result(timeout=3)", "','.join(x)", "event.wait(timeout=1)", "d.get('a')",
        "condition.wait_for(f, timeout=2)", "asyncio.wait({t}, timeout=3)", "ray_get(x, what='')", "process.poll()",
        "asyncio.wait_for(t, 3)", "subprocess.run(['x'], timeout=3)", "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ],
)  # fmt: skip
def test_the_search_leaves_alone(code: str) -> None:
    assert not list(find(ast.parse(code)))
