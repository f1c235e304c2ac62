"""An `SGLangServer` actor that also runs a test's own coroutine, for what no remote method shows."""

from __future__ import annotations

from typing import Any

import rollout_tiny as tiny

from rlflow.utils.ray_utils import ray_get

ENVIRONMENT = {"RLFLOW_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}


def start_server(path: str, **rollout: Any) -> Any:
    """The actor, once its engine serves. `act(function)`: `await function(server)` inside it."""
    import ray

    from rlflow.workers.rollout.sglang.server import SGLangServer

    class Probe(SGLangServer):
        async def act(self, function: Any) -> Any:
            return await function(self)

    node = tiny.config(path, name="sglang", tensor_model_parallel_size=1, **rollout).actor_rollout_ref
    options = {"num_cpus": 0, "max_concurrency": 100, "runtime_env": {"env_vars": ENVIRONMENT}}
    actor = ray.remote(Probe).options(**options).remote(node.rollout, node.model, 0)
    ray_get(actor.ready.remote(), what="SGLang to start", timeout_s=400)
    return actor


def stop_server(actor: Any) -> None:
    """End the actor and its engine; it may be dead."""
    import ray

    try:
        ray_get(actor.shutdown.remote(), what="SGLang to stop", timeout_s=60)
    except ray.exceptions.RayActorError:
        pass  # the test killed it
    ray.kill(actor)


def act(actor: Any, function: Any) -> Any:
    """What `function(server)` returns inside the actor."""
    return ray_get(actor.act.remote(function), what="a test in the server", timeout_s=120)
