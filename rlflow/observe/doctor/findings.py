"""What was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Fields:
        area: heading, such as "versions".
        state: "ok"; "note": works, but worth a line; "bad": a run cannot start, or not as asked.
        what: what was found.
        fix: one line that repairs it, "" when there is nothing to repair.
    """

    area: str
    state: Literal["ok", "note", "bad"]
    what: str
    fix: str = ""
