"""The interface of an agent loop: how one session unfolds.

    @register("my_agent")
    class MyLoop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
            output = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}_{kwargs['session_id']}",
                prompt_ids=prompt_ids,
                sampling_params=sampling_params,
            )
            return AgentLoopOutput(...)

Invariants a loop keeps
    - Token-in/token-out: the ids of a session only grow. What the model wrote is never decoded and tokenised again; the
      chat template renders new messages only.
    - One request id per conversation, so that all its turns reach the server that holds its cache.
    - response_ids, response_mask and response_logprobs have one length, at most rollout.response_length.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.agent_loop.output import AgentLoopOutput
from rlflow.agent_loop.registry import register
from rlflow.agent_loop.template_cache import TemplateCache
from rlflow.utils.errors import ContractError
from rlflow.utils.tokenizer import apply_chat_template, initialize_system_prompt, initialize_turn_separator

__all__ = ["AgentLoopBase", "DictConfigWrap", "ToolListWrap", "register"]

LoopResult = AgentLoopOutput | Sequence[AgentLoopOutput] | None


class DictConfigWrap:
    """A config handed to a constructor as one object."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """A list of tools handed to a constructor as one object."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


class AgentLoopBase(ABC):
    """Base of agent loops; a fresh instance per session.

    Args:
        trainer_config: the whole resolved config, wrapped.
        server_manager: the LLM client: `await generate(request_id=, prompt_ids=, sampling_params=) -> TokenOutput`.
        tokenizer: the policy's.
        processor: of multimodal models; None here.
        dataset_cls: class of the dataset the row comes from.
        data_config: `config.data`, wrapped.
        **kwargs: `tools=ToolListWrap([...])` and the extra keys of the loop's YAML entry.

    Attributes:
        config, rollout_config, data_config, apply_chat_template_kwargs, mm_processor_kwargs: configs, unwrapped.
        system_prompt: ids the template puts before the first turn by itself.
        turn_separator: ids the template writes behind an assistant turn and the model does not.
        loop: the running event loop; None when constructed outside one.
        template_cache: set by the worker; shared by all sessions of a prompt.
    """

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: DictConfigWrap,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.data_config = data_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.apply_chat_template_kwargs = dict(self.data_config.get("apply_chat_template_kwargs") or {})
        self.mm_processor_kwargs = dict(self.data_config.get("mm_processor_kwargs") or {})
        self.enable_continuous_token = False
        self.loop = _running_loop()
        self.template_cache = TemplateCache()

    @property
    def system_prompt(self) -> list[int]:
        """Token ids; computed once per tokenizer and template options."""
        return list(self._template_part("system_prompt", initialize_system_prompt))

    @property
    def turn_separator(self) -> list[int]:
        """Token ids, [] for templates without one; computed once per tokenizer and template options."""
        return list(self._template_part("turn_separator", initialize_turn_separator))

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> LoopResult:
        """Unfold one session.

        Args:
            sampling_params: for `generate`; copy before changing.
            **kwargs: the row's dataset columns plus uid, session_id, global_steps.

        Returns:
            One output, or several of which the last is the final answer and gets the reward. None or [] stores nothing;
            the session still counts as done.
        """

    async def process_multi_modal_info(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Media of the messages; text models have none."""
        del messages
        return {}

    process_vision_info = process_multi_modal_info

    async def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of the messages with the generation prompt; a list of the caller's own.

        Ids over `rollout.prompt_length` are cut off at the left with a warning.

        Args:
            messages: the conversation, or only its new messages in a later turn.
            tools: schemas the template renders.
            images, videos, audios, mm_processor_kwargs: must be empty for text models.
            remove_system_prompt: cut off what the template puts before the first turn (for the new messages of a turn).

        Raises:
            ContractError: media were given.
        """
        if images or videos or audios:
            raise ContractError("this loop runs a text model; images, videos and audios cannot be templated")
        plain = [dict(message) for message in messages]
        prefix = len(self.system_prompt) if remove_system_prompt else 0

        def render() -> list[int]:
            ids = apply_chat_template(self.tokenizer, plain, tools=tools, **self.apply_chat_template_kwargs)
            return ids[prefix:]

        key = [plain, list(tools or []), prefix, self.apply_chat_template_kwargs]
        return await self.template_cache.get(key, render, int(self.rollout_config.prompt_length))

    def _template_part(self, name: str, compute: Any) -> list[int]:
        # Kept on the tokenizer: it lives as long as the ids are right, and a loop lives for one session only.
        parts = self.tokenizer.__dict__.setdefault("_rlflow_template_parts", {})
        key = (name, repr(sorted(self.apply_chat_template_kwargs.items())), self.tokenizer.chat_template)
        if key not in parts:
            parts[key] = compute(self.tokenizer, **self.apply_chat_template_kwargs)
        return parts[key]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
