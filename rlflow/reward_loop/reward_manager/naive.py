"""The default manager: one call of the reward function per trajectory, its result unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.reward_loop.result import InvalidRewardError, RewardInput
from rlflow.reward_loop.reward_manager.base import RewardManagerBase
from rlflow.reward_loop.reward_manager.registry import register


@register("naive")
class NaiveRewardManager(RewardManagerBase):
    """Calls `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    `extra_info` is a copy of the row's, with `num_turns`, `rollout_reward_scores` and every extra field of the agent
    loop's output added. A dict result is passed on whole as reward_extra_info; a number becomes `{"acc": number}`.
    """

    async def run_single(self, data: RewardInput) -> dict[str, Any]:
        row = data.non_tensor_batch
        reward_model = row.get("reward_model")
        if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
            raise InvalidRewardError('the row has no reward_model["ground_truth"]')
        if row.get("data_source") is None:
            raise InvalidRewardError("the row has no data_source")
        tool_fields = row.get("tool_extra_fields") or {}
        # A copy: the row's object is shared by all sessions of the prompt.
        extra_info = {
            **(row.get("extra_info") or {}),
            "num_turns": row.get("__num_turns__"),
            "rollout_reward_scores": tool_fields.get("reward_scores", {}),
            **tool_fields,
        }
        result = await self.call_score(
            data_source=row["data_source"],
            solution_str=await self.response_text(data),
            ground_truth=reward_model["ground_truth"],
            extra_info=extra_info,
        )
        if isinstance(result, Mapping):
            return {"reward_score": result["score"], "reward_extra_info": dict(result)}
        return {"reward_score": result, "reward_extra_info": {"acc": result}}
