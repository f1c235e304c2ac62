"""Scores of finished sessions, from the reward workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rlflow.agent_loop.output import AgentLoopOutput
from rlflow.agent_loop.session import Session
from rlflow.agent_loop.template_cache import in_tokenizer_thread
from rlflow.reward_loop.client import RewardWorkerClient
from rlflow.reward_loop.result import Invalid, RewardInput


class RewardClient:
    """Asks reward workers for scores.

    Args:
        handles: actor handles; empty when nobody scores.
        tokenizer: decodes responses for the scorers.
    """

    def __init__(self, handles: Sequence[Any], tokenizer: Any) -> None:
        self._workers = RewardWorkerClient(handles)
        self._tokenizer = tokenizer

    def __bool__(self) -> bool:
        return bool(self._workers)

    async def score_session(
        self, outputs: Sequence[AgentLoopOutput], row: dict[str, Any], session: Session
    ) -> str | None:
        """Give every output of a session the score of its last one.

        A score the loop set itself is kept. The values beside the score go to `extra_fields["reward_extra_info"]`.

        Returns:
            None, or why there is no score: the whole session is to be masked.
        """
        last = outputs[-1]
        if last.reward_score is None and self._workers:
            started = monotonic()
            result = await self._workers.score(await self._input(last, row, session))
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
