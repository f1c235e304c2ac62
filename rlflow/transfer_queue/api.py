"""The table's functions: `kv_*` and their `async_` twins.

The sync forms may be called from any thread, also from one that runs an event loop; they block that thread (and loop)
until the answer is there. The async forms may be awaited on any event loop. Errors common to all: `DeadlineError` when
no answer comes in time, `QueueUnavailableError` when the table is gone, `QueueNotInitializedError` when there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlflow.transfer_queue.calls import run, run_direct, run_sync
from rlflow.transfer_queue.errors import QueueNotInitializedError
from rlflow.transfer_queue.meta import KVBatchMeta

if TYPE_CHECKING:
    from tensordict import TensorDict

    from rlflow.transfer_queue.client import TransferQueueClient
    from rlflow.transfer_queue.codec import Layout

Tag = dict[str, Any]
DataParser = Callable[[dict[str, list[Any]]], dict[str, Any]]


def init(conf: Any = None, *, strict: bool | None = None) -> Any:
    """Create the table, or attach to the running one.

    The process that creates the table owns it: the table ends with that process, or when it calls `close`. An attaching
    process takes over the table's config; its `conf` only names the namespace.

    Args:
        conf: the `transfer_queue` config (DictConfig or dict); see `settings.DEFAULTS`.
        strict: how this process reads. Strict: unknown keys and absent fields raise. Else (compat mode) they are left
            out, see `kv_batch_get`. None: strict in the process that creates the table, and in others as it reads. The
            latest call decides.

    Returns:
        The merged config when the table was created, else `conf`.

    Raises:
        ConfigError, ValueError: a config that cannot work.
        QueueNotInitializedError: Ray is not initialised.
    """
    from rlflow.transfer_queue import runtime

    return runtime.init(conf, strict)


def close() -> None:
    """End the table if this process created it; otherwise only leave it. Does nothing when not connected."""
    from rlflow.transfer_queue import runtime

    runtime.close()


def get_client() -> TransferQueueClient:
    """This process's client. `QueueNotInitializedError` (an AssertionError) before `init` or the first call."""
    from rlflow.transfer_queue import runtime

    client = runtime.current_client()
    if client is None:
        raise QueueNotInitializedError("this process has no client yet; call rlflow.transfer_queue.init() first")
    return client


def get_metrics_endpoint() -> str | None:
    """`host:port` of the table's Prometheus endpoint; None without `transfer_queue.metrics.enabled`."""
    from rlflow.transfer_queue import runtime

    client = runtime.current_client()
    return None if client is None else client.config["metrics"].get("endpoint")


# -- put -------------------------------------------------------------------------------------------


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
    *,
    expect: Tag | None = None,
) -> KVBatchMeta:
    """Put fields and/or the tag of one row, in one commit.

    The row and its partition are created when missing. Given fields replace the row's cells of these names, all others
    stay. `tag` is merged into the row's tag (dict update).

    Args:
        key: the row's key.
        partition_id: its partition.
        fields: a dict (a tensor is the row's tensor, anything else one object), or a TensorDict of one row.
        tag: plain values.
        data_parser: applied to {field: [row value]} in the storage unit before storing; keeps fields and row count.
        expect: tag entries that must be so before the put, e.g. `{"status": "pending"}`; None stands for an absent one.

    Returns:
        A KVBatchMeta of the row: the merged tag, and the fields it has now.

    Raises:
        QueueArgumentError: (a ValueError) neither fields nor tag, or a nested tensor in a dict.
        QueueTypeError: (a TypeError) a key or value that cannot be stored; names the field.
        DtypeConflictError: a field holds another dtype; nothing was stored.
        TagConflictError: `expect` does not hold; nothing was stored.
        CapacityError: the table is full, and the put brings new rows with fields.
    """
    return await run(lambda client: client.async_put_row(key, partition_id, fields, tag, data_parser, expect))


async def async_kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: DataParser | None = None,
    *,
    expect: Sequence[Tag] | None = None,
) -> KVBatchMeta:
    """`async_kv_put` for several rows in one commit.

    Args:
        keys: N different keys.
        partition_id: their partition.
        fields: TensorDict of batch size [N]: dense tensors [N, ...], jagged tensors, NonTensorStacks.
        tags: N dicts.
        data_parser: see `async_kv_put`; gets {field: [N row values]}.
        expect: N dicts, see `async_kv_put`.
    """
    return await run(lambda client: client.async_put_batch(keys, partition_id, fields, tags, data_parser, expect))


def kv_put(
    key: str,
    partition_id: str,
    fields: TensorDict | dict[str, Any] | None = None,
    tag: Tag | None = None,
    data_parser: DataParser | None = None,
    *,
    expect: Tag | None = None,
) -> KVBatchMeta:
    """Sync form of `async_kv_put`."""
    return run_direct(lambda client: client.async_put_row(key, partition_id, fields, tag, data_parser, expect))


def kv_batch_put(
    keys: Sequence[str],
    partition_id: str,
    fields: TensorDict | None = None,
    tags: Sequence[Tag] | None = None,
    data_parser: DataParser | None = None,
    *,
    expect: Sequence[Tag] | None = None,
) -> KVBatchMeta:
    """Sync form of `async_kv_batch_put`."""
    return run_direct(lambda client: client.async_put_batch(keys, partition_id, fields, tags, data_parser, expect))


def _layout(kind: str, padding_side: str, padding_value: float | Mapping[str, float]) -> Layout | None:
    if kind == "jagged":
        return None
    from rlflow.transfer_queue.codec import Layout

    return Layout(kind, padding_side, padding_value)


# -- get -------------------------------------------------------------------------------------------


async def async_kv_batch_get(
    keys: Sequence[str] | str,
    partition_id: str,
    select_fields: Sequence[str] | str | None = None,
    *,
    missing_ok: Sequence[str] = (),
    layout: str = "jagged",
    padding_side: str = "right",
    padding_value: float | Mapping[str, float] = 0,
) -> TensorDict:
    """Read fields of rows.

    Args:
        keys: N keys; row i of the result is `keys[i]`.
        partition_id: their partition.
        select_fields: the fields to fetch; None: those that all rows have.
        missing_ok: optional fields among the selected ones: left out when a row lacks them.
        layout: how rows with dimensions come: "jagged", "padded" (dense, as long as the longest row), or "list" (a
            NonTensorStack of one tensor a row; `.tolist()` unpacks it).
        padding_side: for "padded", on which side of the rows the padding is: "right" or "left".
        padding_value: for "padded", the value beside the rows; {field: value} for one of its own, 0 for all others.

    Returns:
        TensorDict of batch size [N]. Rows that are scalars come as one dense tensor [N], rows with dimensions as a
        jagged tensor (with `.offsets()`, also when their lengths agree), objects as a NonTensorStack. The caller may
        change the tensors in place: nobody else sees it. They may be views of the table's shared memory, which is not
        used for other data while they live; clone what is to be kept long.
        After `init(strict=False)` unknown keys are dropped with a warning and absent fields are left out; batch size 0
        when no selected field is left.

    Raises:
        StorageKeyNotFoundError: (a KeyError) an unknown key.
        MissingFieldError: (a KeyError) a selected field is absent from a row.
        NotReadyError: (a ValueError) the rows share no field.
    """
    how = _layout(layout, padding_side, padding_value)
    return await run(lambda client: client.async_get_batch(keys, partition_id, select_fields, missing_ok, how))


async def async_kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: Sequence[str] | str | None = None,
    *,
    missing_ok: Sequence[str] = (),
    layout: str = "jagged",
    padding_side: str = "right",
    padding_value: float | Mapping[str, float] = 0,
) -> TensorDict:
    """Read the rows of a meta.

    `select_fields` must be among `meta.fields`; None takes `meta.fields`. When the meta does not know its fields
    (None), the rows decide. An empty meta gives an empty TensorDict. Otherwise as `async_kv_batch_get`.
    """
    how = _layout(layout, padding_side, padding_value)
    return await run(lambda client: client.async_get_by_meta(meta, select_fields, missing_ok, how))


def kv_batch_get(
    keys: Sequence[str] | str,
    partition_id: str,
    select_fields: Sequence[str] | str | None = None,
    *,
    missing_ok: Sequence[str] = (),
    layout: str = "jagged",
    padding_side: str = "right",
    padding_value: float | Mapping[str, float] = 0,
) -> TensorDict:
    """Sync form of `async_kv_batch_get`."""
    how = _layout(layout, padding_side, padding_value)
    return run_direct(lambda client: client.async_get_batch(keys, partition_id, select_fields, missing_ok, how))


def kv_batch_get_by_meta(
    meta: KVBatchMeta,
    select_fields: Sequence[str] | str | None = None,
    *,
    missing_ok: Sequence[str] = (),
    layout: str = "jagged",
    padding_side: str = "right",
    padding_value: float | Mapping[str, float] = 0,
) -> TensorDict:
    """Sync form of `async_kv_batch_get_by_meta`."""
    how = _layout(layout, padding_side, padding_value)
    return run_direct(lambda client: client.async_get_by_meta(meta, select_fields, missing_ok, how))


async def async_kv_lineage(
    keys: Sequence[str] | str, partition_id: str, fields: Sequence[str] | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Who wrote the fields of rows.

    Args:
        keys: the rows.
        partition_id: their partition.
        fields: the fields asked for, those that a row lacks are left out; None: all it has.

    Returns:
        {key: {field: {"writer": process and node, "time": seconds since 1970, "version": which put of the table it
        was, counted from 1}}}.

    Raises:
        StorageKeyNotFoundError: (a KeyError) an unknown key.
    """
    return await run(lambda client: client.async_lineage(keys, partition_id, fields))


def kv_lineage(
    keys: Sequence[str] | str, partition_id: str, fields: Sequence[str] | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Sync form of `async_kv_lineage`."""
    return run_sync(lambda client: client.async_lineage(keys, partition_id, fields))


# -- list, clear -----------------------------------------------------------------------------------


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """{partition: {key: tag}}, keys in creation order; of one partition or of all. {} for an unknown partition."""
    return await run(lambda client: client.async_kv_list(partition_id))


async def async_kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Delete rows. Unknown keys and partitions are ignored; the partition itself remains. ValueError for no keys."""
    return await run(lambda client: client.async_clear(keys, partition_id))


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Tag]]:
    """Sync form of `async_kv_list`."""
    return run_direct(lambda client: client.async_kv_list(partition_id))


def kv_clear(keys: Sequence[str] | str, partition_id: str) -> None:
    """Sync form of `async_kv_clear`."""
    return run_direct(lambda client: client.async_clear(keys, partition_id))


# -- checkpoints -----------------------------------------------------------------------------------


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write the whole table into a folder, as it is at one moment; writers need not stop.

    A checkpoint that is there already is replaced once the new one is whole.

    Args:
        checkpoint_dir: the folder; must be visible from the nodes of the controller and of all storage units.
        include_storage: False has no effect, as storage in memory would be lost.
        metadata: JSON values that `load_checkpoint` returns.

    Raises:
        NotOwnerError: (a RuntimeError) this process did not create the table.
        TableCheckpointError: nothing was written; names the reason.
    """
    from rlflow.transfer_queue import runtime

    runtime.check_owner("save a checkpoint")
    run_sync(lambda client: client.async_save_checkpoint(os.fspath(checkpoint_dir), include_storage, metadata))


def load_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Replace everything in the table by a checkpoint. The number of storage units may be another one.

    Watchers get a `WatchGapError` and start again from version 0; waits go on with the restored rows.

    Returns:
        The `metadata` given to `save_checkpoint`.

    Raises:
        NotOwnerError: (a RuntimeError) this process did not create the table.
        IncompleteCheckpointError: (a FileNotFoundError) there is no whole checkpoint; the table is unchanged.
        TableCheckpointError: it is damaged; the table is unchanged.
    """
    from rlflow.transfer_queue import runtime

    runtime.check_owner("load a checkpoint")
    return run_sync(lambda client: client.async_load_checkpoint(os.fspath(checkpoint_dir)))
