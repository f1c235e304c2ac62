"""The interface of a reward manager.

A manager runs inside a reward worker's event loop and must not block it: it prepares the call, awaits the scorer, and
shapes the result. The scorer itself runs in a killable process.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from rlflow.reward_loop.result import RewardInput


class RewardManagerBase(ABC):
    """Turns a trajectory into `{"reward_score": float, "reward_extra_info": dict}`.

    Args:
        config: the whole resolved config.
        tokenizer: the policy's tokenizer; loaded when first used.
        compute_score: the reward function. Inside a reward worker a coroutine function that runs the user's function in
            a killable process and raises `InvalidRewardError` when there is no score.
        reward_router_address: `host:port` of a reward model's router, None without one.
        reward_model_tokenizer: its tokenizer, None without one.
    """

    _initialised: ClassVar[bool] = False

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Callable[..., Any],
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.reward_router_address = reward_router_address
        self.reward_model_tokenizer = reward_model_tokenizer
        if not self.__class__.__dict__.get("_initialised", False):
            self.init_class(config, tokenizer)
            self.__class__._initialised = True

    @classmethod  # noqa: B027 -- optional for subclasses
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Set up what all instances of the class in a process share; called once per class."""

    @abstractmethod
    async def run_single(self, data: RewardInput) -> dict[str, Any]:
        """Score one trajectory.

        Raises:
            InvalidRewardError: it cannot be scored. Any other exception is taken the same way: the sample is masked.
        """

    async def response_text(self, data: RewardInput) -> str:
        """The response as text without special tokens; decoded here only when the sender did not."""
        if data.response_text is not None:
            return data.response_text
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            None, lambda: self.tokenizer.decode(data.response_ids, skip_special_tokens=True)
        )

    async def call_score(self, **keywords: Any) -> Any:
        """`compute_score` with these keywords, whether it is a coroutine function or a plain one."""
        if self.reward_router_address is not None:
            keywords["reward_router_address"] = self.reward_router_address
            keywords["reward_model_tokenizer"] = self.reward_model_tokenizer
        if inspect.iscoroutinefunction(self.compute_score):
            return await self.compute_score(**keywords)
        result = await asyncio.get_running_loop().run_in_executor(None, lambda: self.compute_score(**keywords))
        return await result if inspect.isawaitable(result) else result
