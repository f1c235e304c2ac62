"""What a row must look like, checked when the file is loaded.

A malformed row found at step 900 costs 900 steps. So every row is looked at once before the run, and the error names
the file, the row, what was found and what is expected. Duplicate prompts are legal and only reported.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from rlflow.data.table import Row, RowTable
from rlflow.utils.errors import DataError

logger = logging.getLogger(__name__)

ROLES = ("system", "user", "assistant", "tool", "developer")
_EXPECTED_PROMPT = 'a non-empty list of messages such as [{"role": "user", "content": "..."}]'
_SHOWN = 5

# Columns that mean something to rlflow, the type they must have when they are set, and words for it.
_COLUMN_TYPES: dict[str, type] = {
    "data_source": str,
    "ability": str,
    "agent_name": str,
    "reward_model": dict,
    "extra_info": dict,
}
_WORDS: dict[type, str] = {str: "a string", dict: "an object"}
# Names that rlflow puts beside a row's columns; a column of that name would contradict it.
_RESERVED = {
    "global_steps": "the step that submits a batch",
    "validate": "whether a batch is of a validation",
    "sampling_params": "an argument of an agent loop's run()",
    "self": "an argument of an agent loop's run()",
}
# Columns that are replaced by rlflow's own.
_REPLACED = ("uid", "epoch", "row", "session_id", "raw_prompt", "tools_kwargs", "interaction_kwargs", "dummy_tensor")


def check_rows(table: RowTable, *, prompt_key: str, media_keys: tuple[str, ...] = (), key: str = "data files") -> None:
    """Raise `DataError` for the malformed rows of `table`; warn about duplicate prompts.

    Args:
        table: the rows as read.
        prompt_key: the column of chat messages (`data.prompt_key`).
        media_keys: columns of images, videos and audios; they must be absent or empty.
        key: the config key the files come from, for messages.
    """
    if prompt_key not in table.column_names:
        raise DataError(
            f"{key}: no column {prompt_key!r} (data.prompt_key); the files have {', '.join(table.column_names)}"
        )
    _check_column_names(table, prompt_key, key)
    bad: list[str] = []
    seen: dict[bytes, int] = {}
    duplicates: list[tuple[int, int]] = []
    for index, row in enumerate(table):
        problem = row_problem(row, prompt_key, media_keys)
        if problem is not None:
            bad.append(f"{table.locate(index)}: {problem}")
            continue
        digest = hashlib.blake2b(
            json.dumps(row[prompt_key], sort_keys=True, default=str).encode(), digest_size=16
        ).digest()
        first = seen.setdefault(digest, index)
        if first != index:
            duplicates.append((first, index))
    if bad:
        more = f"\n    ... and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        shown = "\n    ".join(bad[:_SHOWN])
        raise DataError(f"{key}: {len(bad)} of {len(table)} rows cannot be used:\n    {shown}{more}")
    if duplicates:
        first, again = duplicates[0]
        logger.warning(
            "%s: %d of %d prompts repeat an earlier one (for instance %s repeats %s)",
            key, len(duplicates), len(table), table.locate(again), table.locate(first),
        )  # fmt: skip


def _check_column_names(table: RowTable, prompt_key: str, key: str) -> None:
    reserved = [f"{name!r} ({_RESERVED[name]})" for name in table.column_names if name in _RESERVED]
    if reserved:
        renamed = ", ".join(f"{name!r}: '{name}_'" for name in table.column_names if name in _RESERVED)
        raise DataError(
            f"{key}: rlflow itself uses the name of the column {', '.join(reserved)} ({table.locate(0)}).\n"
            f"    try:    rename it, for instance pandas' df.rename(columns={{{renamed}}})"
        )
    replaced = [name for name in table.column_names if name in _REPLACED and name != prompt_key]
    if replaced:
        logger.warning("%s: the columns %s are replaced by rlflow's own of that name", key, ", ".join(replaced))


def row_problem(row: Row, prompt_key: str, media_keys: tuple[str, ...] = ()) -> str | None:
    """What is wrong with a row, in words, or None."""
    problem = prompt_problem(row.get(prompt_key))
    if problem is not None:
        return f"column {prompt_key!r}: {problem}"
    for name, kind in _COLUMN_TYPES.items():
        value = row.get(name)
        if value is not None and not isinstance(value, kind):
            return f"column {name!r}: found {_show(value)}, expected {_WORDS[kind]}"
    for name in media_keys:
        if row.get(name):
            return f"column {name!r}: found {len(row[name])} items, but prompts with media are not supported; text only"
    return None


def prompt_problem(prompt: Any) -> str | None:
    """What is wrong with a list of chat messages, in words, or None."""
    if not isinstance(prompt, list) or not prompt:
        return f"found {_show(prompt)}, expected {_EXPECTED_PROMPT}"
    for nth, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"message {nth}: found {_show(message)}, expected an object with role and content"
        role = message.get("role")
        if role is None:
            return f"message {nth}: no role; expected one of {', '.join(ROLES)}"
        if role not in ROLES:
            return f"message {nth}: found role {_show(role)}, expected one of {', '.join(ROLES)}"
        content = message.get("content")
        calls_tools = role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(content, str | list) and not (content is None and calls_tools):
            return f"message {nth}: found content {_show(content)}, expected a string"
        if not _encodable(content):
            return f"message {nth}: the content has half a surrogate pair, which no tokenizer takes; clean the text"
    return None


def _encodable(content: Any) -> bool:
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
