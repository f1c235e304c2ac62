"""Which rollout server gets a request.

Invariants
    - Load is tokens in flight (prompt plus the most that may be generated), so one long request outweighs many short.
    - All calls of one conversation (`request_id`) go to one server while it is there.
    - A lease that its client does not give back, because it died, expires.
    - An announced session has its server from the announcement to its end, whatever the load: each server gets a
      contiguous block of an announcement, so that the sessions of a prompt share its prefill.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger(__name__)


class GlobalRequestLoadBalancer:
    """Chooses the server of each request. Runs as a Ray actor; every method is short and synchronous.

    Args:
        servers: handle by server id, in order of preference among equals.
        max_cache_size: conversations whose server is remembered (least recently used are forgotten).
    """

    def __init__(self, servers: dict[str, Any], max_cache_size: int = 10000) -> None:
        self._servers = dict(servers)
        self._max_cache_size = max_cache_size
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._announced: dict[str, str] = {}
        self._leases: OrderedDict[str, tuple[str, int, float]] = OrderedDict()  # id -> (server, tokens, expiry)
        self._tokens: Counter[str] = Counter()

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
            raise RuntimeError("No available servers in load balancer")
        server_id = self._announced.get(request_id) or self._sticky.get(request_id)
        if server_id not in self._servers:
            server_id = min(self._servers, key=lambda s: self._tokens[s])  # the first among equals
        assert server_id is not None
        self._sticky[request_id] = server_id
        self._sticky.move_to_end(request_id)
        while len(self._sticky) > self._max_cache_size:
            self._sticky.popitem(last=False)
        self._leases[lease_id or f"anonymous-{uuid.uuid4().hex}"] = (server_id, tokens, time.monotonic() + lease_s)
        self._tokens[server_id] += tokens
        return server_id, self._servers[server_id]

    def announce_sessions(self, sessions: Sequence[str]) -> dict[str, tuple[Any, list[str]]]:
        """Divide sessions that are about to begin among the servers: {server id: (handle, its sessions)}, all servers.

        Raises:
            RuntimeError: no server is left.
        """
        if not self._servers:
            raise RuntimeError("No available servers in load balancer")
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

    def release_server(self, server_id: str, lease_id: str | None = None) -> None:
        """Give a lease back; without `lease_id` the oldest one of that server. Unknown ones are ignored."""
        if lease_id is None:
            lease_id = next((key for key, lease in self._leases.items() if lease[0] == server_id), None)
        lease = self._leases.pop(lease_id, None) if lease_id is not None else None
        if lease is not None:
            self._subtract(lease[0], lease[1])

    def add_servers(self, servers: dict[str, Any]) -> None:
        """Add servers; one that is already there keeps its load."""
        self._servers.update(servers)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        """Send nothing more to these servers; leases that run on them end as usual."""
        for server_id in server_ids:
            self._servers.pop(server_id, None)

    def get_all_servers(self) -> dict[str, Any]:
        """Handle by server id."""
        return dict(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        """Requests that run on a server."""
        return sum(lease[0] == server_id for lease in self._leases.values())

    def get_total_inflight(self) -> int:
        """Requests that run anywhere."""
        return len(self._leases)

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
