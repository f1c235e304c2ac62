"""Overrides that Hydra reads as something else than what was written, and those that it cannot read."""

from __future__ import annotations

import re
from typing import Any

from rlflow.config.tree import default_of, hint_of

_THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold")
_KEY = re.compile(r"[+~]{0,2}[\w.@/]+")


def unreadable(text: str, why: str) -> str:
    """The sentence for an override that the grammar refuses."""
    key, sign, value = text.partition("=")
    if text.startswith("-"):
        better = f"{text.lstrip('-')}, without dashes"
    elif not sign and (pair := re.fullmatch(r"([\w.]+):(.+)", text)):
        better = f"{pair[1]}={pair[2]}"
    elif not sign:
        better = f"{text}=... (no spaces around the equals sign)"
    elif _KEY.fullmatch(key):
        better = f"{quoted(key, value)} (quotes for the shell around quotes for Hydra)"
    else:
        better = "key=value without spaces"
    return f"{text!r} is not an override: {why}\n    set in: command line\n    try:    {better}"


def quoted(key: str, value: str) -> str:
    """An override as it is written in a shell, so that its value is a text."""
    inner = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    return f"""'{key}="{inner}"'"""


def misread(key: str, override: Any) -> str | None:
    """The sentence for a value that Hydra took for something else; None when it means what it says.

    A range such as 1_2 becomes the number 12, since an underscore may separate digits; a comma makes a sweep over
    several runs; a text that looks like a number loses how it was written.
    """
    text = str(override.input_line).partition("=")[2].strip()
    if override.is_sweep_override():
        return _sentence(key, text, "several values to run one after the other", _not_a_sweep(key, text))
    value = override.value()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key.endswith(_THRESHOLDS):
        meant = f"{key}={'_'.join(str(float(part)) for part in text.split('_'))}"
        return _sentence(key, text, f"the number {value}, not as a range", meant) if "_" in text else None
    if str(value) != text and _takes_text(key):
        return _sentence(key, text, f"the number {value}", quoted(key, text))
    return None


def _sentence(key: str, text: str, read_as: str, better: str) -> str:
    return f"{key}={text} is read as {read_as}.\n    set in: command line\n    try:    {better}"


def _not_a_sweep(key: str, text: str) -> str:
    default = default_of(key)
    if isinstance(default, (list, tuple)) or key in ("data.train_files", "data.val_files", "trainer.logger"):
        return f"'{key}=[{text}]'"
    return f"{quoted(key, text)}, or a list: '{key}=[{text}]'"


def _takes_text(key: str) -> bool:
    """Whether a number would be kept as a text."""
    return hint_of(key) in (str, str | None)
