"""Questions to a replica: does it live, and does it answer with the weights that it should have?"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import RolloutError
from rlflow.workers.rollout.replica import RolloutReplica

# A process that has just died is "unavailable" for a moment before Ray says that it is dead.
_UNAVAILABLE_PAUSE_S = 0.2


async def trouble(servers: Sequence[Any], limit_s: float) -> str | None:
    """Why servers cannot serve, as they answer `status` within `limit_s`; None when all give a sign of life."""
    from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

    if not servers:
        return "dead: it has no server"
    deadline = time.monotonic() + limit_s
    while True:
        try:
            answers = await asyncio.gather(
                *(ray_await(server.status.remote(), what="status", timeout_s=limit_s) for server in servers)
            )
        except ActorUnavailableError as error:
            if time.monotonic() > deadline:
                return f"unreachable for {limit_s:g} s: {first_line(error)}"
            await asyncio.sleep(_UNAVAILABLE_PAUSE_S)
            continue
        except RayActorError as error:
            return f"dead: {first_line(error)}"
        except TimeoutError:
            return f"hung: no answer to status within rollout.supervisor.hang_timeout_s={limit_s:g} s"
        except RayTaskError as error:
            return f"failed: {first_line(error)}"
        failures = [answer["failure"] for answer in answers if answer.get("failure")]
        return f"failed: {failures[0]}" if failures else None


async def probe(replica: RolloutReplica, version: int, timeout_s: float) -> None:
    """A generate call of one token; `RolloutError` unless the answer is one token of weight version `version`."""
    params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
    what = f"the first token of rollout replica {replica.replica_rank}"
    output = await ray_await(
        replica.server_handle.generate.remote([0], params, f"probe-{uuid.uuid4().hex[:12]}", timeout_s),
        what=what,
        timeout_s=timeout_s,
    )
    got = output.extra_fields.get("global_steps")
    if len(output.token_ids) != 1 or got != version:
        raise RolloutError(
            f"Rollout replica {replica.replica_rank} answered its readiness probe with {len(output.token_ids)} tokens "
            f"({output.stop_reason}) of weight version {got}; expected one token of version {version}."
        )


def first_line(error: BaseException) -> str:
    """Of an error's text; the name of its type where it has none."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
