"""The `SimpleStorage` backend: units are Ray actors.

On the unit's machine a put writes shared memory and a get maps it; the only messages are those that lend segments, a
few in a thousand puts. From another machine, or where there is no shared memory, blocks travel as Ray's messages.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlflow.transfer_queue.errors import QueueUnavailableError
from rlflow.transfer_queue.meter import unit_class_for
from rlflow.transfer_queue.ports import RayPort
from rlflow.transfer_queue.storage import Extent, FileEntry, Garbage, StorageHost, register_storage_backend
from rlflow.transfer_queue.storage_simple_client import SimpleStorageClient
from rlflow.transfer_queue.storage_unit import StorageUnit
from rlflow.utils.errors import DeadlineError

logger = logging.getLogger(__name__)

# How often units are asked whether they live and which of their writers do not.
_CHECK_S = 1.0


class SimpleStorageHost(StorageHost):
    """Creates one Ray actor a unit. They belong to the controller's process and go when it goes."""

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        import ray

        options = config["backend"]["SimpleStorage"]
        # num_cpus=0: the units move bytes and must not take a core from the scheduler's account. Files are written
        # beside the ordinary calls, which keep their order.
        options_of_class: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"files": 1}}
        self._unit_class = ray.remote(**options_of_class)(unit_class_for(config, SimpleUnit))
        self._unit_options = [options[f"shared_memory{name}"] for name in ("", "_idle_seconds", "_bytes")]
        # The session in the name keeps a new table's units apart from those of one that is just being torn down.
        self._suffix = str(ray.get_runtime_context().get_actor_id())[:12]
        self._timeout_s = float(config["rpc_timeout_s"])
        self._file_s = float(config["checkpoint_timeout_s"])
        self._idle_s = float(options["shared_memory_idle_seconds"])
        self._spares = int(options["replacement_units"])
        self._nodes: list[str | None] = []
        self._ports: list[RayPort] = []
        self._garbage: dict[int, list[str]] = {}
        self._lost: dict[int, str] = {}
        self._watch_over: Callable[[int], None] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        for node_id in placements:
            self._add_unit(node_id)

    def _add_unit(self, node_id: str | None) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        number = len(self._ports)
        place: dict[str, Any] = {"name": f"TransferQueueStorageUnit#{number}@{self._suffix}"}
        if node_id is not None:
            place["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
        handle = self._unit_class.options(**place).remote(*self._unit_options)
        self._nodes.append(node_id)
        self._ports.append(RayPort(handle, f"TransferQueue storage unit {number}", self._timeout_s))
        if self._watch_over is not None:
            self._watch_over(number)

    def replace(self, unit: int) -> None:
        if self._spares > 0:
            self._spares -= 1
            self._add_unit(self._nodes[unit])
            logger.warning("storage unit %d takes the place of unit %d", len(self._ports) - 1, unit)

    @property
    def endpoint(self) -> Any:
        return {"units": [port.handle for port in self._ports], "idle_s": self._idle_s}

    def free(self, garbage: Garbage) -> None:
        # After the answer to the call that made the garbage, and together with what follows at once.
        if not self._garbage:
            asyncio.get_running_loop().call_soon(self._send_garbage)
        for unit, blocks in garbage.items():
            self._garbage.setdefault(unit, []).extend(blocks)

    def _send_garbage(self) -> None:
        garbage, self._garbage = self._garbage, {}
        for unit, blocks in garbage.items():
            if unit not in self._lost:
                self._ports[unit].start("free", blocks)

    async def stats(self) -> list[dict[str, int]]:
        self._send_garbage()
        return await asyncio.gather(*(self._stats_of(unit) for unit in range(len(self._ports))))

    async def _stats_of(self, unit: int) -> dict[str, int]:
        try:
            return await self._ports[unit].call("stats")
        except QueueUnavailableError:
            return {}

    def watch_units(
        self, on_lost: Callable[[int, str], None], abandon: Callable[[str], Awaitable[Sequence[str]]]
    ) -> None:
        if self._watch_over is not None:
            return

        def watch_over(unit: int) -> None:
            self._watchers.append(asyncio.get_running_loop().create_task(self._watch(unit, on_lost, abandon)))

        self._watch_over = watch_over
        for unit in range(len(self._ports)):
            watch_over(unit)

    async def _watch(
        self, unit: int, on_lost: Callable[[int, str], None], abandon: Callable[[str], Awaitable[Sequence[str]]]
    ) -> None:
        port = self._ports[unit]
        while True:
            try:
                if self._nodes[unit] is None:
                    self._nodes[unit] = (await port.call("describe"))[0].node
                for writer in await port.call("check"):
                    logger.info("writer %s of storage unit %d is gone; its segments are taken back", writer, unit)
                    await port.call("abandon", writer, list(await abandon(writer)))
            except DeadlineError as error:
                logger.warning("%s", error)  # busy or hung; it may come back
            except QueueUnavailableError as error:
                if port.gone:
                    self._lost[unit] = str(error)
                    on_lost(unit, str(error))
                    return
            await asyncio.sleep(_CHECK_S)

    def placement(self) -> list[dict[str, Any]]:
        return [
            {"unit": unit, "node": node, "alive": unit not in self._lost, "reason": self._lost.get(unit)}
            for unit, node in enumerate(self._nodes)
        ]

    async def export_blocks(self, unit: int, blocks: Sequence[tuple[str, Extent | None]], path: str) -> list[FileEntry]:
        return await self._files(unit).call("export_blocks", list(blocks), path, extra_s=self._file_s)

    async def import_blocks(self, unit: int, path: str, entries: Sequence[FileEntry]) -> dict[str, Extent | None]:
        return await self._files(unit).call("import_blocks", path, list(entries), extra_s=self._file_s)

    def _files(self, unit: int) -> RayPort:
        port = copy.copy(self._ports[unit])
        port.group = "files"
        return port


class SimpleUnit(StorageUnit):
    """A storage unit that knows its Ray node."""

    def __init__(self, shared_memory: bool, idle_s: float, limit: int | None) -> None:
        import ray

        super().__init__(ray.get_runtime_context().get_node_id(), shared_memory, float(idle_s), limit)


register_storage_backend("SimpleStorage", SimpleStorageHost, SimpleStorageClient)
