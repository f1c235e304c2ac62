"""`DataProtoFuture` and `BatchData`: the older names of `rlflow.protocol.Future` and of its functions on carriers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlflow import protocol


class _EveryFuture(type):
    """Results of calls are `protocol.Future`s; code that asks whether one is a `DataProtoFuture` hears yes."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, protocol.Future)


class DataProtoFuture(protocol.Future[Any], metaclass=_EveryFuture):
    """A batch that workers are still computing.

    Args:
        collect_fn: list of the workers' values -> one value; None: they are concatenated.
        futures: object refs, one a worker.
        dispatch_fn: applied to the collected value.
        timeout_s: deadline of `get` in seconds, unless it is given there.
    """

    def __init__(
        self,
        collect_fn: Callable[[list[Any]], Any] | None,
        futures: Sequence[Any],
        dispatch_fn: Callable[[Any], Any] | None = None,
        timeout_s: float | None = protocol.DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(futures, collect_fn, timeout_s=timeout_s)
        self.dispatch_fn = dispatch_fn

    def get(self, timeout_s: float | None = None) -> Any:
        """Wait for all workers, collect, then apply `dispatch_fn`. `DeadlineError` when time is over."""
        value = super().get(timeout_s)
        return value if self.dispatch_fn is None else self.dispatch_fn(value)


class BatchData:
    """A carrier, or a list of parts of one, with the questions and functions of `rlflow.protocol` as methods."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def is_chunkable(self) -> bool:
        """Whether `chunk` can split it."""
        return protocol.is_chunkable(self.data)

    def is_concatable(self) -> bool:
        """Whether it is a list (or tuple) whose items `concat` can join."""
        return isinstance(self.data, (list, tuple)) and protocol.is_concatable(self.data)

    def chunk(self, chunks: int) -> list[Any]:
        """See `protocol.chunk`."""
        return protocol.chunk(self.data, chunks)

    def concat(self) -> Any:
        """See `protocol.concat`."""
        return protocol.concat(self.data)
