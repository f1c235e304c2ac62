"""The client's side of `SimpleStorage`; see `storage_simple`."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlflow.transfer_queue.arena import Lease, segment_bytes
from rlflow.transfer_queue.block import BlockView, Draft
from rlflow.transfer_queue.column import Column
from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.transfer_queue.lease import OWN_SEGMENT_BYTES, Request, Sealed, Slot, Tenant
from rlflow.transfer_queue.ports import RayPort, offload
from rlflow.transfer_queue.reading import ask_for, merge, open_segments
from rlflow.transfer_queue.segment import SegmentGoneError, UnitAddress
from rlflow.transfer_queue.storage import Cells, DataParser, Place, StorageClient, UnitGoneError, Written
from rlflow.transfer_queue.storage_unit import start_of_process

logger = logging.getLogger(__name__)

# After a refusal: seconds until memory is asked for again; and when memory that was lent cannot be seen from here.
_PAUSE_S, _LONG_PAUSE_S = 1.0, 3600.0
# A copy of more bytes than this leaves the event loop.
_BESIDE_BYTES = 1 << 20


class SimpleStorageClient(StorageClient):
    """Writes and reads the segments of the units of this machine, and asks all others.

    Args:
        endpoint: {"units": actor handles, "idle_s": seconds after which lent segments go back unused}.
        timeout_s: deadline of a call.
        writer: name of the client; its block ids begin with it.
    """

    def __init__(self, endpoint: Mapping[str, Any], timeout_s: float, writer: str) -> None:
        import ray

        self._timeout_s = timeout_s
        self._plain_ports: list[RayPort] = []
        self._ports = self._plain_ports
        self._writer = writer
        self._pid = os.getpid()
        self._process = self._pid, start_of_process(self._pid)
        self._node = ray.get_runtime_context().get_node_id()
        self._addresses: dict[int, tuple[UnitAddress, bool]] = {}
        self._lost: set[int] = set()
        self._meeting = threading.Lock()
        self._tenant = Tenant()
        self._turn = itertools.count(int.from_bytes(os.urandom(2)))  # so that writers spread over the units
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="transfer-queue-copy")
        self._left = threading.Event()
        self._keeper: list[threading.Thread] = []
        self._idle_s = float(endpoint["idle_s"])
        self.meet(endpoint)

    def blocking(self) -> SimpleStorageClient:
        twin = copy.copy(self)  # shares everything but the ports
        twin._ports = [port.blocking() for port in self._ports]
        return twin

    # -- the units ---------------------------------------------------------------------------------

    def knows(self, blocks: Sequence[Place]) -> bool:
        return all(unit < len(self._plain_ports) for unit, _, _ in blocks)

    def meet(self, endpoint: Mapping[str, Any]) -> None:
        with self._meeting:  # threads that append what others have appended would shift the numbers
            for number in range(len(self._plain_ports), len(endpoint["units"])):
                handle = endpoint["units"][number]
                self._plain_ports.append(RayPort(handle, f"TransferQueue storage unit {number}", self._timeout_s))

    async def _meet(self) -> None:
        """Ask each unit once who it is."""
        if os.getpid() != self._pid:
            raise QueueUnavailableError(
                f"this client belongs to process {self._pid}; a forked child must connect to Ray and the table itself"
            )
        if len(self._ports) < len(self._plain_ports):  # of the blocking twin
            with self._meeting:
                self._ports.extend([port.blocking() for port in self._plain_ports[len(self._ports) :]])
        if len(self._addresses.keys() | self._lost) >= len(self._ports):
            return
        strange = [unit for unit in range(len(self._ports)) if unit not in self._addresses and unit not in self._lost]
        calls = {unit: self._ports[unit].call("describe") for unit in strange}
        for unit, call in calls.items():
            try:
                address, lends = await call
            except QueueUnavailableError as error:
                raise self._gone(unit, error) from error
            self._addresses[unit] = UnitAddress(*address), lends

    def _gone(self, unit: int, error: QueueUnavailableError) -> QueueUnavailableError:
        """The error to raise when a call to a unit has failed."""
        if not self._ports[unit].gone:
            return error
        self.forget_unit(unit)
        return UnitGoneError(str(error), unit)

    def forget_unit(self, unit: int) -> None:
        self._lost.add(unit)
        self._tenant.forget(unit)

    def _is_near(self, unit: int) -> bool:
        return self._addresses[unit][0].node == self._node

    def _next_unit(self) -> int:
        living = [unit for unit in tuple(self._addresses) if unit not in self._lost]
        if not living:
            raise QueueUnavailableError(
                f"all {len(self._ports)} storage units of the table are gone; their processes died. See the logs of "
                "Ray's workers; close the table and start anew, from a checkpoint if there is one"
            )
        near = [unit for unit in living if self._is_near(unit)]
        return (near or living)[next(self._turn) % len(near or living)]

    # -- writing -----------------------------------------------------------------------------------

    async def write(self, block_id: str, columns: Mapping[str, Column], parser: DataParser | None) -> Written:
        await self._meet()
        draft = Draft(columns)
        if parser is None and not self._tenant.refused and any(map(self._lends, tuple(self._addresses))):
            own = draft.nbytes >= OWN_SEGMENT_BYTES
            written = await (self._write_own if own else self._write_current)(block_id, draft)
            if written is not None:
                return written
        return await self._send(block_id, draft, parser)

    def _lends(self, unit: int) -> bool:
        return unit not in self._lost and self._addresses[unit][1] and self._is_near(unit)

    def _ask(self, nbytes: int) -> Request:
        unit = self._next_unit()
        self._keep_house()
        return Request(unit, self._ports[unit].start("lease", self._writer, self._process, nbytes))

    async def _answer(self, request: Request) -> Lease | None:
        try:
            return await self._ports[request.unit].finish(request.started, "lease")
        except QueueUnavailableError as error:
            raise self._gone(request.unit, error) from error

    async def _write_current(self, block_id: str, draft: Draft) -> Written | None:
        """Write to the current segment, or to the next one."""
        tenant = self._tenant
        while (slot := tenant.take(block_id, draft.nbytes)) is None:
            request = tenant.request(draft.nbytes, self._ask)
            try:
                lease = await self._answer(request)
            except Exception:
                # Not for ever the same unit that does not answer.
                if tenant.drop(request):
                    self._return_unused(request)
                raise
            if lease is None:
                tenant.drop(request)
                tenant.refuse(_PAUSE_S)
                return None
            try:
                sealed = tenant.adopt(request, self._addresses[request.unit][0], lease)
            except SegmentGoneError as error:
                self._cannot_see(request.unit, lease, error)
                return None
            self._give_back(sealed)
        if tenant.running_low():
            tenant.request(draft.nbytes, self._ask)
        return await self._fill(slot.unit, block_id, draft, lambda: slot)

    async def _write_own(self, block_id: str, draft: Draft) -> Written | None:
        """Write to a segment of its own."""
        request = self._ask(segment_bytes(draft.nbytes, 0))
        try:
            lease = await self._answer(request)
        except BaseException:
            self._return_unused(request)
            raise
        if lease is None:
            self._tenant.refuse(_PAUSE_S)
            return None
        unit, address = request.unit, self._addresses[request.unit][0]
        self._give_back(Sealed(unit, lease.serial, [block_id]))
        try:
            return await self._fill(
                unit, block_id, draft, lambda: self._tenant.take_whole(unit, address, lease, draft.nbytes)
            )
        except SegmentGoneError as error:
            self._cannot_see(unit, lease, error)
            return None

    async def _fill(self, unit: int, block_id: str, draft: Draft, slot: Callable[[], Slot]) -> Written:
        """Copy a block to its place; a copy that is not wanted any more gives its place back when it has ended."""

        def copy_block() -> Written:
            place = slot()
            draft.write(place.target)
            return Written(unit, place.extent)

        if self._ports[unit].is_blocking or draft.nbytes <= _BESIDE_BYTES:
            try:
                return copy_block()
            except BaseException:
                self.discard(unit, block_id)
                raise
        work = self._pool.submit(copy_block)
        try:
            return await asyncio.wrap_future(work)
        except BaseException:
            work.add_done_callback(lambda _: self.discard(unit, block_id))
            raise

    async def _send(self, block_id: str, draft: Draft, parser: DataParser | None) -> Written:
        """Write by a message to a unit."""
        unit = self._next_unit()
        port = self._ports[unit]
        data = await offload(port, draft.nbytes, draft.to_array)
        try:
            extent, heads = await port.call("write", block_id, data, parser)
        except asyncio.CancelledError:
            self.discard(unit, block_id)
            raise
        except QueueUnavailableError as error:
            raise self._gone(unit, error) from error
        return Written(unit, extent, heads)

    def discard(self, unit: int, block_id: str) -> None:
        self._plain_ports[unit].start("free", [block_id])

    # -- giving back -------------------------------------------------------------------------------

    def _give_back(self, sealed: Sealed | None) -> None:
        if sealed is not None:
            self._plain_ports[sealed.unit].start("seal", self._writer, sealed.serial, sealed.block_ids)

    def _return_unused(self, request: Request) -> None:
        """Give back the segment that a request brings, when it comes."""

        def give_back(reply: Any) -> None:
            lease = None if reply.exception() else reply.result()
            if lease is not None:
                self._give_back(Sealed(request.unit, lease.serial, []))

        request.started.future().add_done_callback(give_back)

    def _cannot_see(self, unit: int, lease: Lease, error: SegmentGoneError) -> None:
        logger.warning(
            "the shared memory of storage unit %d is not visible from this process (%s), though both are on one node; "
            "data goes through messages",
            unit,
            error,
        )
        self._tenant.refuse(_LONG_PAUSE_S)
        self._give_back(Sealed(unit, lease.serial, []))

    def _keep_house(self) -> None:
        if not self._keeper:
            arguments = (weakref.ref(self), self._left, self._idle_s / 2)
            self._keeper.append(threading.Thread(target=_keep_house, args=arguments, daemon=True))
            self._keeper[0].start()

    def leave_segments(self, idle_s: float) -> None:
        """Give back the lent segments if nothing was written for `idle_s`."""
        sealed, request = self._tenant.leave(idle_s)
        self._give_back(sealed)
        if request is not None:
            self._return_unused(request)

    def close(self) -> None:
        self._left.set()
        self._pool.shutdown(wait=False)
        self.leave_segments(0.0)

    # -- reading -----------------------------------------------------------------------------------

    async def read(self, blocks: Sequence[Place], cells: Cells) -> dict[str, Column] | None:
        await self._meet()
        port, nbytes, cells = self._ports[0], sum(extent[-1] for _, _, extent in blocks if extent), dict(cells)
        views = await offload(port, nbytes, open_segments, blocks, self._visible)
        requests = ask_for(blocks, views, cells) if None in views else []
        calls = [
            (request, self._ports[request.unit].call("read", request.blocks, request.cells)) for request in requests
        ]
        for request, call in calls:
            try:
                data = await call
            except QueueUnavailableError as error:
                raise self._gone(request.unit, error) from error
            if data is None:
                return None
            views.append(BlockView(data))
            request.redirect(cells, len(views) - 1)
        return await offload(port, nbytes, merge, views, cells)

    def _visible(self, unit: int) -> UnitAddress | None:
        address, lends = self._addresses.get(unit, (None, False))
        return address if lends and address is not None and address.node == self._node else None


def _keep_house(client: weakref.ref[SimpleStorageClient], left: threading.Event, period_s: float) -> None:
    while not left.wait(period_s):
        present = client()
        if present is None:
            return
        try:
            present.leave_segments(2 * period_s)
        except Exception:  # noqa: BLE001 - Ray was shut down under this thread; the unit takes the segments back
            return
        del present
