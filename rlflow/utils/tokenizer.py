"""Tokenizers and chat templates, text only.

transformers is imported when a tokenizer is loaded, not before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.utils.errors import ConfigError

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
_DUMMY_USER: list[Message] = [{"role": "user", "content": ""}]
_DUMMY_ANSWER: list[Message] = [*_DUMMY_USER, {"role": "assistant", "content": "a"}]


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """Load a tokenizer.

    Args:
        name_or_path: folder or hub name.
        correct_pad_token: give a tokenizer without a padding token its end-of-text token for it.
        correct_gemma2: gemma-2-2b-it names an end token that its chat template does not write; use `<end_of_turn>`.
        **kwargs: for `AutoTokenizer.from_pretrained`; `trust_remote_code` is false unless given.

    Raises:
        ConfigError: nothing loadable is there.
    """
    from rlflow.utils.py_functional import importing

    with importing("transformers.models.auto.tokenization_auto"):
        from transformers import AutoTokenizer

    kwargs.setdefault("trust_remote_code", False)
    if correct_gemma2 and "gemma-2-2b-it" in str(name_or_path):
        kwargs["eos_token"] = "<end_of_turn>"  # noqa: S105 -- a token of text
    expanded = str(Path(name_or_path).expanduser()) if str(name_or_path).startswith("~") else name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(expanded, **kwargs)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be loaded from {name_or_path}: {error}") from error
    if correct_pad_token and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.warning("the tokenizer of %s has no pad token; its eos token %r serves", expanded, tokenizer.eos_token)
    return tokenizer


def policy_tokenizer(config: Any) -> Any:
    """The policy's tokenizer as `config.actor_rollout_ref.model` describes it.

    `tokenizer_path` (else `path`), `trust_remote_code`, and `custom_chat_template` (the template's text).
    """
    from omegaconf import OmegaConf

    model = OmegaConf.select(config, "actor_rollout_ref.model")
    path = OmegaConf.select(model, "tokenizer_path") or OmegaConf.select(model, "path")
    if not path:
        raise ConfigError("actor_rollout_ref.model.path is not set; it names the model folder")
    tokenizer = hf_tokenizer(path, trust_remote_code=bool(OmegaConf.select(model, "trust_remote_code", default=False)))
    template = OmegaConf.select(model, "custom_chat_template")
    if template:
        tokenizer.chat_template = template
    return tokenizer


def normalize_token_ids(ids: Any) -> list[int]:
    """Token ids of one sequence as a list of ints.

    Takes a list, a tensor or array, what `apply_chat_template` and `__call__` return (a mapping with "input_ids"), and
    any of them inside lists of one.

    Raises:
        TypeError: anything else, also several sequences.
    """
    if isinstance(ids, Mapping):
        if "input_ids" not in ids:
            raise TypeError(f"a mapping with {sorted(ids)} holds no token ids; expected input_ids")
        ids = ids["input_ids"]
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if hasattr(ids, "ids") and not isinstance(ids, (list, tuple)):  # an Encoding of the tokenizers package
        ids = ids.ids
    if not isinstance(ids, (list, tuple)):
        raise TypeError(f"token ids of one sequence are wanted, got {type(ids).__name__}")
    if len(ids) == 1 and not isinstance(ids[0], int):
        return normalize_token_ids(ids[0])
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        kinds = sorted({type(item).__name__ for item in ids})
        raise TypeError(f"token ids of one sequence are wanted, got a list of {', '.join(kinds)}")
    return list(ids)


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> list[int]:
    """Token ids of a conversation.

    Some templates refuse a conversation without a user turn (a lone tool message of a later turn). Then an empty user
    turn is put in front and its tokens are cut off again.

    Raises:
        ConfigError: the tokenizer has no chat template.
        jinja2.TemplateError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the tokenizer has no chat template. Use an instruct model, or set "
            "actor_rollout_ref.model.custom_chat_template"
        )

    def render(turns: Sequence[Message], generation_prompt: bool) -> list[int]:
        return normalize_token_ids(
            tokenizer.apply_chat_template(
                [dict(turn) for turn in turns],
                tools=list(tools) if tools else None,
                add_generation_prompt=generation_prompt,
                tokenize=True,
                **kwargs,
            )
        )

    try:
        return render(messages, add_generation_prompt)
    except TemplateError:
        if any(message.get("role") == "user" for message in messages):
            raise
        front = render(_DUMMY_USER, False)
        whole = render([*_DUMMY_USER, *messages], add_generation_prompt)
        if whole[: len(front)] != front:
            raise
        return whole[len(front) :]


def extract_system_prompt_and_generation(tokenizer: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
    """(ids a template puts before the first turn, ids of its generation prompt).

    Found by comparing the renderings of one and of two empty user turns, with and without generation prompt. ([], [])
    for a template that does not render turn by turn.
    """
    one = apply_chat_template(tokenizer, _DUMMY_USER, add_generation_prompt=False, **kwargs)
    two = apply_chat_template(tokenizer, [*_DUMMY_USER, *_DUMMY_USER], add_generation_prompt=False, **kwargs)
    prompted = apply_chat_template(tokenizer, _DUMMY_USER, add_generation_prompt=True, **kwargs)
    turn = len(two) - len(one)
    if turn <= 0 or turn > len(one) or two[: len(one)] != one or two[len(one) :] != one[len(one) - turn :]:
        return [], []
    generation = prompted[len(one) :] if prompted[: len(one)] == one else []
    return one[: len(one) - turn], generation


def initialize_system_prompt(tokenizer: Any, **kwargs: Any) -> list[int]:
    """Ids that the template puts before the first turn when the conversation has no system message."""
    from jinja2 import TemplateError

    try:
        return extract_system_prompt_and_generation(tokenizer, **kwargs)[0]
    except TemplateError:  # templates that refuse two user turns in a row
        return []


def initialize_turn_separator(tokenizer: Any, **kwargs: Any) -> list[int]:
    """Ids that the template writes behind a finished assistant turn and the model does not (a newline in ChatML).

    They are what follows the last end-of-text token of a rendered assistant turn; [] without such a token.
    """
    from jinja2 import TemplateError

    try:
        ids = apply_chat_template(tokenizer, _DUMMY_ANSWER, add_generation_prompt=False, **kwargs)
    except TemplateError:
        return []
    eos = tokenizer.eos_token_id
    if eos not in ids:
        return []
    return ids[len(ids) - ids[::-1].index(eos) :]
