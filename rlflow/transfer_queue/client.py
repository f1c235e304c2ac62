"""The client: what a process needs to put and get. One per process, usable from any thread and any event loop.

A put is `encode -> write block -> commit`, a get `locate -> read -> decode`: one call to the controller each. Where the
storage is not in shared memory of this machine, there is one more to each storage unit involved. Blocks never change,
so a get that loses a race with a writer finds its block gone and asks again; it never sees half of a put.

Everything is written as coroutines. `direct` is a twin whose ports block the thread: the sync forms drive the same
coroutines on it, see `ports`.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlflow.transfer_queue.arguments import check_keys, check_partition, check_select
from rlflow.transfer_queue.column import Column, heads_of
from rlflow.transfer_queue.commit import BlockHead
from rlflow.transfer_queue.errors import (
    QueueArgumentError,
    QueueTypeError,
    StorageKeyNotFoundError,
    StorageUnitLostError,
    some,
)
from rlflow.transfer_queue.lineage import this_process
from rlflow.transfer_queue.locate import Location
from rlflow.transfer_queue.low_level import LowLevelCalls
from rlflow.transfer_queue.meta import KVBatchMeta
from rlflow.transfer_queue.ports import Port, offload
from rlflow.transfer_queue.predicate import Predicate
from rlflow.transfer_queue.storage import DataParser, StorageClient, UnitGoneError, Written
from rlflow.transfer_queue.tags import Tag, check_tags, copy_tags, pack_tags
from rlflow.transfer_queue.wire import pack_locate, pack_put, unpack_location, unpack_put_reply
from rlflow.utils.errors import DeadlineError

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlflow.transfer_queue.codec import Layout

logger = logging.getLogger(__name__)


class TransferQueueClient(LowLevelCalls):
    """See the module's docstring.

    Args:
        controller: the controller.
        storage: the storage units.
        config: the merged config of the table.
        strict: whether unknown keys and absent fields are errors (see `kv_batch_get`).
        name: unique in the table; ids of blocks begin with the name of their writer.
    """

    def __init__(
        self, controller: Port, storage: StorageClient, config: dict[str, Any], strict: bool = True, name: str = "local"
    ) -> None:
        self.controller = controller
        self.config = config
        self.name = name
        self.strict = strict
        self._storage = storage
        self._timeout_s = float(config["rpc_timeout_s"])
        self._block_numbers = itertools.count()
        self._row_numbers = itertools.count()

    def direct(self) -> TransferQueueClient:
        """The same client with ports that block the calling thread; for `ports.drive`."""
        twin = copy.copy(self)
        twin.controller = self.controller.blocking()
        twin._storage = self._storage.blocking()
        return twin

    def disconnect(self) -> None:
        """Give back what this process holds of the table; the client is of no use afterwards."""
        self._storage.close()

    # -- put ---------------------------------------------------------------------------------------

    async def async_put_row(
        self,
        key: str,
        partition_id: str,
        fields: Any,
        tag: Tag | None,
        data_parser: DataParser | None,
        expect: Tag | None = None,
    ) -> KVBatchMeta:
        """See `api.kv_put`."""
        keys = check_keys(key)
        tags = None if tag is None else [tag]
        if isinstance(fields, dict):
            from rlflow.transfer_queue.codec import encode_row

            columns = encode_row(fields)
        else:
            if fields is not None and not hasattr(fields, "batch_size"):
                raise QueueTypeError(f"fields of a row are a dict or a TensorDict, got {type(fields).__name__}")
            if fields is not None and len(fields.batch_size) == 0:
                fields = fields.unsqueeze(0)
            columns = await self._encode(fields, 1)
        required = None if expect is None else [expect]
        return await self._put(keys, partition_id, columns, tags, data_parser, required)

    async def async_put_batch(
        self,
        keys: Sequence[str],
        partition_id: str,
        fields: Any,
        tags: Sequence[Tag] | None,
        data_parser: DataParser | None,
        expect: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        """See `api.kv_batch_put`."""
        keys = check_keys(keys)
        return await self._put(keys, partition_id, await self._encode(fields, len(keys)), tags, data_parser, expect)

    async def _encode(self, fields: Any, size: int) -> dict[str, Column]:
        if fields is None:
            return {}
        from rlflow.transfer_queue.codec import encode_batch, tensor_bytes

        return await offload(self.controller, tensor_bytes(fields), encode_batch, fields, size)

    async def _put(
        self,
        keys: list[str],
        partition_id: str,
        columns: dict[str, Column],
        tags: Sequence[Tag] | None,
        parser: DataParser | None,
        expect: Sequence[Tag] | None = None,
    ) -> KVBatchMeta:
        check_partition(partition_id)
        if len(set(keys)) != len(keys):
            raise QueueArgumentError(f"the keys of a put must differ, got {len(keys)} keys, {len(set(keys))} different")
        if not columns and tags is None:
            raise QueueArgumentError(f"nothing to put for {some(keys)}: give fields, tags, or both")
        tags = None if tags is None else check_tags(tags, len(keys))
        packed = None if tags is None else pack_tags(tags, keys)
        required = None if expect is None else pack_tags(check_tags(expect, len(keys)), keys)
        extra_s = float(self.config["capacity_wait_s"])
        while True:
            head = await self._write(columns, parser) if columns else None
            try:
                message = pack_put(keys, partition_id, packed, head, required)
                call = self.controller.call("put_packed", message, extra_s=extra_s)
                merged = [{} for _ in keys] if tags is None else copy_tags(tags)  # while the call is under way
                reply = unpack_put_reply(await call)
                return KVBatchMeta.owning(keys, reply.merged(merged), partition_id, reply.fields)
            except StorageUnitLostError:
                # The unit died, and the controller knew before this client did.
                if head is None or parser is not None:
                    raise
                self._storage.forget_unit(head.unit)
                self._storage.meet((await self.controller.call("session"))["endpoint"])

    async def _write(self, columns: dict[str, Column], parser: DataParser | None) -> BlockHead:
        block_id = f"{self.name}:{next(self._block_numbers)}"
        while True:
            try:
                written: Written = await self._storage.write(block_id, columns, parser)
            except UnitGoneError as error:
                await self._report(error)
                if parser is None:
                    continue  # to a unit that is left; QueueUnavailableError when there is none
                raise
            nbytes = sum(column.data.nbytes for column in columns.values())
            heads = written.heads or heads_of(columns)
            return BlockHead(written.unit, block_id, heads, written.extent, nbytes, this_process())

    async def _report(self, error: UnitGoneError) -> None:
        """Tell the controller, which may not have noticed yet, and learn what took the unit's place."""
        self._storage.meet(await self.controller.call("unit_lost", error.unit, str(error)))

    # -- get ---------------------------------------------------------------------------------------

    async def async_get_batch(
        self,
        keys: Sequence[str] | str,
        partition_id: str,
        select_fields: Any,
        missing_ok: Sequence[str],
        layout: Layout | None = None,
    ) -> TensorDict:
        """See `api.kv_batch_get`."""
        check_partition(partition_id)
        keys = check_keys(keys)
        selected = check_select(select_fields, missing_ok)
        deadline = time.monotonic() + self._timeout_s
        message = pack_locate(keys, partition_id, selected, self.strict, list(missing_ok))
        while True:
            location = unpack_location(await self.controller.call("locate_packed", message), keys)
            columns = await self._read(location)
            if columns is not None:
                break
            # Someone overwrote or cleared a row between the two calls; the controller knows by now.
            if time.monotonic() > deadline:
                raise StorageKeyNotFoundError(
                    f"cells of {some(keys)} in partition {partition_id!r} were replaced faster than they could be read "
                    f"for {self._timeout_s:.0f} s, or their storage lost them"
                )
        if location.unknown:
            logger.warning("%d unknown keys left out of a get: %s", len(location.unknown), some(location.unknown))
        return await self._decode(columns, len(location.keys), selected, layout)

    async def _decode(
        self, columns: dict[str, Column], size: int, selected: list[str] | None, layout: Layout | None = None
    ) -> TensorDict:
        from rlflow.transfer_queue.codec import JAGGED, decode_batch

        if not columns and not self.strict:
            logger.warning("none of the selected fields %s is present on all requested rows; empty result", selected)
            size = 0
        count = sum(column.data.nbytes for column in columns.values())
        return await offload(self.controller, count, decode_batch, columns, size, layout or JAGGED)

    async def _read(self, location: Location) -> dict[str, Column] | None:
        """The columns in key order; None when a block is gone."""
        if not self._storage.knows(location.blocks):
            self._storage.meet((await self.controller.call("session"))["endpoint"])
        try:
            columns = await self._storage.read(location.blocks, location.cells)
        except UnitGoneError as error:
            await self._report(error)  # the next `locate` says what is lost
            return None
        if columns is None:
            return None
        for name, column in columns.items():
            column.ragged = location.ragged[name]
        return columns

    async def async_get_by_meta(
        self, meta: KVBatchMeta, select_fields: Any, missing_ok: Sequence[str], layout: Layout | None = None
    ) -> TensorDict:
        """See `api.kv_batch_get_by_meta`."""
        if meta.partition_id is None:
            raise QueueArgumentError("the meta names no partition, so its rows cannot be found; set meta.partition_id")
        selected = check_select(select_fields, missing_ok)
        if selected is None:
            selected = meta.fields
        elif meta.fields is not None or not self.strict:
            surplus = [name for name in selected if name not in (meta.fields or ()) and name not in missing_ok]
            if surplus:
                raise QueueArgumentError(f"fields {some(surplus)} are not among the meta's fields {meta.fields}")
        if not meta.keys:
            return await self._decode({}, 0, selected)
        optional = [name for name in missing_ok if selected is not None and name in selected]
        return await self.async_get_batch(meta.keys, meta.partition_id, selected, optional, layout)

    # -- the rest ----------------------------------------------------------------------------------

    async def async_lineage(
        self, keys: Sequence[str] | str, partition_id: str, fields: Sequence[str] | None
    ) -> dict[str, dict[str, dict[str, Any]]]:
        """See `api.kv_lineage`."""
        check_partition(partition_id)
        return await self.controller.call("lineage", check_keys(keys), partition_id, fields)

    async def async_clear(self, keys: Sequence[str] | str, partition_id: str) -> None:
        """See `api.kv_clear`."""
        check_partition(partition_id)
        await self.controller.call("clear", check_keys(keys), partition_id)

    async def async_watch(
        self, partition_id: str, since_version: int, timeout_s: float
    ) -> tuple[int, dict[str, Tag | None]]:
        """See `api.kv_watch`."""
        check_partition(partition_id)
        reply = await self.controller.call(
            "watch", partition_id, int(since_version), float(timeout_s), extra_s=timeout_s
        )
        return reply.version, {**reply.changed.dicts(), **dict.fromkeys(reply.deleted)}

    async def async_wait(
        self,
        partition_id: str,
        keys: Sequence[str] | None,
        predicate: Predicate,
        since_version: int,
        timeout_s: float,
    ) -> tuple[int, dict[str, Tag]]:
        """See `api.kv_wait`."""
        check_partition(partition_id)
        keys = None if keys is None else check_keys(keys)
        if keys is None and predicate.count is None:
            raise QueueArgumentError("kv_wait needs keys or Predicate(count=...): else there is nothing to count up to")
        if keys is not None and predicate.count is not None and predicate.count > len(set(keys)):
            raise QueueArgumentError(f"kv_wait cannot see {predicate.count} matches among {len(set(keys))} keys")
        reply = await self.controller.call(
            "wait", partition_id, keys, predicate, int(since_version), float(timeout_s), extra_s=timeout_s
        )
        if reply.lacking is not None:
            raise DeadlineError(
                f"Waited {timeout_s:g} s on partition {partition_id!r}: {reply.lacking}. The producers of these rows "
                "are slow, hung or gone; see their logs, or allow more time (timeout_s)"
            )
        return reply.version, reply.matching.dicts()

    # -- checkpoints -------------------------------------------------------------------------------

    async def async_save_checkpoint(self, checkpoint_dir: str, include_storage: bool, metadata: Any) -> None:
        """See `api.save_checkpoint`."""
        try:
            json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise QueueTypeError(f"the metadata of a checkpoint must be plain JSON values: {error}") from error
        if not include_storage:
            logger.warning("include_storage=False has no effect: this storage lives in memory and would be lost")
        folder, extra_s = os.path.abspath(checkpoint_dir), float(self.config["checkpoint_timeout_s"])
        await self.controller.call("save_checkpoint", folder, metadata, extra_s=extra_s)

    async def async_load_checkpoint(self, checkpoint_dir: str) -> Any:
        """See `api.load_checkpoint`."""
        folder, extra_s = os.path.abspath(checkpoint_dir), float(self.config["checkpoint_timeout_s"])
        return await self.controller.call("load_checkpoint", folder, extra_s=extra_s)

    async def async_stats(self) -> dict[str, Any]:
        """{"rows": {partition: count}, "units": [for each storage unit, in bytes unless said otherwise]}.

        A unit has `blocks` (a number) and their `bytes`, as far as they hold cells of rows; `segment_bytes` of shared
        memory, of these `free_bytes` not in use and `pinned_bytes` freed but still looked at; and `private_bytes` of
        blocks beside shared memory.
        """
        return await self.controller.call("stats")
