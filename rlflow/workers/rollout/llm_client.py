"""The client of the rollout servers: one request, wherever there is room for it, whatever happens to a server.

    generate ──lease──> balancer          (see `balancer_port`: requests of one moment share a call)
        └──── generate ───> server of the lease
                 │ its process is gone: told to the balancer, asked anew, with the tokens that earlier pieces brought
                 └ aborted (`FullyAsyncLLMServerClient`): goes on where it stopped

Invariants
    - A request has one deadline, `rollout.request_timeout_s`, over all its attempts.
    - The caller's dict and lists are not changed.
    - An answer has the weight version of each of its tokens (`pieces`).
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from rlflow.utils.errors import ConfigError, DeadlineError
from rlflow.utils.ray_utils import ray_await, ray_get
from rlflow.workers.rollout.balancer_port import BALANCER_TIMEOUT_S, BalancerPort
from rlflow.workers.rollout.base import SamplingParams, TokenOutput, token_budget
from rlflow.workers.rollout.capabilities import COMMON_SAMPLING, check_request
from rlflow.workers.rollout.load_balancer import Ask
from rlflow.workers.rollout.pieces import checked, joined

logger = logging.getLogger(__name__)

# What the client waits beyond the server's own deadline, which has the better message.
_GRACE_S = 15.0
# A paused server keeps a continuation in its queue and wakes it there. Should one answer at once instead, without a
# token, asking again must not become a busy loop.
_EMPTY_PIECE_PAUSE_S = 0.05


class LLMServerClient:
    """Token-in, token-out generation on whichever server has room. Small and picklable.

    Args:
        config: the whole resolved configuration (reads `actor_rollout_ref.rollout`).
        load_balancer_handle: the balancer actor.
    """

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        if kwargs:
            raise ConfigError(f"{type(self).__name__} knows no option {', '.join(sorted(kwargs))}.")
        rollout = config.actor_rollout_ref.rollout
        self._balancer = load_balancer_handle
        self._engine = str(rollout.name)
        self._timeout_s = float(rollout.get("request_timeout_s", None) or 600.0)
        self._ignore_eos = bool(rollout.ignore_eos)
        self._prompt_length, self._response_length = int(rollout.prompt_length), int(rollout.response_length)
        self._max_model_len = int(rollout.max_model_len or self._prompt_length + self._response_length)
        self._patient = False
        self._port: BalancerPort | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_port": None}  # it belongs to an event loop of this process

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        session: str | None = None,
        turn: int = 0,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue a prompt.

        Args:
            request_id: the conversation; its calls go to one server.
            sampling_params: see `SamplingParams`, and `capabilities` for what the engine knows beyond; not changed.
            session, turn: the announced session whose request number `turn` this is; it decides the server then.

        Raises:
            ConfigError: the engine cannot do what is asked.
            ContractError: bad parameters or prompt, or a server without usable weights.
            DeadlineError: no answer within `rollout.request_timeout_s`.
            RolloutError: no server is alive.
        """
        media = {
            "image_data": image_data,
            "video_data": video_data,
            "audio_data": audio_data,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        check_request(self._engine, sampling_params, {**media, **kwargs})
        params = self._common(sampling_params)
        budget = token_budget(
            len(prompt_ids),
            params,
            max_model_len=self._max_model_len,
            prompt_length=self._prompt_length,
            response_length=self._response_length,
        )
        place = {} if session is None else {"session": session, "turn": turn}
        if not kwargs.get("priority"):
            kwargs.pop("priority", None)
        extra = {key: value for key, value in {**media, **kwargs, **place}.items() if value is not None}
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(request_id)
            output = await self._try(
                request_id, list(prompt_ids), dict(sampling_params), len(prompt_ids) + budget, left, extra
            )
            if output is not None:
                return output

    def announce_sessions(self, sessions: Sequence[str], keep: Collection[str]) -> None:
        """Tell the servers which sessions are about to begin, in the order in which their requests are to be served.

        Blocks until all servers know; waits for one where somebody starts servers again. The sessions of a server that
        turns out to be dead are served elsewhere, as those nobody announced. Each must be ended with `end_session`.

        Args:
            sessions: names `{uid}_{number}`.
            keep: prompts (uids) of earlier announcements that still run; sessions of others are forgotten.
        """
        from ray.exceptions import RayActorError

        balancer, wait_s = "the rollout load balancer", self._timeout_s
        ray_get(
            self._balancer.wait_for_servers.remote(wait_s, self._patient),
            what=balancer,
            timeout_s=wait_s + BALANCER_TIMEOUT_S,
        )
        parts = ray_get(
            self._balancer.announce_sessions.remote(list(sessions)), what=balancer, timeout_s=BALANCER_TIMEOUT_S
        )
        told = {
            server_id: server.announce_sessions.remote(part, list(keep)) for server_id, (server, part) in parts.items()
        }
        for server_id, ref in told.items():
            what = f"rollout server {server_id} to take the announcement of {len(sessions)} sessions"
            try:
                ray_get(ref, what=what, timeout_s=BALANCER_TIMEOUT_S)
            except RayActorError:
                self._balancer.report_dead.remote(server_id)

    def end_session(self, session: str) -> None:
        """An announced session makes no more requests. Does not wait."""
        self._balancer.end_session.remote(session)

    def _common(self, sampling_params: dict[str, Any]) -> SamplingParams:
        """The parameters that every engine has; the others are the engine's business."""
        common = {key: value for key, value in sampling_params.items() if key in COMMON_SAMPLING}
        return SamplingParams.from_dict(common, ignore_eos=self._ignore_eos)

    def _late(self, request_id: str) -> DeadlineError:
        return DeadlineError(
            f"Request {request_id} got no answer within rollout.request_timeout_s={self._timeout_s:.0f} s."
        )

    async def _try(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        tokens: int,
        timeout_s: float,
        extra: dict[str, Any],
    ) -> TokenOutput | None:
        """One attempt; None when the chosen server is dead (the balancer is told)."""
        from ray.exceptions import RayActorError

        call_id = f"{request_id}-{uuid.uuid4().hex[:12]}"
        port = self._port_of_this_loop()
        started = time.monotonic()
        ask = Ask(extra.get("session", request_id), tokens, call_id, timeout_s + 2 * _GRACE_S, self._patient)
        try:
            server_id, server = await asyncio.wait_for(port.lease(ask), timeout_s)
        except DeadlineError:
            raise
        except TimeoutError:
            raise DeadlineError(
                f"Request {request_id} found no rollout server within rollout.request_timeout_s={self._timeout_s:.0f} "
                "s: none is ready. The journal's replica_* lines say what became of them."
            ) from None
        left = max(0.0, timeout_s - (time.monotonic() - started))
        answered = False
        try:
            output = await ray_await(
                server.generate.remote(prompt_ids, sampling_params, call_id, left, **extra),
                what=f"generation {call_id} on rollout server {server_id}",
                timeout_s=left + _GRACE_S,
            )
            answered = True
            return checked(output, server_id)
        except RayActorError as error:
            answered = True
            logger.warning("rollout server %s died (%s); trying another one", server_id, type(error).__name__)
            self._balancer.report_dead.remote(server_id)
            return None
        except DeadlineError as error:
            # The server's own deadline error is a TimeoutError too; it says more than that we waited.
            inner = error.__cause__
            raise (inner if isinstance(inner, DeadlineError) else error) from None
        except Exception:
            answered = True  # the server's own error, or bad arguments
            raise
        finally:
            port.give_back(call_id)
            if not answered:
                server.abort_request.remote(call_id)

    def _port_of_this_loop(self) -> BalancerPort:
        if self._port is None or self._port.loop is not asyncio.get_running_loop():
            self._port = BalancerPort(self._balancer)
        return self._port


class FullyAsyncLLMServerClient(LLMServerClient):
    """Hides interruptions: a generation that a weight update aborted goes on where it stopped, on the new weights.

    A paused server keeps requests in its queue, and the balancer keeps them while it has no server, so the continuation
    is woken by the event it waits for and not by a clock. Because a token's random number depends on its position, it
    draws the numbers the uninterrupted one would have drawn (engines whose row says `full_determinism`).

    Args:
        only_hybrid: wait for a server even where nobody starts servers again (hybrid servers leave the balancer while
            their devices train).
    """

    def __init__(self, config: Any, load_balancer_handle: Any = None, only_hybrid: bool = False, **kwargs: Any) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        self._patient = only_hybrid
        section = config.get("async_training", None) if hasattr(config, "get") else None
        self._goes_on = True if section is None else bool(section.get("partial_rollout", True))

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """As the base class; `version_spans`, `min_global_steps` and `max_global_steps` cover all pieces.

        The budget is `max_tokens` (`max_new_tokens`), else `rollout.response_length`; every piece gets what is left.
        """
        limit = self._common(sampling_params).max_tokens or self._response_length
        rest = {k: v for k, v in sampling_params.items() if k not in ("max_tokens", "max_new_tokens")}
        merged: TokenOutput | None = None
        progress = time.monotonic()
        while True:
            done = merged.token_ids if merged else []
            piece = await super().generate(
                request_id,
                prompt_ids=[*prompt_ids, *done],
                sampling_params={**rest, "max_tokens": limit - len(done)},
                **kwargs,
            )
            merged = joined(merged, piece)
            if merged.stop_reason != "abort" or not self._goes_on:
                return merged
            produced = len(merged.token_ids)
            if produced >= limit or len(prompt_ids) + produced >= self._max_model_len:
                merged.stop_reason = "length"
                return merged
            if piece.token_ids:
                progress = time.monotonic()
            elif time.monotonic() - progress > self._timeout_s:
                raise self._late(request_id)
            else:
                await asyncio.sleep(_EMPTY_PIECE_PAUSE_S)
