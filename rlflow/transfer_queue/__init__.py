# ruff: noqa: F401 - the imports below are for type checkers; at run time `__getattr__` does them on demand
"""The table of trajectories, shared by all processes of a run.

| word | meaning |
|---|---|
| row | one sample; has a string key and a *tag* (a small dict of plain values) |
| field | one column; a *cell* is the value of a field in a row, a tensor or a plain Python object |
| partition | a named set of rows (`train`, `val`), with a version that grows with every change of a key or a tag |
| controller | one process that knows keys, tags and where each cell lives, never a cell's content |
| block | what one put wrote: immutable columns in one storage unit |

Invariants
    - A put is one write of a block, then one commit at the controller. Readers see all of it or nothing of it, and a
      refused put leaves no trace.
    - Tags are merged where they live; a data put never touches them.
    - Nothing polls: a watcher sleeps in the controller until its partition changes.
    - Every remote call has a deadline, and only the process that created the table can close it.

```python
import rlflow.transfer_queue as tq

tq.init()                                                        # creates the table, or attaches to the running one
tq.kv_put("e0r0a0", "train", tag={"status": "pending"})
tq.kv_batch_put(["e0r0a0_0_0"], "train", fields=rows, tags=[{"status": "success"}])
version, changes = tq.kv_watch("train", since_version=0, timeout_s=60)
batch = tq.kv_batch_get(["e0r0a0_0_0"], "train", select_fields=["responses"])
tq.close()
```

Modules, by what they are for
    what callers use: `api` (kv calls, checkpoints), `waiting` (watch, wait), `predicate`, `errors`, `settings`
        (config); `meta` and `batch_meta` with `schema` (batches by key and by row number); `samplers`
    a process's side: `runtime` (connecting), `calls` (running an operation), `client` (put, get) and its `low_level`
        part, `arguments` (checks), `ports` (calls with deadlines), `lane` (the short way to a controller on the
        same node), `wire` and `tags` (messages), `lineage`
    bytes: `column`, `block` (layout), `codec` (tensors), `objects` (anything else)
    storage: `storage` (interface), `storage_unit`, `storage_local`, `storage_simple` and `storage_simple_client`;
        shared memory in `segment`, `arena` (the unit's side), `lease` (the writer's) and `reading`
    controller: `controller`, `controller_rows` (row numbers), `lane_server` (its socket), `commit` (what a put
        sends), `capacity` (who waits for room), `signals`, `matches`, `fetch`
    its bookkeeping: `table`, `table_rows`, `partition`, `rows`, `fields`, `locate`, `changes`
    checkpoints: `snapshot` (metadata), `checkpoint` (files)
    metrics: `meter`, `exporter`

Importing this package loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.transfer_queue.api import (
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_clear,
        async_kv_lineage,
        async_kv_list,
        async_kv_put,
        close,
        get_client,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_clear,
        kv_lineage,
        kv_list,
        kv_put,
        load_checkpoint,
        save_checkpoint,
    )
    from rlflow.transfer_queue.batch_meta import BatchMeta
    from rlflow.transfer_queue.client import TransferQueueClient
    from rlflow.transfer_queue.errors import (
        CapacityError,
        DtypeConflictError,
        FetchTimeoutError,
        IncompleteCheckpointError,
        MissingFieldError,
        NotOwnerError,
        NotReadyError,
        QueueArgumentError,
        QueueNotInitializedError,
        QueueRequestError,
        QueueTypeError,
        QueueUnavailableError,
        StorageKeyNotFoundError,
        StorageUnitLostError,
        TableCheckpointError,
        TagConflictError,
        TransferQueueError,
        WatchGapError,
    )
    from rlflow.transfer_queue.meta import KVBatchMeta
    from rlflow.transfer_queue.predicate import Predicate
    from rlflow.transfer_queue.samplers import (
        BaseSampler,
        GRPOGroupNSampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
    )
    from rlflow.transfer_queue.schema import extract_field_schema
    from rlflow.transfer_queue.waiting import (
        async_kv_wait,
        async_kv_watch,
        async_wait,
        async_watch,
        kv_wait,
        kv_watch,
        wait,
        watch,
    )

_HOMES = {
    "api": (
        "async_kv_batch_get async_kv_batch_get_by_meta async_kv_batch_put async_kv_clear async_kv_lineage "
        "async_kv_list async_kv_put close get_client get_metrics_endpoint init kv_batch_get kv_batch_get_by_meta "
        "kv_batch_put kv_clear kv_lineage kv_list kv_put load_checkpoint save_checkpoint"
    ),
    "batch_meta": "BatchMeta",
    "client": "TransferQueueClient",
    "errors": (
        "CapacityError DtypeConflictError FetchTimeoutError IncompleteCheckpointError MissingFieldError NotOwnerError "
        "NotReadyError QueueArgumentError QueueNotInitializedError QueueRequestError QueueTypeError "
        "QueueUnavailableError StorageKeyNotFoundError StorageUnitLostError TableCheckpointError TagConflictError "
        "TransferQueueError WatchGapError"
    ),
    "meta": "KVBatchMeta",
    "predicate": "Predicate",
    "schema": "extract_field_schema",
    "waiting": "async_kv_wait async_kv_watch async_wait async_watch kv_wait kv_watch wait watch",
    "samplers": "BaseSampler GRPOGroupNSampler RankAwareSampler SeqlenBalancedSampler SequentialSampler",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from rlflow import __version__

        return __version__
    if name in ("StreamingDataset", "StreamingDataLoader"):
        raise ImportError(
            f"rlflow.transfer_queue has no {name} yet; loop over get_client().get_meta(mode='fetch', ...) and get_data "
            "instead (docs/transfer_queue_differences.md)"
        )
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
