"""The segments of one storage unit: who writes where, what lives there, and what is used anew.

```
free --lease--> lent to a writer --seal--> sealed --last block freed, last view ended--> free --idle--> given back
```

A writer is a client of the same machine, which fills its segment without asking, or the unit itself, for blocks that
come in messages. Only at the seal the unit learns which blocks a segment holds.

Invariants
    - A segment is used anew only when it is sealed, every block of it was freed, and no reader has views of it.
    - A writer that is gone leaves no segment behind: the controller names its committed blocks (`abandon`), and the
      rest is free.
    - When there is no memory to be had, `lease` says so and the caller does without; nothing here fails half-way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlflow.transfer_queue.block import aligned
from rlflow.transfer_queue.segment import HEADER_BYTES, Segment

logger = logging.getLogger(__name__)

# (number of the segment's open file in the unit's process, serial of the use, place in the file, bytes)
Extent = tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Lease:
    """A segment lent to a writer."""

    fd: int
    number: int
    serial: int
    nbytes: int


@dataclass(slots=True)
class _Held:
    segment: Segment
    writer: str
    sealed: bool = False
    live: set[str] = field(default_factory=set)


class Arena:
    """See the module's docstring. Safe to call from any thread.

    Args:
        nonce: 16 random bytes that its segments carry.
        idle_s: seconds until the memory of a free segment is given back.
        limit: bytes that all segments may have together; None: as much as the machine gives.
    """

    def __init__(self, nonce: bytes, idle_s: float, limit: int | None = None) -> None:
        self._nonce = nonce
        self._idle_s = idle_s
        self._limit = limit
        self._lock = threading.RLock()
        self._held: dict[int, _Held] = {}  # by serial: lent, sealed, or freed but still viewed
        self._free: list[tuple[float, Segment]] = []  # (since when, segment)
        self._places: dict[str, tuple[int, ...]] = {}  # block -> the sealed segments that it is (or may be) in
        self._early: dict[str, set[str]] = {}  # writer -> blocks freed before their segment was sealed
        self._numbers = 0
        self._serials = 0
        self._own: Cursor | None = None
        self._own_blocks: dict[str, None] = {}
        self._told = False

    # -- writing -----------------------------------------------------------------------------------

    def lease(self, writer: str, nbytes: int) -> Lease | None:
        """Lend a segment of at least `nbytes` to a writer; None when there is no memory for it."""
        with self._lock:
            segment = self._take_free(nbytes) or self._make(nbytes)
            if segment is None:
                return None
            self._serials += 1
            segment.start(self._serials)
            self._held[segment.serial] = _Held(segment, writer)
            return Lease(segment.fd, segment.number, segment.serial, segment.nbytes)

    def _take_free(self, nbytes: int) -> Segment | None:
        self._retire_dead()
        # A segment more than four times too large would mostly be empty.
        fitting = [i for i, (_, segment) in enumerate(self._free) if nbytes <= segment.nbytes <= 4 * nbytes]
        if not fitting:
            return None
        return self._free.pop(min(fitting, key=lambda i: (self._free[i][1].nbytes, -i)))[1]

    def _make(self, nbytes: int) -> Segment | None:
        if self._limit is not None:
            self._trim_to(self._limit - nbytes)
            if self._bytes() + nbytes > self._limit:
                self._tell(f"the limit of {self._limit} bytes is reached")
                return None
        self._numbers += 1
        try:
            return Segment(self._nonce, self._numbers, nbytes)
        except (OSError, AttributeError) as error:  # AttributeError: a system without memfd
            self._tell(str(error))
            return None

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            logger.warning("no more shared memory for the table (%s); further data goes through messages", why)

    def write(self, block_id: str, nbytes: int) -> tuple[Extent, np.ndarray] | None:
        """Room for a block that the unit itself writes: its extent and its memory; None when there is none."""
        with self._lock:
            if self._own is None or not self._own.fits(nbytes):
                self._seal_own()
                lease = self.lease("", segment_bytes(nbytes, 0))
                if lease is None:
                    return None
                self._own = Cursor(lease)
            extent = self._own.take(nbytes)
            self._own_blocks[block_id] = None
            return extent, self._held[self._own.lease.serial].segment.bytes_at(extent[2], nbytes)

    def _seal_own(self) -> None:
        if self._own is not None:
            self.seal(self._own.lease.serial, [*self._own_blocks], "")
            self._own, self._own_blocks = None, {}

    def seal(self, serial: int, block_ids: Sequence[str], writer: str) -> None:
        """The writer of a lent segment is done with it: these are the blocks in it."""
        with self._lock:
            held = self._held.get(serial)
            if held is None or held.sealed or held.writer != writer:
                return  # it was taken from a writer that was thought to be gone
            held.sealed = True
            early = self._early.get(writer, set())
            for block_id in block_ids:
                if block_id in early:
                    early.discard(block_id)
                    continue
                held.live.add(block_id)
                self._places[block_id] = (*self._places.get(block_id, ()), serial)
            self._forget_early(writer)
            if not held.live:
                self._retire(serial)

    def _forget_early(self, writer: str) -> None:
        if not any(held.writer == writer and not held.sealed for held in self._held.values()):
            self._early.pop(writer, None)

    # -- reading -----------------------------------------------------------------------------------

    def read(self, extent: Extent) -> np.ndarray | None:
        """The bytes of a block, read-only; None when its segment is used anew."""
        _, serial, offset, nbytes = extent
        with self._lock:
            held = self._held.get(serial)
            if held is None:
                return None
            data = held.segment.bytes_at(offset, nbytes)
            data.flags.writeable = False
            return data

    # -- freeing -----------------------------------------------------------------------------------

    def free(self, block_ids: Iterable[str]) -> None:
        """These blocks have no cell any more; unknown ones are ignored."""
        with self._lock:
            for block_id in block_ids:
                serials = self._places.pop(block_id, None)
                if serials is None:
                    writer = "" if block_id in self._own_blocks else block_id.partition(":")[0]
                    self._early.setdefault(writer, set()).add(block_id)
                    continue
                for serial in serials:
                    held = self._held[serial]
                    held.live.discard(block_id)
                    if not held.live:
                        self._retire(serial)
            if self._own is not None and self._early.get("", set()) >= self._own_blocks.keys():
                self._seal_own()
            for writer in self._early.keys() - self.writers() - {""}:
                del self._early[writer]

    def _retire(self, serial: int) -> None:
        held = self._held[serial]
        if held.segment.retire():
            del self._held[serial]
            self._free.append((time.monotonic(), held.segment))

    def _retire_dead(self) -> None:
        for serial in [serial for serial, held in self._held.items() if held.sealed and not held.live]:
            self._retire(serial)

    def abandon(self, writer: str, live: Iterable[str]) -> None:
        """A writer is gone; `live` are its blocks with cells. Which lie in its unsealed segments only it knew."""
        with self._lock:
            unsealed = [serial for serial, held in self._held.items() if held.writer == writer and not held.sealed]
            unknown = [block_id for block_id in live if block_id not in self._places]
            for serial in unsealed:
                self.seal(serial, unknown, writer)

    def writers(self) -> set[str]:
        """Writers that hold a segment, but for the unit itself."""
        with self._lock:
            return {held.writer for held in self._held.values() if not held.sealed} - {""}

    # -- memory ------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Give back the memory of segments that were free for long, and take in those whose last view has ended."""
        with self._lock:
            self._retire_dead()
            limit = time.monotonic() - self._idle_s
            kept = []
            for since, segment in self._free:
                if since > limit:
                    kept.append((since, segment))
                else:
                    segment.close()
            self._free = kept

    def _trim_to(self, nbytes: int) -> None:
        while self._free and self._bytes() > nbytes:
            self._free.pop(0)[1].close()

    def _bytes(self) -> int:
        segments = [held.segment for held in self._held.values()] + [segment for _, segment in self._free]
        return sum(segment.nbytes for segment in segments)

    def stats(self) -> dict[str, int]:
        """`segments`, their bytes, and the bytes of those that wait for views to end."""
        with self._lock:
            self._retire_dead()
            pinned = [held.segment.nbytes for held in self._held.values() if held.sealed and not held.live]
            return {
                "segments": len(self._held) + len(self._free),
                "segment_bytes": self._bytes(),
                "free_bytes": sum(segment.nbytes for _, segment in self._free),
                "pinned_bytes": sum(pinned),
            }


# -- filling a segment -----------------------------------------------------------------------------

_SMALLEST = 1 << 20
_LARGEST = 32 << 20


def segment_bytes(nbytes: int, number: int) -> int:
    """Size of a writer's next segment: from 1 MiB, doubling up to 32 MiB with each one it has had, or what it needs."""
    size = min(_LARGEST, _SMALLEST << min(number, 5))
    while size < nbytes and size < _LARGEST:
        size *= 2
    if size >= nbytes:
        return size
    step = 1 << max(0, nbytes.bit_length() - 3)  # sizes in steps of an eighth to a quarter, so that they recur
    return -(-nbytes // step) * step


class Cursor:
    """Where the next block goes in a lent segment."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self._next = HEADER_BYTES

    @property
    def left(self) -> int:
        """Bytes not yet taken."""
        return HEADER_BYTES + self.lease.nbytes - self._next

    def fits(self, nbytes: int) -> bool:
        """Whether a block of `nbytes` has room."""
        return nbytes <= self.left

    def take(self, nbytes: int) -> Extent:
        """Take the room for a block."""
        extent = (self.lease.fd, self.lease.serial, self._next, nbytes)
        self._next = aligned(self._next + nbytes)
        return extent
