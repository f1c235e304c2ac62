"""Take secrets out of whatever leaves a run: configuration dumps, journals, log lines, trackers, error messages.

    redact({"reward_kwargs": {"api_key": "sk-abc", "url": "http://me:pw@host/v1"}, "max_tokens": 5})
        -> {"reward_kwargs": {"api_key": "***", "url": "http://***@host/v1"}, "max_tokens": 5}

What counts as a secret
    - A text under a key that says so (`api_key`, `hf_token`, `client_secret`, `password`, ...). Numbers, booleans and
      null stay: `max_tokens`, `pad_token_id` are no secrets; neither are the texts of special tokens (`eos_token`).
    - `name=value` or `"name": "value"` inside a text, when the name says so.
    - The user part of a URL, and what has the shape of a well-known access token.
    - A value that this process knows to be secret (`remember_secrets`), wherever it appears: the values of environment
      variables with such names, and those of the configuration. That catches a server's message that repeats the key.

It is a net, not a proof: a secret in a place that nothing marks as one is not found.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

HIDDEN = "***"
# Shorter values are often words; replacing those everywhere would hide more than it protects.
MIN_REMEMBERED_CHARS = 6

_ANYWHERE = frozenset(
    "secret secrets password passwd passphrase apikey apikeys authorization credential credentials".split()
)
_PAIRS = frozenset({("api", "key"), ("api", "keys"), ("access", "key"), ("private", "key"), ("account", "key")})
# `eos_token` and its like are pieces of text for the model.
_MODEL_TOKENS = frozenset("bos eos pad unk sep cls mask stop special image video audio think eot eom next".split())
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_SUSPECT = re.compile(r"[=:]|sk-|hf_|gh[a-z]_|github_pat_|AKIA|xox|eyJ|earer ")
# All patterns are linear in the text: it may come from a model, and be long.
_URL_USER = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")
_NAME = re.compile(
    r"(?<![\w.\-])(?P<key>[A-Za-z_][\w.\-]{0,99})(?P<quote>[\"']?)\s{0,4}(?P<sign>[=:])\s{0,4}(?=[^\s,;&(){}\[\]<>])"
)
_VALUE = re.compile(r"(?P<open>[\"']?)(?P<text>(?<=\")[^\"]*|(?<=')[^']*|[^\s\"',;&(){}\[\]<>]+)")
_SHAPES = re.compile(
    r"\b(?:sk-[A-Za-z0-9_\-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9\-]{10,}|eyJ[\w\-]{10,999}\.[\w\-]{10,999}\.[\w\-]*)|(?<=[Bb]earer )[\w\-.~+/=]{8,}"
)
_PLAIN_VALUE = re.compile(r"-?[\d.]+|null|None|true|false|True|False|\*+|")

_remembered: set[str] = set()
_pattern: re.Pattern[str] | None = None


def is_secret_key(key: object) -> bool:
    """Whether a key, variable or column of that name holds a secret (`api_key`, `WANDB_API_KEY`, `hfToken`, ...)."""
    words = [word.lower() for word in _WORD.findall(str(key).rsplit(".", 1)[-1])]
    if any(word in _ANYWHERE for word in words) or any(pair in _PAIRS for pair in zip(words, words[1:], strict=False)):
        # `password_file` and `secret_name` say where it is, not what it is.
        return words[-1] not in ("file", "path", "dir", "name", "env", "timeout", "id")
    return words[-1:] == ["token"] and (words[-2:-1] or [""])[0] not in _MODEL_TOKENS


def redact(value: T) -> T:
    """A copy of `value` without secrets: mappings become dicts, lists lists, tuples tuples; other objects stay.

    Give it plain containers (`OmegaConf.to_container(config, resolve=True)`) or text.
    """
    result: Any = _redact(value, secret=False)
    return result


def redact_text(text: str) -> str:
    """`text` without secrets: a message, a log line, a traceback."""
    if _pattern is not None:
        text = _pattern.sub(HIDDEN, text)
    if not _SUSPECT.search(text):
        return text
    text = _URL_USER.sub(HIDDEN, text)
    text = _SHAPES.sub(HIDDEN, text)
    return _hide_assigned(text)


def remember_secrets(container: Any = None, environment: Mapping[str, str] | None = None) -> None:
    """Let this process's `redact` and `redact_text` hide these values wherever they appear.

    Args:
        container: texts under secret keys in it are remembered.
        environment: so are the values of variables with such names; `os.environ` when None.
    """
    global _pattern
    variables = os.environ if environment is None else environment
    found = {value for name, value in variables.items() if is_secret_key(name)}
    found |= set(_secret_texts(container, secret=False))
    _remembered.update(value for value in found if len(value) >= MIN_REMEMBERED_CHARS)
    if _remembered:
        # Longest first: one secret may begin with another.
        _pattern = re.compile("|".join(map(re.escape, sorted(_remembered, key=len, reverse=True))))


def remember_arguments(arguments: Iterable[str]) -> None:
    """The same for a command line of `key=value`, and for the environment: call it before anything of it is quoted."""
    remember_secrets(dict(text.split("=", 1) for text in arguments if "=" in text))


def protect_process(config: Any = None) -> None:
    """Keep the secrets of a configuration (a `DictConfig` or plain containers) out of this process's log lines."""
    from omegaconf import OmegaConf

    remember_secrets(OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config)
    # Without handlers of its own the root logger uses the one of last resort.
    for handler in [*logging.getLogger().handlers, logging.lastResort]:
        if handler is not None and not any(isinstance(known, RedactingFilter) for known in handler.filters):
            handler.addFilter(RedactingFilter())


class RedactingFilter(logging.Filter):
    """Takes secrets out of log records; put it on a handler, so that the records of all loggers pass it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact in place; every record passes."""
        text = record.getMessage()
        clean = redact_text(text)
        if clean != text:
            record.msg, record.args = clean, None
        if record.exc_info and not record.exc_text:
            # What the handler's formatter would make of it; it uses `exc_text` when that is set.
            record.exc_text = redact_text(logging.Formatter().formatException(record.exc_info))
        return True


def _redact(value: Any, secret: bool) -> Any:
    if isinstance(value, str):
        return HIDDEN if secret and value else redact_text(value)
    if isinstance(value, bytes):
        return HIDDEN.encode() if secret and value else value
    if isinstance(value, Mapping):
        return {key: _redact(item, secret or is_secret_key(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact(item, secret) for item in value]
    if isinstance(value, tuple):
        items = [_redact(item, secret) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _secret_texts(value: Any, secret: bool) -> Iterator[str]:
    if isinstance(value, str):
        if secret:
            yield value
        # The password of a URL is a secret wherever the URL stands.
        yield from (user.partition(":")[2] for user in re.findall(r"://([^\s/@'\"]+:[^\s/@'\"]+)@", value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_texts(item, secret or is_secret_key(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_texts(item, secret)


def _hide_assigned(text: str) -> str:
    parts = []
    done = 0
    while name := _NAME.search(text, done):
        # What stands behind `error:` may be an assignment itself, so a value that is no secret is looked at again.
        end = name.end()
        value = _VALUE.match(text, end) if _names_secret(name) else None
        if value is None or _PLAIN_VALUE.fullmatch(value["text"]):
            parts.append(text[done:end])
        else:
            parts.append(f"{text[done : value.start('text')]}{HIDDEN}")
            end = value.end()
        done = end
    return "".join([*parts, text[done:]])


def _names_secret(name: re.Match[str]) -> bool:
    # Prose: "unexpected token: <".
    prose = name["sign"] == ":" and not name["quote"] and name["key"].lower() == "token"
    return is_secret_key(name["key"]) and not prose
