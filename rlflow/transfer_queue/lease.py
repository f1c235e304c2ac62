"""Where a client writes its blocks: the segments that the storage units of its machine have lent it.

Small blocks go one after the other into a current segment, whose successor is asked for before it is full and comes
from the next unit. A large block gets a segment of its own. Mappings are kept, because units lend the same segments
again.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from rlflow.transfer_queue.arena import Cursor, Extent, Lease, segment_bytes
from rlflow.transfer_queue.segment import UnitAddress, map_for_writing

# A block of this size costs more to copy than a segment of its own costs to ask for.
OWN_SEGMENT_BYTES = 16 << 20
_MAPPINGS = 32


class Slot(NamedTuple):
    """Room for one block."""

    unit: int
    extent: Extent
    target: np.ndarray


class Request(NamedTuple):
    """A call for a segment, under way."""

    unit: int
    started: Any


class Sealed(NamedTuple):
    """A segment to give back, and the blocks in it."""

    unit: int
    serial: int
    block_ids: list[str]


class Tenant:
    """A client's segments. Safe to use from any thread; nothing here waits for a message."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._request: Request | None = None  # for whoever needs the next segment first
        self._unit = -1
        self._cursor: Cursor | None = None
        self._mapping: mmap.mmap | None = None
        self._blocks: list[str] = []
        self._leases = 0
        self._mappings: OrderedDict[tuple[bytes, int], mmap.mmap] = OrderedDict()
        self._refused_until = 0.0
        self._used = time.monotonic()

    def take(self, block_id: str, nbytes: int) -> Slot | None:
        """Room in the current segment; None when it has not enough."""
        with self._lock:
            self._used = time.monotonic()
            if self._cursor is None or self._mapping is None or not self._cursor.fits(nbytes):
                return None
            extent = self._cursor.take(nbytes)
            self._blocks.append(block_id)
            return _slot(self._unit, extent, self._mapping)

    def take_whole(self, unit: int, address: UnitAddress, lease: Lease, nbytes: int) -> Slot:
        """Room in a segment that is for one block; `SegmentGoneError` when it cannot be mapped."""
        with self._lock:
            self._used = time.monotonic()
        return _slot(unit, Cursor(lease).take(nbytes), self._map(address, lease))

    def _map(self, address: UnitAddress, lease: Lease) -> mmap.mmap:
        key = (address.nonce, lease.number)
        with self._lock:
            mapping = self._mappings.get(key)
        if mapping is None:
            mapping = map_for_writing(address, lease.fd, lease.number, lease.serial)
        with self._lock:
            self._mappings[key] = mapping
            self._mappings.move_to_end(key)
            if len(self._mappings) > _MAPPINGS:
                self._mappings.popitem(last=False)
        return mapping

    # -- the next segment --------------------------------------------------------------------------

    def request(self, nbytes: int, start: Any) -> Request:
        """The call for the next segment: the one under way, or a new one, made by `start(bytes)`."""
        with self._lock:
            if self._request is None:
                self._request = start(segment_bytes(nbytes, self._leases))
            return self._request

    def running_low(self) -> bool:
        """Whether to ask for the next segment now."""
        with self._lock:
            cursor = self._cursor
            return self._request is None and cursor is not None and cursor.left < cursor.lease.nbytes // 4

    def adopt(self, request: Request, address: UnitAddress, lease: Lease) -> Sealed | None:
        """The answer to a request: the lent segment becomes the current one. Returns the one before it.

        Raises:
            SegmentGoneError: the segment cannot be mapped.
        """
        with self._lock:
            if self._request is not request:
                return None  # another thread was faster
            self._request = None
            mapping = self._map(address, lease)
            sealed = self._seal()
            self._leases += 1
            self._unit, self._cursor, self._mapping = request.unit, Cursor(lease), mapping
            return sealed

    def drop(self, request: Request) -> bool:
        """A request came to nothing; False when somebody else has seen to it."""
        with self._lock:
            if self._request is not request:
                return False
            self._request = None
            return True

    def _seal(self) -> Sealed | None:
        if self._cursor is None:
            return None
        sealed = Sealed(self._unit, self._cursor.lease.serial, self._blocks)
        self._cursor, self._mapping, self._blocks = None, None, []
        return sealed

    # -- doing without -----------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        """There was no memory a moment ago."""
        return time.monotonic() < self._refused_until

    def refuse(self, seconds: float) -> None:
        """Do not ask for memory for a while."""
        self._refused_until = time.monotonic() + seconds

    def forget(self, unit: int) -> None:
        """A unit is gone, and its segments with it."""
        with self._lock:
            if self._unit == unit:
                self._seal()
            if self._request is not None and self._request.unit == unit:
                self._request = None

    def leave(self, idle_s: float) -> tuple[Sealed | None, Request | None]:
        """After `idle_s` without a block: the segment to give back, and the request that may bring another one."""
        with self._lock:
            if time.monotonic() - self._used < idle_s:
                return None, None
            request, self._request = self._request, None
            self._leases = 0
            self._mappings.clear()
            return self._seal(), request


def _slot(unit: int, extent: Extent, mapping: mmap.mmap) -> Slot:
    return Slot(unit, extent, np.frombuffer(mapping, np.uint8, extent[3], extent[2]))
