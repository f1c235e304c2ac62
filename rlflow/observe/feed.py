"""Events from the trainer's process to the user's terminal.

The trainer runs in an actor, the terminal belongs to the launcher. The actor publishes small dicts here; the launcher
asks for "everything after number n" and is woken when there is something. Nothing polls.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

KEEP = 10_000


class EventFeed:
    """A numbered list of events with waiting readers."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._dropped = 0
        self._changed = threading.Condition()
        self._closed = False

    def publish(self, event: dict[str, Any]) -> None:
        """Append an event and wake the readers; only the newest 10 000 are kept."""
        with self._changed:
            self._events.append(event)
            excess = len(self._events) - KEEP
            if excess > 0:
                del self._events[:excess]
                self._dropped += excess
            self._changed.notify_all()

    @property
    def published(self) -> int:
        """Number of the last event."""
        with self._changed:
            return self._last()

    def close(self) -> None:
        """No more events: wake the readers for good."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> tuple[int, list[dict[str, Any]]]:
        """(number of the last event, events after `number`); waits up to `timeout_s` when there is none yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._last() > number, timeout=timeout_s)
            start = max(0, number - self._dropped)
            return self._last(), self._events[start:]

    def _last(self) -> int:
        return self._dropped + len(self._events)


_feed: EventFeed | None = None


def current_feed() -> EventFeed | None:
    """The feed of this process, None when nobody listens."""
    return _feed


def notice(text: str) -> None:
    """A line for the user's terminal; into the log where nobody listens."""
    if _feed is None:
        logger.info(text)
    else:
        _feed.publish({"type": "notice", "text": text})


def install_feed(feed: EventFeed | None) -> None:
    """Make `feed` the one of this process."""
    global _feed
    _feed = feed
