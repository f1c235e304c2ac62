"""The manager that asks a reward model, and no reward function.

The conversation is the row's `raw_prompt` with the decoded answer behind it. Special tokens of the policy are left
out of the answer: they mean something else, or something it should not say, in the reward model's template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.reward_loop.result import InvalidRewardError, RewardInput
from rlflow.reward_loop.reward_manager.base import RewardManagerBase
from rlflow.utils.errors import RlflowError


class DiscriminativeRewardManager(RewardManagerBase):
    """`compute_score` is `RewardModelClient.score`: a conversation in, the model's number out, unchanged."""

    async def run_single(self, data: RewardInput) -> dict[str, Any]:
        messages = data.non_tensor_batch.get("raw_prompt")
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise InvalidRewardError("the row has no raw_prompt with messages, which a reward model reads")
        answer = {"role": "assistant", "content": await self.response_text(data)}
        try:
            score = await self.compute_score([*(dict(message) for message in messages), answer])
        except RlflowError as error:
            raise InvalidRewardError(f"reward model: {error}") from error
        # Also beside the score, where filters of groups and validation look for numbers by name.
        return {"reward_score": score, "reward_extra_info": {"score": score}}
