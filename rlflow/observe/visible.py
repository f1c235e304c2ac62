"""Text of a model made safe to show: what could move the cursor, reorder or hide text is written out as an escape.

Model text is hostile: it may hold terminal escape sequences, bidirectional overrides, NUL, lone surrogates. Everything
else, any script and any emoji, stays as it is.
"""

from __future__ import annotations

import unicodedata
from typing import Any

NEWLINE = "⏎"
# Joiners shape words and emoji; they hide and reorder nothing.
_HARMLESS_FORMAT = {"\u200c", "\u200d"}


def visible(text: Any, *, newlines: bool = False) -> str:
    r"""`text` without characters that act instead of being seen.

    Args:
        text: anything; what is no string is shown as `str` gives it.
        newlines: keep \n and \t; otherwise they become ⏎ and \t written out, so that the result is one line.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char, newlines) for char in text)


def _escaped(char: str, newlines: bool) -> str:
    if char in "\n\t":
        return char if newlines else {"\n": NEWLINE, "\t": "\\t"}[char]
    # Spaces of any width can be seen, or at least do no harm (Zs); so do joiners.
    if char in _HARMLESS_FORMAT or unicodedata.category(char) == "Zs":
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def shorten(text: str, width: int) -> str:
    """`text` cut to `width` characters, with … where something is missing."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
