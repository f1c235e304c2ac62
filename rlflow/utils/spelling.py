"""What a misspelt name was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The one of `names` that looks most like `name`, whatever the case; None when none does."""
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None
