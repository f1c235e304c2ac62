"""Carriers: what may be split over workers, joined again, and awaited.

A carrier is a `TensorDict`, any object with `chunk(n)` and a `concat(parts)` on its class (`KVBatchMeta`,
`DataProto`), a `Future`, or a list of futures or object refs. Everything that splits or joins batches asks here, so
that a new carrier needs no change elsewhere.

Invariants
    - `concat(chunk(x, n))` holds the rows of `x` in their order.
    - Parts are equal: rows that do not divide are an error, because a rank without rows would leave its peers waiting
      in a collective.
    - Importing this module imports neither torch nor Ray: workers and controllers that move no tensors stay light.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rlflow.utils.errors import ContractError
from rlflow.utils.ray_utils import DEFAULT_TIMEOUT_S, ray_get

T = TypeVar("T")


def is_tensordict(value: Any) -> bool:
    """Whether `value` is a `TensorDict`."""
    # A value of that type can only exist where its module is loaded; asking must not load it.
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def is_data_proto(value: Any) -> bool:
    """Whether `value` is a `DataProto`."""
    module = sys.modules.get("rlflow.data_proto.proto")
    return module is not None and isinstance(value, module.DataProto)


def is_ref(value: Any) -> bool:
    """Whether `value` is a Ray object ref."""
    module = sys.modules.get("ray")
    return module is not None and isinstance(value, module.ObjectRef)


def is_kv_meta(value: Any) -> bool:
    """Whether `value` names rows of the TransferQueue (a `KVBatchMeta`)."""
    return all(hasattr(value, name) for name in ("keys", "tags", "partition_id", "extra_info"))


def _is_ref_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_ref(v) or isinstance(v, Future) for v in value)


def is_chunkable(value: Any) -> bool:
    """Whether `chunk` can split it."""
    if is_tensordict(value):
        return len(value.batch_size) > 0
    return isinstance(value, Future) or _is_ref_list(value) or (hasattr(value, "chunk") and hasattr(value, "concat"))


def is_concatable(values: Sequence[Any]) -> bool:
    """Whether `concat` can join them."""
    if not values:
        return False
    if _is_ref_list(list(values)) or all(is_tensordict(value) for value in values):
        return True
    return len({type(value) for value in values}) == 1 and hasattr(values[0], "concat")


def chunk(value: Any, n: int) -> list[Any]:
    """Split a carrier into `n` equal parts in order. Parts of tensors own their memory, so that sending one is cheap.

    Raises:
        ContractError: not a carrier, or its rows do not divide by `n`.
    """
    if not is_chunkable(value):
        raise ContractError(
            f"a {type(value).__name__} cannot be split over workers. Pass a TensorDict, a DataProto, a KVBatchMeta "
            "or a Future; "
            "options travel inside the batch (NonTensorData, or KVBatchMeta.extra_info)."
        )
    if isinstance(value, Future):
        return value.chunk(n)
    if isinstance(value, list):
        return Future.concat(value).chunk(n)
    if hasattr(value, "__len__") and len(value) % n:
        raise ContractError(
            f"{len(value)} rows ({type(value).__name__}) cannot be split into {n} equal parts. Pad the batch to "
            f"a multiple of {n}, or change its size."
        )
    if is_tensordict(value):
        from rlflow.utils import tensordict_utils as tu

        return [tu.contiguous(part) for part in tu.chunk_tensordict(value, n)]
    return list(value.chunk(n))


def concat(parts: Sequence[Any]) -> Any:
    """Join parts of one carrier in order; of `TensorDict`s without rows (metrics) the first is returned.

    Raises:
        ContractError: nothing to join, parts of different types, or parts that are no carriers.
    """
    if not is_concatable(parts):
        kinds = sorted({type(part).__name__ for part in parts}) or ["nothing"]
        raise ContractError(
            f"cannot join {', '.join(kinds)} from {len(parts)} workers; all must return one kind of carrier"
        )
    if _is_ref_list(list(parts)):
        return Future.concat(parts)
    if is_tensordict(parts[0]):
        from rlflow.utils import tensordict_utils as tu

        return tu.concat_tensordict(list(parts))
    return type(parts[0]).concat(list(parts))


def pad_rows(value: Any, divisor: int) -> tuple[Any, int]:
    """(carrier, pad): a padded copy whose rows divide by `divisor`, made by repeating the last row.

    Only for carriers that ask for it (`is_padding_enabled()` is true) and that take a list of rows as index; others are
    returned as they are, with pad 0.
    """
    enabled = getattr(value, "is_padding_enabled", None)
    if enabled is None or not enabled() or not len(value):
        return value, 0
    size = len(value)
    pad = -size % divisor
    return (value[[*range(size), *[size - 1] * pad]], pad) if pad else (value, 0)


def drop_rows(value: Any, pad: int) -> Any:
    """`value` without its last `pad` rows; the inverse of `pad_rows` on a result."""
    if not pad:
        return value
    if isinstance(value, Future):
        return value.then(lambda result: drop_rows(result, pad))
    if is_tensordict(value):
        from rlflow.utils import tensordict_utils as tu

        return tu.unpad(value, pad) if tu.is_batched(value) else value
    return value[: len(value) - pad] if hasattr(value, "__len__") and hasattr(value, "__getitem__") else value


class Future(Generic[T]):
    """A result that workers are still computing: object refs, and how their values become one.

    A future can be passed to another worker group before it is done; the receiving worker resolves it, so the data does
    not pass through the controller.

    Args:
        refs: object refs, one a worker.
        collect_fn: list of their values -> the result; None: `concat`. Must pickle to cross processes.
        fetch: `(refs, timeout_s) -> values`, to turn failures into errors that name the worker; None: `ray_get`.
        what: what is awaited, for error messages.
        timeout_s: deadline of `get` unless it is given there.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        collect_fn: Callable[[list[Any]], T] | None = None,
        *,
        fetch: Callable[[list[Any], float | None], list[Any]] | None = None,
        what: str = "a remote result",
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.futures = list(refs)
        self.collect_fn = collect_fn
        self._fetch = fetch
        self._what = what
        self._timeout_s = timeout_s

    def get(self, timeout_s: float | None = None) -> T:
        """Wait for all workers and collect; errors of a worker are raised here. `DeadlineError` when time is over."""
        timeout = self._timeout_s if timeout_s is None else timeout_s
        if self._fetch is not None:
            values = self._fetch(self.futures, timeout)
        else:
            values = ray_get(self.futures, what=self._what, timeout_s=timeout)
        return self.collect_fn(values) if self.collect_fn is not None else concat(values)

    def then(self, function: Callable[[T], Any]) -> Future[Any]:
        """A future of `function(result)`; nothing is computed before its `get`."""
        return _Derived([self], lambda results: function(results[0]))

    def chunk(self, n: int) -> list[Future[Any]]:
        """Futures of the `n` equal parts of the result; sizes are checked when a part is resolved."""
        return [_Derived([self], partial(_part, i=i, n=n)) for i in range(n)]

    @staticmethod
    def concat(parts: Sequence[Any]) -> Future[Any]:
        """A future of the joined results of futures and object refs, in order."""
        return _Derived([part if isinstance(part, Future) else Future([part], _only) for part in parts], concat)

    def __repr__(self) -> str:
        return f"Future({self._what}, {len(self.futures)} refs)"


class _Derived(Future[Any]):
    """What a function makes of the results of other futures."""

    def __init__(self, sources: Sequence[Future[Any]], function: Callable[[list[Any]], Any]) -> None:
        super().__init__([ref for source in sources for ref in source.futures], function, what=sources[0]._what)
        self._sources = list(sources)

    def get(self, timeout_s: float | None = None) -> Any:
        results = [source.get(timeout_s) for source in self._sources]
        return self.collect_fn(results) if self.collect_fn is not None else results


def _part(results: list[Any], i: int, n: int) -> Any:
    return chunk(results[0], n)[i]


def _only(values: list[Any]) -> Any:
    return values[0]


# Names of `rlflow.data_proto` that can be imported from here; it needs torch, so it is loaded when one is asked for.
DATA_PROTO_NAMES = frozenset(
    {
        "BatchData",
        "DataProto",
        "DataProtoConfig",
        "DataProtoFuture",
        "DataProtoItem",
        "all_gather_data_proto",
        "collate_fn",
        "fold_batch_dim",
        "list_of_dict_to_dict_of_list",
        "pad_dataproto_to_divisor",
        "unfold_batch_dim",
        "union_numpy_dict",
        "union_tensor_dict",
        "unpad_dataproto",
    }
)


def __getattr__(name: str) -> Any:
    if name in DATA_PROTO_NAMES:
        return getattr(importlib.import_module("rlflow.data_proto"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
