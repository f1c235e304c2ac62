"""Soft punishment of overlong answers (Yu et al. 2025, DAPO, section 3.4, eq. 13).

With L response tokens, a limit `max_resp_len` and a buffer of `len` tokens before it, the score gets

    min(0, -(L - (max_resp_len - len)) / len) x penalty_factor

    tokens 0 ........ max_resp_len - len ........ max_resp_len
    added  0                          0 .. falling .. -penalty_factor

so that an answer is told to be shorter before it is cut off. Options (`reward.reward_kwargs`):

    max_resp_len         the limit; null = data.max_response_length
    overlong_buffer_cfg  {enable: false, len: tokens, penalty_factor: 1.0, log: false}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.reward_loop.result import RewardInput
from rlflow.reward_loop.reward_manager.naive import NaiveRewardManager
from rlflow.reward_loop.reward_manager.registry import register
from rlflow.utils.errors import ConfigError


@dataclass(frozen=True)
class OverlongPenalty:
    """What is added to the score of a response, by its length. `log`: also report it beside the score."""

    max_resp_len: int
    buffer: int
    factor: float
    log: bool = False

    def __call__(self, tokens: int) -> float:
        """The penalty, <= 0."""
        return min(0.0, -(tokens - (self.max_resp_len - self.buffer)) / self.buffer * self.factor)

    @classmethod
    def from_kwargs(cls, reward_kwargs: dict[str, Any], default_max_resp_len: int) -> OverlongPenalty | None:
        """Read `reward.reward_kwargs`; None when the buffer is not enabled.

        Raises:
            ConfigError: an unknown option, one of a wrong kind, or a buffer that does not fit before the limit.
        """
        options = reward_kwargs.get("overlong_buffer_cfg")
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise _bad("overlong_buffer_cfg", options, "must be a group of options", "{enable: true, len: 128}")
        unknown = sorted({*reward_kwargs} - {"max_resp_len", "overlong_buffer_cfg"})
        unknown += sorted(f"overlong_buffer_cfg.{n}" for n in {*options} - {"enable", "len", "penalty_factor", "log"})
        if unknown:
            raise ConfigError(
                f"reward.reward_kwargs has {', '.join(unknown)}, which reward.reward_manager.name=dapo does not read.\n"
                "    try:    max_resp_len and overlong_buffer_cfg {enable, len, penalty_factor, log}, which it reads"
            )
        switches = {name: options.get(name, False) for name in ("enable", "log")}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise _bad(f"overlong_buffer_cfg.{name}", value, "must be true or false", "true")
        if not switches["enable"]:
            return None
        limit: Any = reward_kwargs.get("max_resp_len")
        limit = default_max_resp_len if limit is None else limit
        if not _is_count(limit):
            raise _bad(
                "max_resp_len", limit, "must be a number of tokens, at least 1", "null (data.max_response_length)"
            )
        buffer: Any = options.get("len")
        factor = options.get("penalty_factor", 1.0)
        if not _is_count(buffer) or buffer > limit:
            why = f"must be between 1 and {limit} tokens (max_resp_len): the penalty grows before the limit"
            raise _bad("overlong_buffer_cfg.len", buffer, why, max(1, limit // 5))
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise _bad("overlong_buffer_cfg.penalty_factor", factor, "must be a number above 0", 1.0)
        return cls(limit, buffer, float(factor), switches["log"])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _bad(option: str, value: Any, why: str, usual: Any) -> ConfigError:
    key, shown = f"reward.reward_kwargs.{option}", "null" if value is None else value
    return ConfigError(f"{key}={shown} {why}.\n    try:    {key}={usual}")


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """The naive manager, with the overlong penalty added to the score.

    `acc` and the other values that the reward function returns stay as they are: what groups are filtered by, and what
    validation reports, is not shaped. With `log` the extra values `overlong_reward` (the penalty) and `overlong`
    (whether there is one) are added.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        from omegaconf import OmegaConf

        super().__init__(config, *args, **kwargs)
        node = OmegaConf.select(config, "reward.reward_kwargs")
        options: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node or {}
        self._penalty = OverlongPenalty.from_kwargs(options, int(OmegaConf.select(config, "data.max_response_length")))

    async def run_single(self, data: RewardInput) -> dict[str, Any]:
        result = await super().run_single(data)
        if self._penalty is None:
            return result
        penalty = self._penalty(len(data.response_ids))
        info = result["reward_extra_info"]
        if self._penalty.log:
            info = {**info, "overlong_reward": penalty, "overlong": penalty < 0}
        return {"reward_score": result["reward_score"] + penalty, "reward_extra_info": info}
