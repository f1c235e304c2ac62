"""Tokenizers that are loaded when they are first used: most managers and scorers get text, and never need one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class LazyTokenizer:
    """Stands for a tokenizer; picklable, and small, where `load` is.

    Args:
        load: gives the tokenizer; called once.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load_tokenizer = load
        self._tokenizer: Any = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._load()(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"_load_tokenizer": self._load_tokenizer, "_tokenizer": None}

    def _load(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer


def policys(config: Any) -> Any:
    """The policy's tokenizer."""
    from rlflow.utils.tokenizer import policy_tokenizer

    return policy_tokenizer(config)


@functools.cache
def of_path(path: str) -> Any:
    """The tokenizer of a model folder, loaded once in a process."""
    from rlflow.utils.tokenizer import hf_tokenizer

    return hf_tokenizer(path)
