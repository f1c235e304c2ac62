"""What every rollout engine has in common: the request's sampling parameters and the answer.

The wire format is the reference's: sampling parameters travel as a plain dict, an answer as a `TokenOutput`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from rlflow.utils.errors import ConfigError, ContractError, RlflowError

if TYPE_CHECKING:
    from torch import Tensor

STOP_REASONS = ("stop", "length", "abort")


class RolloutError(RlflowError):
    """A rollout server cannot answer; the message names the server and the cause."""


class TokenOutput(BaseModel):
    """Tokens of one `generate` call.

    `log_probs[i]` belongs to `token_ids[i]` under the distribution it was sampled from; None unless asked for.
    `stop_reason`: "stop" (a stop token, which is part of `token_ids`), "length" or "abort" (what was there so far).
    `extra_fields`: `global_steps` (newest weight version), `min_global_steps`, `max_global_steps`, `raw_stop_reason`,
    `version_spans` ([[version, tokens], ...] over all tokens, see `pieces`).
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any | None = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request. `temperature` 0 = greedy, `top_k` <= 0 = all, `max_tokens` None = the server's rule.

    `seed` None lets the server draw one; with a seed the tokens depend on nothing but the request and the weights
    (up to rounding, see the engine).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    logprobs: bool = False
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    @classmethod
    def from_dict(cls, params: Mapping[str, Any], *, ignore_eos: bool = False) -> SamplingParams:
        """Read the wire form; the dict is not changed.

        Keys: the field names, `max_new_tokens` as another name of `max_tokens`. `logprobs` may be a bool or the number
        of alternatives (only the sampled token's log-prob is returned); 0 counts as asked for.

        Raises:
            ContractError: an unknown key or a value out of range.
        """
        values = {key: value for key, value in params.items() if value is not None}
        if "max_new_tokens" in values:
            values.setdefault("max_tokens", values["max_new_tokens"])
            del values["max_new_tokens"]
        if unknown := sorted(set(values) - set(cls.__dataclass_fields__)):
            raise ContractError(
                f"sampling_params has {', '.join(unknown)}, which this engine does not know. Known: "
                f"{', '.join(cls.__dataclass_fields__)}, max_new_tokens."
            )
        values.setdefault("ignore_eos", ignore_eos)
        try:
            values = {key: _READERS[key](value) for key, value in values.items()}
        except (TypeError, ValueError) as error:
            raise ContractError(f"sampling_params {dict(params)} cannot be read: {error}.") from error
        result = cls(**values)
        result._check()
        return result

    def _check(self) -> None:
        for name, fine, wanted in (
            ("temperature", self.temperature >= 0, ">= 0 (0 = greedy)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("repetition_penalty", self.repetition_penalty > 0, "> 0"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, ">= 1"),
        ):
            if not fine:
                raise ContractError(f"sampling_params.{name}={getattr(self, name)} must be {wanted}.")


_READERS: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "repetition_penalty": float,
    "logprobs": lambda value: value is not False,  # 0 = the sampled token only
    "max_tokens": int,
    "stop_token_ids": lambda value: tuple(int(i) for i in value),
    "seed": int,
    "ignore_eos": bool,
}


def prompt_budget(
    prompt_ids: list[int],
    params: SamplingParams,
    request_id: str,
    *,
    vocab_size: int,
    max_model_len: int,
    prompt_length: int,
    response_length: int,
) -> int:
    """`token_budget` of a prompt whose ids are all in the vocabulary; `ContractError` otherwise."""
    budget = token_budget(
        len(prompt_ids),
        params,
        max_model_len=max_model_len,
        prompt_length=prompt_length,
        response_length=response_length,
    )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise ContractError(
            f"Request {request_id}: token ids {min(prompt_ids)}..{max(prompt_ids)} are not all in the model's "
            f"vocabulary of {vocab_size}. Tokenizer and model do not belong together."
        )
    return budget


def token_budget(
    prompt_tokens: int, params: SamplingParams, *, max_model_len: int, prompt_length: int, response_length: int
) -> int:
    """New tokens a request may get: what it asks for, else what the configured lengths leave; never over the room.

    Raises:
        ContractError: the prompt leaves no room for a single token.
    """
    room = max_model_len - prompt_tokens
    if prompt_tokens < 1 or room < 1:
        raise ContractError(
            f"A prompt of {prompt_tokens} tokens cannot be continued: rollout.max_model_len={max_model_len} must hold "
            "the prompt (at least 1 token) and at least 1 new token. Shorten the prompt (data.max_prompt_length, "
            "data.truncation) or raise rollout.max_model_len."
        )
    wanted = params.max_tokens
    if wanted is None:
        wanted = min(response_length, prompt_length + response_length - prompt_tokens)
    return max(1, min(wanted, room))


class BaseRollout(ABC):
    """The trainer's end of a rollout server, for code that drives one by hand (runs use `CheckpointEngineManager`).

    Args:
        config: `actor_rollout_ref.rollout`.
        model_config: `actor_rollout_ref.model`.
        device_mesh: of the ranks that share the server; unused by servers in processes of their own.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    @abstractmethod
    async def resume(self, tags: list[str]) -> None:
        """Take back what `release` freed: "weights", "kv_cache"."""

    @abstractmethod
    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> Any:
        """Send all weights; the server must be at rest. `global_steps=` is their version."""

    @abstractmethod
    async def release(self) -> None:
        """Free the device for training; requests that come now wait."""

    def generate_sequences(self, prompts: Any) -> Any:
        """Not here: requests go to the server, through `LLMServerClient`."""
        raise NotImplementedError("a rollout server is asked through LLMServerClient.generate")


def get_rollout_class(name: str, mode: str = "async") -> type[BaseRollout]:
    """The adapter of an engine: dotted path by (name, mode), imported on use.

    Raises:
        ConfigError: no such engine, or a mode in which there are no servers.
    """
    try:
        module, _, attribute = _ROLLOUT_CLASSES[name, mode].rpartition(".")
    except KeyError:
        known = ", ".join(f"{n} ({m})" for n, m in sorted(_ROLLOUT_CLASSES))
        raise ConfigError(f"no rollout adapter for name={name!r}, mode={mode!r}; there is {known}") from None
    found: type[BaseRollout] = getattr(importlib.import_module(module), attribute)
    return found


_ADAPTER = "rlflow.workers.rollout.adapter.ServerAdapter"
_ROLLOUT_CLASSES = {(name, "async"): _ADAPTER for name in ("hf", "vllm", "sglang")}
