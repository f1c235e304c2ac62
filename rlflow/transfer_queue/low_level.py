"""The low-level client: batches by row number, and consumers that share a partition.

```
insert -> put(data, meta)                  a producer that makes rows first and fills them later
put(data, partition_id=...)                rows at once
get_meta(mode="fetch", task_name=...)      a consumer gets rows with these fields that its task has not had yet
  -> get_data(meta)
```

A row put without a key gets one, so that it can be cleared, tagged and watched like any other. Every method has a sync
form without `async_`. `TransferQueueClient` has these methods; `tq.get_client()` gives it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from rlflow.transfer_queue.arguments import check_fields, check_keys, check_partition, check_rows, check_size
from rlflow.transfer_queue.batch_meta import BatchMeta, meta_of
from rlflow.transfer_queue.errors import QueueRequestError, StorageKeyNotFoundError
from rlflow.transfer_queue.fetch import GENERATED_PREFIX

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

    from rlflow.transfer_queue.meta import KVBatchMeta
    from rlflow.transfer_queue.ports import Port
    from rlflow.transfer_queue.storage import DataParser
    from rlflow.transfer_queue.tags import Tag

Self = TypeVar("Self")
P = ParamSpec("P")
R = TypeVar("R")

MODES = ("fetch", "force_fetch", "insert")


def sync_form(
    method: Callable[Concatenate[Self, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Self, P], R]:
    """The method as an ordinary one, which blocks the calling thread."""

    @functools.wraps(method)
    def run(self: Self, *args: P.args, **kwargs: P.kwargs) -> R:
        from rlflow.transfer_queue import runtime

        return runtime.run_on(self, lambda client: method(client, *args, **kwargs))  # type: ignore[arg-type]

    run.__name__ = method.__name__.removeprefix("async_")
    run.__qualname__ = method.__qualname__.replace(method.__name__, run.__name__)
    run.__doc__ = f"Sync form of `{method.__name__}`."
    return run


class LowLevelCalls:
    """Mixin of `TransferQueueClient`."""

    controller: Port
    config: dict[str, Any]
    strict: bool
    name: str
    _row_numbers: itertools.count[int]

    if TYPE_CHECKING:

        async def async_put_batch(
            self,
            keys: Sequence[str],
            partition_id: str,
            fields: Any,
            tags: Sequence[Tag] | None,
            data_parser: DataParser | None,
        ) -> KVBatchMeta: ...

        async def async_get_batch(
            self, keys: Sequence[str] | str, partition_id: str, select_fields: Any, missing_ok: Sequence[str]
        ) -> TensorDict: ...

    # -- which rows --------------------------------------------------------------------------------

    async def async_get_meta(
        self,
        data_fields: Sequence[str],
        batch_size: int,
        partition_id: str,
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> BatchMeta:
        """Rows of a partition.

        Args:
            data_fields: the fields the caller is about to read, or to write (`insert`).
            batch_size: how many rows; `force_fetch` ignores it.
            partition_id: the partition.
            mode: `fetch`: rows that have all the fields and that `task_name` has not consumed, chosen by the table's
                sampler and marked as consumed; `force_fetch`: all rows, ready or not, no marks; `insert`: new rows.
            task_name: who consumes; `fetch` needs it.
            sampling_config: for the sampler, e.g. `{"dp_rank": 0, "batch_index": 3}`.
            timeout_s: how long a fetch may wait for rows; None: `transfer_queue.controller.fetch_timeout_s`.

        Returns:
            The rows; no rows from a fetch in polling mode when there are too few.

        Raises:
            FetchTimeoutError: (a RuntimeError) too few rows became ready in time.
            QueueRequestError: (a ValueError and a RuntimeError) arguments that cannot work.
        """
        fields = check_fields(data_fields)
        check_partition(partition_id)
        if mode == "insert":
            return await self._insert(fields, check_size(batch_size, 0), partition_id)
        if mode == "force_fetch":
            return meta_of(await self.controller.call("force_fetch", fields, partition_id), partition_id)
        if mode != "fetch":
            raise QueueRequestError(f"get_meta has no mode {mode!r}; try one of {', '.join(MODES)}")
        if not task_name:
            raise QueueRequestError("get_meta(mode='fetch') needs a task_name: rows are marked as consumed by a task")
        wait_s = float(self.config["controller"]["fetch_timeout_s"] if timeout_s is None else timeout_s)
        size, config = check_size(batch_size, 1), dict(sampling_config or {})
        reply = await self.controller.call(
            "fetch", fields, size, partition_id, task_name, config, wait_s, extra_s=wait_s
        )
        return meta_of(reply, partition_id)

    async def _insert(self, fields: Sequence[str], count: int, partition_id: str) -> BatchMeta:
        indexes = await self.controller.call("insert", self._new_keys(count), partition_id) if count else []
        blank = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
        return BatchMeta(indexes, [partition_id] * count, dict.fromkeys(fields, blank))

    def _new_keys(self, count: int) -> list[str]:
        return [f"{GENERATED_PREFIX}{self.name}:{next(self._row_numbers)}" for _ in range(count)]

    async def async_kv_retrieve_meta(
        self, keys: Sequence[str] | str, partition_id: str, create: bool = False
    ) -> BatchMeta:
        """The `BatchMeta` of rows by key, with the fields they have in common; `create` makes missing rows.

        Raises:
            StorageKeyNotFoundError: an unknown key. After `init(strict=False)` such keys are left out.
        """
        reply = await self.controller.call("describe", check_keys(keys), partition_id, create, self.strict)
        return meta_of(reply, partition_id)

    async def async_kv_retrieve_keys(self, global_indexes: Sequence[int] | int, partition_id: str) -> list[str | None]:
        """Keys of row numbers.

        Raises:
            StorageKeyNotFoundError: a number that is not in the partition. After `init(strict=False)` the key of such
                a row is None, and so is that of a row that was put without a key.
        """
        indexes = [global_indexes] if isinstance(global_indexes, int) else [int(index) for index in global_indexes]
        if not self.strict and partition_id not in await self.async_get_partition_list():
            raise QueueRequestError(f"there is no partition {partition_id!r}")
        found = await self.controller.call("keys_of", indexes, self.strict)
        if not self.strict:
            mine = [row[1] if row is not None and row[0] == partition_id else None for row in found]
            return [None if key is None or key.startswith(GENERATED_PREFIX) else key for key in mine]
        for index, (partition, _) in zip(indexes, found, strict=True):
            if partition != partition_id:
                raise StorageKeyNotFoundError(f"row {index} is in partition {partition!r}, not in {partition_id!r}")
        return [key for _, key in found]

    async def async_kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
        """See `api.kv_list`. After `init(strict=False)` rows that were put without a key are left out."""
        reply = await self.controller.call("listing", partition_id)
        listing = {partition: tagged.dicts() for partition, tagged in reply.items()}
        if self.strict:
            return listing
        return {
            partition: {key: tag for key, tag in rows.items() if not key.startswith(GENERATED_PREFIX)}
            for partition, rows in listing.items()
        }

    # -- data --------------------------------------------------------------------------------------

    async def async_put(
        self,
        data: TensorDict,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: DataParser | None = None,
    ) -> BatchMeta:
        """Write fields of rows: one commit a partition. Tags stay as they are; `async_set_custom_meta` writes those.

        Args:
            data: TensorDict of batch size [N].
            metadata: the N rows; None: new rows of `partition_id`.
            partition_id: the partition of new rows.
            data_parser: see `kv_put`.

        Returns:
            `metadata` with the fields of `data` added and all rows ready; of new rows, their meta.

        Raises:
            StorageKeyNotFoundError: a row of `metadata` was cleared.
        """
        from rlflow.utils.tensordict_rows import index_select_tensor_dict

        size = check_rows(data)
        if metadata is None:
            if not partition_id:
                raise QueueRequestError("put needs the rows (metadata=...) or the partition of new ones (partition_id)")
            keys = self._new_keys(size)
            await self.async_put_batch(keys, partition_id, data, None, data_parser)
            indexes = await self.controller.call("indexes", keys, partition_id)
            metadata = BatchMeta(indexes, [partition_id] * size)
        else:
            if metadata.size != size:
                raise QueueRequestError(f"the data has {size} rows, the metadata {metadata.size}; they must match")
            for partition, (places, keys) in (await self._keys(metadata)).items():
                part = data if len(places) == size else index_select_tensor_dict(data, places)
                await self.async_put_batch(keys, partition, part, None, data_parser)
        return metadata.add_fields(data)

    async def async_get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields of rows, in the meta's order; an empty meta gives an empty TensorDict.

        Raises:
            StorageKeyNotFoundError: a row was cleared.
            MissingFieldError: a row lacks a field of the meta. After `init(strict=False)` such fields are left out.
        """
        if not metadata.size:
            from tensordict import TensorDict

            return TensorDict({}, batch_size=[0])
        from rlflow.utils.tensordict_rows import concat_tensordict, index_select_tensor_dict

        rows = await self._keys(metadata)
        parts = [
            await self.async_get_batch(keys, partition, metadata.field_names, ())
            for partition, (_, keys) in rows.items()
        ]
        if len(parts) == 1:
            return parts[0]
        places = [place for part, _ in rows.values() for place in part]
        return index_select_tensor_dict(concat_tensordict(parts), np.argsort(places).tolist())

    async def _keys(self, meta: BatchMeta) -> dict[str, tuple[list[int], list[str]]]:
        """{partition: (places in the meta, keys)} of rows; `StorageKeyNotFoundError` for a cleared one."""
        rows: dict[str, tuple[list[int], list[str]]] = {}
        for place, (partition, key) in enumerate(await self.controller.call("keys_of", meta.global_indexes, True)):
            places, keys = rows.setdefault(partition, ([], []))
            places.append(place)
            keys.append(key)
        return rows

    async def async_set_custom_meta(self, metadata: BatchMeta) -> None:
        """Replace the rows' tags by those of the meta. (`kv_put` merges instead.)"""
        await self.controller.call("set_tags", metadata.global_indexes, metadata.get_all_custom_meta())

    async def async_clear_samples(self, metadata: BatchMeta) -> None:
        """Delete rows; those that are gone already are ignored."""
        await self.controller.call("clear_rows", metadata.global_indexes)

    async def async_clear_partition(self, partition_id: str) -> None:
        """Delete a partition: rows, marks, and what the sampler remembers of it. Unknown ones are ignored."""
        await self.controller.call("clear_partition", partition_id)

    # -- states ------------------------------------------------------------------------------------

    async def async_get_partition_list(self) -> list[str]:
        """Names of all partitions."""
        return await self.controller.call("partitions")

    async def async_get_production_status(
        self, data_fields: Sequence[str], partition_id: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which rows have which fields.

        Returns:
            Row numbers int64 [N] of the partition, and int8 [N, F], 1 where the row has the field. After
            `init(strict=False)`: (None, None) when the partition or one of the fields is unknown.
        """
        fields = check_fields(data_fields)
        return self._status(*await self.controller.call("production", fields, partition_id))

    async def async_get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[Tensor | None, Tensor | None]:
        """Which rows a task has consumed.

        Returns:
            Row numbers int64 [N] of the partition, and int8 [N], 1 where `task_name` has consumed the row. After
            `init(strict=False)`: (None, None) when the partition is unknown.
        """
        return self._status(*await self.controller.call("consumption", task_name, partition_id))

    def _status(self, indexes: Sequence[int], status: np.ndarray, known: bool) -> tuple[Tensor | None, Tensor | None]:
        import torch

        if not known and not self.strict:
            return None, None
        return torch.tensor(indexes, dtype=torch.int64), torch.from_numpy(np.array(status, np.int8))

    async def async_check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        """Whether the partition has rows and all of them have all of `data_fields`."""
        indexes, status, _ = await self.controller.call("production", check_fields(data_fields), partition_id)
        return bool(indexes) and bool(status.all())

    async def async_check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the partition has rows and `task_name` has consumed all of them."""
        indexes, status, _ = await self.controller.call("consumption", task_name, partition_id)
        return bool(indexes) and bool(status.all())

    async def async_mark_consumed(self, task_name: str, keys: Sequence[str] | str, partition_id: str) -> None:
        """Mark rows as consumed by `task_name`."""
        await self.controller.call("consume", task_name, check_keys(keys), partition_id)

    async def async_reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Clear the marks of one task, or of all; the data stays.

        False when there is no such partition; after `init(strict=False)` always True.
        """
        found = await self.controller.call("reset_consumption", partition_id, task_name)
        return found or not self.strict

    # -- names of the public package that have no work to do here -----------------------------------

    def initialize_storage_manager(self, manager_type: str, config: dict[str, Any]) -> None:
        """Storage comes with the connection, so this only checks that it is the storage the caller means.

        Raises:
            QueueRequestError: the table has another storage backend.
        """
        own = self.config["backend"]["storage_backend"]
        if manager_type != own:
            raise QueueRequestError(
                f"the table keeps its data in {own}, not in {manager_type!r}; the process that creates it chooses "
                "(transfer_queue.backend.storage_backend)"
            )

    def close(self) -> None:
        """Leave the table, if this process does not own it; the owner ends it with `tq.close()`."""
        from rlflow.transfer_queue import runtime

        runtime.leave(self.controller)

    # -- sync forms --------------------------------------------------------------------------------

    get_meta = sync_form(async_get_meta)
    kv_retrieve_meta = sync_form(async_kv_retrieve_meta)
    kv_list = sync_form(async_kv_list)
    kv_retrieve_keys = sync_form(async_kv_retrieve_keys)
    put = sync_form(async_put)
    get_data = sync_form(async_get_data)
    set_custom_meta = sync_form(async_set_custom_meta)
    clear_samples = sync_form(async_clear_samples)
    clear_partition = sync_form(async_clear_partition)
    get_partition_list = sync_form(async_get_partition_list)
    get_production_status = sync_form(async_get_production_status)
    get_consumption_status = sync_form(async_get_consumption_status)
    check_production_status = sync_form(async_check_production_status)
    check_consumption_status = sync_form(async_check_consumption_status)
    mark_consumed = sync_form(async_mark_consumed)
    reset_consumption = sync_form(async_reset_consumption)
