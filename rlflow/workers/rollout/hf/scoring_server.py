"""The Ray actor of one reward-model replica: a conversation in, a number out.

The conversation is rendered with the reward model's own tokenizer and template, and then tokenized as the tokenizer
tokenizes any text, special tokens included. A BOS token that both of them put in front is there once.

Weights never change, so Ray may restart the actor: it comes back as it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.workers.rollout.base import RolloutError

NODE = "reward.reward_model"


class HFScoringServer:
    """Server of one replica.

    Args:
        rollout_config: `reward.reward_model.rollout`, resolved.
        model_config: an `HFModelConfig` whose path is the reward model's.
        replica_rank: for messages.
    """

    def __init__(self, rollout_config: Any, model_config: Any, replica_rank: int, replicas_on_node: int = 1) -> None:
        import torch

        from rlflow.utils.device import get_device

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
        self._config, self._rank, self._device = rollout_config, replica_rank, get_device()
        self._problem: ConfigError | None = None
        try:
            self._load(model_config)
        except ConfigError as error:  # Ray would hide it in the death of the actor
            self._problem = error

    def _load(self, model_config: Any) -> None:
        from rlflow.utils.tokenizer import hf_tokenizer
        from rlflow.workers.rollout.hf.classifier import load_classifier
        from rlflow.workers.rollout.hf.score_queue import ScoreQueue

        # In a thread that ends, so that its pool of OpenMP threads ends too.
        with ThreadPoolExecutor(max_workers=1) as pool:
            self._model = pool.submit(load_classifier, model_config, self._config, self._device).result()
        self._tokenizer = hf_tokenizer(model_config.tokenizer_source, correct_pad_token=False)
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {NODE}.model_path={model_config.path} has no chat template, so a conversation "
                "cannot be shown to the model. Put the template it was trained with into its tokenizer_config.json."
            )
        first = self._tokenizer("a")["input_ids"][:1]
        self._adds_bos = first == [self._tokenizer.bos_token_id]
        # One: a tokenizer's state is not made for several threads.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._max_tokens = self._longest()
        self._queue = ScoreQueue(
            self._model.score, int(self._config.max_num_seqs), int(self._config.max_num_batched_tokens)
        )

    async def ready(self) -> dict[str, Any]:
        """Answers once the model is built: {"pid", "max_model_len", "dtype"}; raises the `ConfigError` of one that
        cannot be.
        """
        if self._problem is not None:
            raise self._problem
        return {"pid": os.getpid(), "max_model_len": self._max_tokens, "dtype": str(self._model.dtype)}

    async def score(self, conversation: Sequence[Mapping[str, Any]] | str, timeout_s: float | None = None) -> float:
        """The model's output for a conversation (messages with role and content), or for a text as it is.

        Raises:
            ContractError: a conversation that the template refuses, or that is too long.
            DeadlineError: no score within `timeout_s`; None = `request_timeout_s`.
            RolloutError: the model failed.
        """
        ids = await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._tokenize, conversation)
        seconds = float(timeout_s or self._config.request_timeout_s)
        try:
            return await self._queue.submit(ids, seconds)
        except TimeoutError:
            raise DeadlineError(
                f"the reward model gave no score within {seconds:.0f} s ({NODE}.rollout.request_timeout_s); "
                f"{self._queue.status()}"
            ) from None
        except Exception as error:
            raise RolloutError(f"the reward model failed: {type(error).__name__}: {error}") from error

    async def sleep(self) -> None:
        """Leave the device when the running batch is done; later requests wait."""
        await self._queue.close()
        if bool(self._config.free_cache_engine) and self._device.type != "cpu":
            await self._queue.in_thread(lambda: self._move("cpu"))

    async def wake_up(self) -> None:
        """Take the device again and score what waits."""
        if bool(self._config.free_cache_engine) and self._device.type != "cpu":
            await self._queue.in_thread(lambda: self._move(self._device))
        self._queue.open()

    async def status(self) -> dict[str, Any]:
        """Counts and state."""
        return {"replica_rank": self._rank, "pid": os.getpid(), **self._queue.status()}

    async def shutdown(self) -> None:
        """Compute nothing more."""
        await self._queue.close()

    def _move(self, device: Any) -> None:
        from rlflow.utils.device import get_torch_device

        self._model.move(device)
        get_torch_device().empty_cache()

    def _longest(self) -> int:
        """Tokens of a conversation at most."""
        wanted = int(self._config.max_model_len or self._config.prompt_length + self._config.response_length)
        positions = self._model.max_positions
        if positions and self._config.max_model_len and wanted > positions:
            raise ConfigError(
                f"{NODE}.rollout.max_model_len={wanted} is over the model's max_position_embeddings={positions}"
            )
        return min(wanted, positions) if positions else wanted

    def _tokenize(self, conversation: Sequence[Mapping[str, Any]] | str) -> list[int]:
        from jinja2 import TemplateError

        try:
            text = conversation if isinstance(conversation, str) else self._render(conversation)
        except TemplateError as error:
            raise ContractError(f"the reward model's chat template refuses the conversation: {error}") from error
        ids: list[int] = self._tokenizer(text)["input_ids"]
        if not ids:
            raise ContractError("the conversation has no token")
        if len(ids) > self._max_tokens:
            raise ContractError(
                f"the conversation has {len(ids)} tokens of the reward model, more than {self._max_tokens} "
                f"({NODE}.rollout.max_model_len, else prompt_length + response_length, or the model's positions)"
            )
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=False, tokenize=False
        )
        return text.removeprefix(self._tokenizer.bos_token) if self._adds_bos else text
