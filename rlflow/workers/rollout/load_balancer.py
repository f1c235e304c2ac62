"""Which rollout server gets a request.

Invariants
    - Load is tokens in flight (prompt plus the most that may be generated), so one long request outweighs many short.
    - All calls of one conversation (`request_id`) go to one server while it is there.
    - A lease that its client does not give back, because it died, expires.
    - An announced session has its server from the announcement to its end, whatever the load: each server gets a
      contiguous block of an announcement, so that the sessions of a prompt share its prefill.
    - A server id names one life of a server: one that was started again comes back under another id, so that a late
      report about the dead one does not hit its successor.
    - Under full determinism the load decides nothing, because it depends on when requests arrive: conversations nobody
      announced are spread by their name.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

NO_SERVERS = "No available servers in load balancer"


@dataclass(frozen=True)
class Ask:
    """A request for a server: its conversation, tokens (prompt + new), lease, and whether it would rather wait."""

    conversation: str
    tokens: int
    lease_id: str
    lease_s: float
    patient: bool = False


@dataclass(frozen=True)
class Leases:
    """Answer to several asks.

    Fields:
        servers: server id of each ask; None where there is no server.
        hope: a server may come, so that asking again after `wait_for_servers` makes sense.
        reason: why there is none, where it is known.
        epoch: number of the present set of servers.
        handles: all servers; None when the asker's `epoch` is still right.
    """

    servers: list[str | None]
    hope: bool
    reason: str
    epoch: int
    handles: dict[str, Any] | None


class GlobalRequestLoadBalancer:
    """Chooses the server of each request. Runs as an asyncio Ray actor; whatever does not wait is short.

    Args:
        servers: handle by server id, in order of preference among equals.
        max_cache_size: conversations whose server is remembered (least recently used are forgotten).
        full_determinism: choose by name instead of by load.
    """

    def __init__(self, servers: dict[str, Any], max_cache_size: int = 10000, full_determinism: bool = False) -> None:
        self._servers = dict(servers)
        self._max_cache_size = max_cache_size
        self._by_name = full_determinism
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._announced: dict[str, str] = {}
        self._leases: OrderedDict[str, tuple[str, int, float]] = OrderedDict()  # id -> (server, tokens, expiry)
        self._tokens: Counter[str] = Counter()
        self._epoch = 0
        self._hope, self._reason = False, ""
        self._reports: list[str] = []
        self._reissued = 0
        self._event = asyncio.Event()

    # --- leases ---------------------------------------------------------------------------------------------------

    def acquire_server(
        self, request_id: str, tokens: int = 1, lease_id: str | None = None, lease_s: float = 3600.0
    ) -> tuple[str, Any]:
        """Lease a server for a request of `tokens` tokens (prompt + new): (server id, handle).

        The conversation's (or announced session's) server if it is still there, else the one with the fewest tokens in
        flight.

        Raises:
            RuntimeError: no server is left.
        """
        self._expire()
        if not self._servers:
            raise RuntimeError(f"{NO_SERVERS}{self._reason and ': '}{self._reason}")
        server_id = self._lease(Ask(request_id, tokens, lease_id or f"anonymous-{uuid.uuid4().hex}", lease_s))
        return server_id, self._servers[server_id]

    def lease_many(self, asks: Sequence[Ask], epoch: int = -1) -> Leases:
        """`acquire_server` for several requests at once; without a server the answer says whether to wait.

        Args:
            epoch: of the handles that the asker knows.
        """
        self._expire()
        known = epoch == self._epoch
        servers = [self._lease(ask) if self._servers else None for ask in asks]
        return Leases(servers, self._hope, self._reason, self._epoch, None if known else dict(self._servers))

    def give_back(self, lease_ids: Sequence[str]) -> None:
        """These requests ended. Unknown ones are ignored."""
        for lease_id in lease_ids:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._subtract(lease[0], lease[1])

    def release_server(self, server_id: str, lease_id: str | None = None) -> None:
        """Give a lease back; without `lease_id` the oldest one of that server. Unknown ones are ignored."""
        if lease_id is None:
            lease_id = next((key for key, lease in self._leases.items() if lease[0] == server_id), None)
        if lease_id is not None:
            self.give_back([lease_id])

    def _lease(self, ask: Ask) -> str:
        server_id = self._announced.get(ask.conversation) or self._sticky.get(ask.conversation)
        if server_id not in self._servers:
            server_id = self._choose(ask.conversation)
        assert server_id is not None
        self._sticky[ask.conversation] = server_id
        self._sticky.move_to_end(ask.conversation)
        while len(self._sticky) > self._max_cache_size:
            self._sticky.popitem(last=False)
        self._leases[ask.lease_id] = (server_id, ask.tokens, time.monotonic() + ask.lease_s)
        self._tokens[server_id] += ask.tokens
        return server_id

    def _choose(self, conversation: str) -> str:
        if self._by_name:  # a checksum, because Python's hash of a text differs between processes
            return list(self._servers)[zlib.crc32(conversation.encode()) % len(self._servers)]
        return min(self._servers, key=lambda s: self._tokens[s])  # the first among equals

    # --- sessions -------------------------------------------------------------------------------------------------

    def announce_sessions(self, sessions: Sequence[str]) -> dict[str, tuple[Any, list[str]]]:
        """Divide sessions that are about to begin among the servers: {server id: (handle, its sessions)}, all servers.

        Raises:
            RuntimeError: no server is left.
        """
        if not self._servers:
            raise RuntimeError(f"{NO_SERVERS}{self._reason and ': '}{self._reason}")
        ids = list(self._servers)
        parts: dict[str, list[str]] = {server_id: [] for server_id in ids}
        for place, session in enumerate(sessions):
            server_id = ids[place * len(ids) // len(sessions)]
            parts[server_id].append(session)
            self._announced[session] = server_id
        return {server_id: (self._servers[server_id], part) for server_id, part in parts.items()}

    def end_session(self, session: str) -> None:
        """An announced session is over; its server is told. Unknown ones are ignored."""
        server = self._servers.get(self._announced.pop(session, ""))
        if server is not None:
            server.end_session.remote(session)

    # --- who is there ---------------------------------------------------------------------------------------------

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Add servers; one that is already there keeps its load."""
        self._servers.update(servers)
        self._changed()

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Send nothing more to these servers; leases that run on them end as usual."""
        for server_id in server_ids:
            self._servers.pop(server_id, None)
        self._changed()

    def report_dead(self, server_id: str) -> None:
        """A client found that this server's process is gone, and asks its request anew elsewhere."""
        self._reissued += 1
        if server_id in self._servers:
            self._reports.append(server_id)
            self.remove_servers([server_id])

    def set_hope(self, hope: bool, reason: str = "") -> None:
        """Whether requests without a server wait for one, because somebody starts servers again; if not, why."""
        self._hope, self._reason = hope, reason
        self._changed()

    async def wait_for_servers(self, timeout_s: float, patient: bool = False) -> bool:
        """Wait until there is a server, or (unless `patient`) no hope of one. False when the time is over first."""
        return await self._until(lambda: bool(self._servers) or not (self._hope or patient), timeout_s)

    async def wait_for_reports(self, after: int, timeout_s: float) -> list[str]:
        """Ids of servers that clients reported dead, beginning with report number `after`; waits for the first."""
        await self._until(lambda: len(self._reports) > after, timeout_s)
        return self._reports[after:]

    def _changed(self) -> None:
        self._epoch += 1
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def _until(self, fulfilled: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not fulfilled():
                    await self._event.wait()
        except TimeoutError:
            return fulfilled()
        return True

    # --- facts ----------------------------------------------------------------------------------------------------

    def get_all_servers(self) -> dict[str, Any]:
        """Handle by server id."""
        return dict(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        """Requests that run on a server."""
        return sum(lease[0] == server_id for lease in self._leases.values())

    def get_total_inflight(self) -> int:
        """Requests that run anywhere."""
        return len(self._leases)

    def get_reissued(self) -> int:
        """Requests that were asked anew because their server died, since the start."""
        return self._reissued

    def get_status(self) -> dict[str, dict[str, int]]:
        """Requests and tokens in flight by server id."""
        counts = Counter(lease[0] for lease in self._leases.values())
        return {s: {"requests": counts[s], "tokens": self._tokens[s]} for s in self._servers}

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget which conversation belongs where."""
        count = len(self._sticky)
        self._sticky.clear()
        return {"cleared_entries": count, "server_loads": {s: self._tokens[s] for s in self._servers}}

    def _subtract(self, server_id: str, tokens: int) -> None:
        self._tokens[server_id] -= tokens
        if self._tokens[server_id] <= 0:
            del self._tokens[server_id]

    def _expire(self) -> None:
        # Leases are ordered by begin; with one timeout for all of a run that is the order of expiry as well.
        now = time.monotonic()
        while self._leases:
            lease_id, (server_id, tokens, expiry) = next(iter(self._leases.items()))
            if expiry > now:
                return
            logger.warning("lease %s on %s was never given back: its client is gone", lease_id, server_id)
            del self._leases[lease_id]
            self._subtract(server_id, tokens)
