"""Scores of finished sessions, from the reward worker with the fewest calls of this process."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rlflow.agent_loop.output import AgentLoopOutput
from rlflow.agent_loop.session import Session
from rlflow.agent_loop.template_cache import in_tokenizer_thread
from rlflow.reward_loop.result import Invalid, RewardInput, RewardResult, one_line
from rlflow.utils.ray_utils import ray_await

logger = logging.getLogger(__name__)

ATTEMPTS = 4
RETRY_PAUSE_S = 1.0


class RewardClient:
    """Asks reward workers for scores.

    Args:
        handles: actor handles; empty when nobody scores.
        tokenizer: decodes responses for the scorers.
    """

    def __init__(self, handles: Sequence[Any], tokenizer: Any) -> None:
        self._handles = list(handles)
        self._tokenizer = tokenizer
        self._load = [0] * len(self._handles)

    def __bool__(self) -> bool:
        return bool(self._handles)

    async def score_session(
        self, outputs: Sequence[AgentLoopOutput], row: dict[str, Any], session: Session
    ) -> str | None:
        """Give every output of a session the score of its last one.

        A score the loop set itself is kept. The values beside the score go to `extra_fields["reward_extra_info"]`.

        Returns:
            None, or why there is no score: the whole session is to be masked.
        """
        last = outputs[-1]
        if last.reward_score is None and self._handles:
            started = monotonic()
            result = await self.score(await self._input(last, row, session))
            last.metrics.compute_score = monotonic() - started
            if isinstance(result, Invalid):
                last.extra_fields["reward_extra_info"] = {}
                return result.reason
            last.reward_score = result.value
            last.extra_fields["reward_extra_info"] = result.extra_info
        if last.reward_score is not None and not math.isfinite(last.reward_score):
            return f"the agent loop set reward_score to {last.reward_score}"
        info = last.extra_fields.setdefault("reward_extra_info", {})
        for earlier in outputs[:-1]:
            if last.reward_score is not None:
                earlier.reward_score = last.reward_score
                earlier.extra_fields["reward_extra_info"] = dict(info)
        return None

    async def score(self, data: RewardInput) -> RewardResult:
        """Score one trajectory. A dead worker's call goes to another one; only when all fail it is `Invalid`."""
        from ray.exceptions import RayActorError, RayError

        failure: BaseException | None = None
        failed: set[int] = set()
        for attempt in range(ATTEMPTS):
            if attempt and len(failed) == len(self._handles):
                await asyncio.sleep(RETRY_PAUSE_S * attempt)  # Ray restarts them meanwhile
                failed.clear()
            index = min((i for i in range(len(self._handles)) if i not in failed), key=self._load.__getitem__)
            self._load[index] += 1
            try:
                # The session holds the deadline; the worker holds the scorer's.
                return await ray_await(
                    self._handles[index].compute_score.remote(data), what=f"reward worker {index}", timeout_s=None
                )
            except RayActorError as error:
                failure = error
                failed.add(index)
                logger.warning("reward worker %d died or is away (attempt %d of %d)", index, attempt + 1, ATTEMPTS)
            except RayError as error:
                return Invalid(one_line(f"the reward worker raised {error}"))
            finally:
                self._load[index] -= 1
        return Invalid(one_line(f"no reward worker answers: {failure}"))

    async def _input(self, output: AgentLoopOutput, row: dict[str, Any], session: Session) -> RewardInput:
        ids = output.response_ids
        text = await in_tokenizer_thread(lambda: self._tokenizer.decode(ids, skip_special_tokens=True))
        return RewardInput(
            prompt_ids=output.prompt_ids,
            response_ids=ids,
            response_mask=output.response_mask,
            response_text=text,
            non_tensor_batch={
                **row,
                "uid": session.uid,
                "session_id": session.session_id,
                "__num_turns__": output.num_turns,
                "tool_extra_fields": output.extra_fields,
                "prompt_len": len(output.prompt_ids),
                "response_len": len(ids),
            },
        )
