"""Prompts are tokenised once per prompt, not once per session.

One cache lives as long as a prompt's sessions. Callers get a copy of the ids, because token buffers grow in place.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)

# One thread: the Rust tokenizers refuse concurrent use of one object ("Already borrowed"), and a queue of short jobs
# needs no more.
_tokenizer_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")


async def in_tokenizer_thread(function: Callable[[], Any]) -> Any:
    """Run `function` where tokenizers are used; the event loop stays free."""
    return await asyncio.get_running_loop().run_in_executor(_tokenizer_thread, function)


class TemplateCache:
    """Token ids of rendered messages, and the cut to `max_tokens`.

    Args:
        label: the prompt's uid, for the warning.
    """

    def __init__(self, label: str = "") -> None:
        self._label = label
        self._ids: dict[str, asyncio.Task[list[int]]] = {}
        self.tokens_cut = 0

    async def get(self, key: Any, render: Callable[[], list[int]], max_tokens: int | None) -> list[int]:
        """The ids of `key` (anything JSON can say), rendered on first use and cut from the left to `max_tokens`."""
        try:
            name = json.dumps([key, max_tokens], sort_keys=True)
        except (TypeError, ValueError):  # messages with objects in them: rendered each time
            return await self._render(render, max_tokens)
        if name not in self._ids:
            self._ids[name] = asyncio.ensure_future(self._render(render, max_tokens))
        # Shielded: a session that is cancelled must not take the rendering from its siblings.
        return list(await asyncio.shield(self._ids[name]))

    async def _render(self, render: Callable[[], list[int]], max_tokens: int | None) -> list[int]:
        ids = await in_tokenizer_thread(render)
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        self.tokens_cut = len(ids) - max_tokens
        logger.warning(
            "prompt %s has %d tokens, over rollout.prompt_length=%d; its first %d are cut off",
            self._label,
            len(ids),
            max_tokens,
            self.tokens_cut,
        )
        return ids[-max_tokens:]
