"""Which waiting request joins the running batch next.

    FirstCome    whoever came first, as soon as a slot is free
    Rounds       in the order in which sessions were announced, round by round (`rollout.full_determinism`)

The last bits of a forward depend on which rows it is computed with. `Rounds` makes the rows of every forward a function
of the sessions and of what they generate, never of the time at which a request arrives:

    gather    requests wait until each announced session has one here, or has ended
    run       they join in order as slots become free; later requests wait for the next round

Invariants
    - A round holds the requests that were here when it opened, and opens only on an empty batch.
    - Order is (place of the session in its announcement, turn of the session). Requests of no announced session come
      last, by name, and nobody waits for them.
    - A session is waited for from its announcement to its end. Who announces must see to it that every session ends;
      a request's own deadline bounds the wait all the same.

All methods are called under the engine's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from rlflow.workers.rollout.hf.batch import Request

_SHOWN = 5


class Admission(Protocol):
    """The waiting requests of an engine; iterating and `len` cover all of them."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...

    def add(self, request: Request) -> None:
        """A request arrived."""
        ...

    def ready(self, running: int) -> bool:
        """Whether a request may join a batch in which `running` requests are."""
        ...

    def next(self) -> Request:
        """Take the request that joins; only after `ready`."""
        ...

    def discard(self, gone: Collection[Request]) -> None:
        """These requests ended without having run."""
        ...

    def announce(self, sessions: Sequence[str], keep: Collection[str]) -> None:
        """Expect requests of these sessions, in this order, and of older ones only if their uid is in `keep`."""
        ...

    def end_session(self, session: str) -> None:
        """This session makes no more requests."""
        ...

    def awaited(self) -> str:
        """For messages: what the waiting requests wait for, besides a free slot; "" when that is all."""
        ...


class FirstCome:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def ready(self, running: int) -> bool:
        return bool(self._requests)

    def next(self) -> Request:
        return self._requests.popleft()

    def discard(self, gone: Collection[Request]) -> None:
        ids = {id(request) for request in gone}
        self._requests = deque(request for request in self._requests if id(request) not in ids)

    def announce(self, sessions: Sequence[str], keep: Collection[str]) -> None:
        """Nobody is waited for."""

    def end_session(self, session: str) -> None:
        """Nobody is waited for."""

    def awaited(self) -> str:
        return ""


class Rounds:
    """See the module."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}  # of the sessions that live
        self._announced = 0
        self._missing: set[str] = set()  # live sessions without a request in `_gathered`
        self._gathered: list[Request] = []
        self._round: deque[Request] = deque()

    def __iter__(self) -> Iterator[Request]:
        yield from self._round
        yield from self._gathered

    def __len__(self) -> int:
        return len(self._round) + len(self._gathered)

    def add(self, request: Request) -> None:
        self._gathered.append(request)
        self._missing.discard(request.session)

    def ready(self, running: int) -> bool:
        if not self._round and not running and self._gathered and not self._missing:
            self._round.extend(sorted(self._gathered, key=self._order))
            self._gathered = []
            self._missing = set(self._places)
        return bool(self._round)

    def _order(self, request: Request) -> tuple[int, str, int, str]:
        place = self._places.get(request.session, self._announced)
        return place, request.session, request.turn, request.request_id

    def next(self) -> Request:
        return self._round.popleft()

    def discard(self, gone: Collection[Request]) -> None:
        ids = {id(request) for request in gone}
        self._round = deque(request for request in self._round if id(request) not in ids)
        self._gathered = [request for request in self._gathered if id(request) not in ids]
        self._missing = self._places.keys() - {request.session for request in self._gathered}

    def announce(self, sessions: Sequence[str], keep: Collection[str]) -> None:
        kept = set(keep)
        self._places = {name: place for name, place in self._places.items() if uid_of(name) in kept}
        for name in sessions:
            self._places.setdefault(name, self._announced)
            self._announced += 1
        self._missing = self._places.keys() - {request.session for request in self._gathered}

    def end_session(self, session: str) -> None:
        self._places.pop(session, None)
        self._missing.discard(session)

    def awaited(self) -> str:
        if not self._missing or not self._gathered:
            return ""
        names = sorted(self._missing, key=self._places.__getitem__)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"a request or the end of session {', '.join(names[:_SHOWN])}{more} (rollout.full_determinism)"


def uid_of(session: str) -> str:
    """The prompt of a session `{uid}_{number}`."""
    return session.rsplit("_", 1)[0]
