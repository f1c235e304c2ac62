"""What `kv_wait` waits for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlflow.transfer_queue.errors import QueueArgumentError


@dataclass(frozen=True)
class Predicate:
    """At least `count` keys whose tag `tag` is one of `status`.

    Args:
        status: a value or a tuple of values that count as done, e.g. `("finished", "failure")`.
        count: how many keys must match; None: all keys that were passed to `kv_wait`.
        tag: name of the tag entry that is compared.
    """

    status: Any
    count: int | None = None
    tag: str = "status"

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise QueueArgumentError(f"Predicate(count={self.count}) is true at once; wait for 1 key or more")

    def accepts(self, tag: dict[str, Any]) -> bool:
        """Whether a row with this tag matches."""
        return self.tag in tag and tag[self.tag] in self.wanted()

    def describe(self) -> str:
        """`status in ('finished', 'failure')`, for messages."""
        return f"{self.tag} in ({', '.join(repr(value) for value in self.wanted())})"

    def wanted(self) -> tuple[Any, ...]:
        """The values that count as done."""
        return tuple(self.status) if isinstance(self.status, (tuple, list, set, frozenset)) else (self.status,)
