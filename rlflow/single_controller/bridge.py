"""The bridge between worker methods and the TransferQueue.

The controller passes a `KVBatchMeta` (row keys, no tensors). In the worker process the bridge

    fetches the fields that the method reads  ->  TensorDict, the meta's `extra_info` attached as NonTensorData
    runs the method
    writes the fields of its result back under the same keys  ->  KVBatchMeta with the result's NonTensorData

Invariants
    - Result rows are the meta's rows, in its order; a result of another length is refused.
    - A method writes what it declared and nothing else; what it read stays untouched.
    - One rank writes a row: of ranks that share a part (tensor-parallel peers) only the collecting one.
    - A batch without rows (metrics) and any other value pass through unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow import protocol
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError

if TYPE_CHECKING:
    from rlflow.transfer_queue import KVBatchMeta


def call_with_fields(
    method: Callable[..., Any], attributes: dict[str, Any], worker: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a method whose arguments contain a `KVBatchMeta`; see the module's docstring.

    Every meta is replaced by its data; the first one names the rows that are written.

    Raises:
        ContractError: the method returned other fields than declared, or another number of rows.
        MissingFieldError, StorageKeyNotFoundError: a row or a field that it reads is not in the queue.
    """
    call = _Call.of(method, attributes, worker, args, kwargs)
    new_args, new_kwargs = call.fetch(args, kwargs)
    return call.store(method(worker, *new_args, **new_kwargs))


async def call_with_fields_async(
    method: Callable[..., Any], attributes: dict[str, Any], worker: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """`call_with_fields` for `async def`; fetching and writing run in a thread, so that other coroutines go on."""
    call = _Call.of(method, attributes, worker, args, kwargs)
    new_args, new_kwargs = await asyncio.to_thread(call.fetch, args, kwargs)
    output = await method(worker, *new_args, **new_kwargs)
    return await asyncio.to_thread(call.store, output)


def join_metas(parts: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """Join metas that workers returned, in order; equal `extra_info` keys become a list with one value a part."""
    cls = type(parts[0])
    infos = [part.extra_info or {} for part in parts]
    gathered = {key: [info[key] for info in infos if key in info] for info in infos for key in info}
    bare = [cls(part.keys, part.tags, part.partition_id, part.fields) for part in parts]
    joined = cls.concat(bare)
    return cls(joined.keys, joined.tags, joined.partition_id, joined.fields, gathered)


@dataclass(frozen=True)
class _Call:
    """One call of a registered method with a meta among its arguments."""

    name: str
    attributes: dict[str, Any]
    worker: Any
    meta: KVBatchMeta

    @classmethod
    def of(
        cls,
        method: Callable[..., Any],
        attributes: dict[str, Any],
        worker: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> _Call:
        meta = next(value for value in (*args, *kwargs.values()) if protocol.is_kv_meta(value))
        return cls(f"{type(worker).__name__}.{method.__name__}", attributes, worker, meta)

    def fetch(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with every meta replaced by its data."""
        return [self._materialise(arg) for arg in args], {key: self._materialise(v) for key, v in kwargs.items()}

    def _materialise(self, value: Any) -> Any:
        return self._read(value) if protocol.is_kv_meta(value) else value

    def _read(self, meta: KVBatchMeta) -> TensorDict:
        reads, optional = self.attributes["reads"], self.attributes["optional_reads"]
        # Without a declaration: the fields the meta names, else all that its rows share.
        select = meta.fields if reads is None else [*reads, *optional]
        if not len(meta) or (select is not None and not select):
            data = TensorDict({}, batch_size=[len(meta)])
        else:
            data = tq.kv_batch_get(meta.keys, _partition(meta), select, missing_ok=optional)
        for key, value in (meta.extra_info or {}).items():
            if isinstance(value, (tu.NonTensorData, tu.NonTensorStack)):
                data.set(key, value)  # type: ignore[arg-type]
            else:
                tu.assign_non_tensor_data(data, key, value)
        return data

    def store(self, output: Any) -> Any:
        """Write a batched result and return its meta; None on a rank that does not collect."""
        if not isinstance(output, TensorDict) or not tu.is_batched(output):
            return output
        meta = self.meta
        if output.batch_size[0] != len(meta):
            raise ContractError(f"{self.name} got {len(meta)} rows and returned {output.batch_size[0]}; rows must stay")
        whole = tu.non_tensor_dict(output)
        fields = [str(key) for key in output.keys() if key not in whole]
        self._check_fields(fields)
        mesh = self.attributes["mesh"]
        if mesh is not None and not self.worker.query_collect_info(mesh):
            return None
        if fields and len(meta):
            tq.kv_batch_put(meta.keys, _partition(meta), fields=tu.get_keys(output, fields))
        return type(meta)(meta.keys, meta.tags, meta.partition_id, None, whole)

    def _check_fields(self, fields: Sequence[str]) -> None:
        writes, optional = self.attributes["writes"], self.attributes["optional_writes"]
        if writes is None:
            return
        surplus = sorted(set(fields) - set(writes) - set(optional))
        lacking = sorted(set(writes) - set(fields))
        if surplus or lacking:
            raise ContractError(
                f"{self.name} declares writes={list(writes)} but returned {sorted(fields)}: "
                + "; ".join(
                    part
                    for part in (
                        f"not declared: {surplus}" if surplus else "",
                        f"missing: {lacking} (declare it in optional_writes if it is not always there)"
                        if lacking
                        else "",
                    )
                    if part
                )
                + ". One object for the whole batch (metrics) goes in as NonTensorData."
            )


def _partition(meta: KVBatchMeta) -> str:
    if meta.partition_id is None:
        raise ContractError(f"a batch of {len(meta)} rows names no partition; its rows cannot be found in the queue")
    return meta.partition_id
