"""What a checkpoint engine is, and the registry of them.

A checkpoint engine moves the trainer's weights to rollout replicas. There is one object at each end:

    trainer ranks                                          one beside each replica (`worker.CheckpointEngineWorker`)
    prepare()  ──metadata──>  build_topology  <──metadata──  prepare()
    init_process_group(...)                                  init_process_group(...)
    send_weights(weights, v)  ═══════ tensors ═══════>       receive_weights(v) ──> the server of the replica
    finalize()                                               finalize()

The last hop, into a server on the same node, is always the same (`shared_memory.SharedMemorySender`):

    begin_update(version)
    load_bucket(metas, path) ... load_bucket               the bytes lie in memory that `path` names
    finish_update(version, count, checksum)  ──>  WeightReceipt of what the server holds

A server is anything with these remote methods; this package does not know rollout engines. The engine `naive` has that
hop only: trainer rank and server share a node.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from rlflow.checkpoint_engine.phases import PhaseTimeouts
from rlflow.checkpoint_engine.receipt import BucketReceipt, TensorMeta, WeightReceipt
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import import_external_libs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BucketReceipt",
    "CheckpointEngine",
    "CheckpointEngineRegistry",
    "CheckpointEngineWithCache",
    "TensorMeta",
    "WeightReceipt",
    "WeightSender",
    "build_engine",
    "build_sender",
]

StoredBucket = tuple[list[TensorMeta], str]
"""Tensors that lie in a file: what `load_bucket` of a server takes."""


def exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Take what is left of an export: gathering a tensor is collective, so the other ranks wait for this one."""
    for _ in weights:
        pass


class CheckpointEngine(ABC):
    """One end of a transfer.

    Built-in engines take `(bucket_size, is_master)` and the entries of `rollout.checkpoint_engine.engine_kwargs.NAME`.

    Attributes:
        wire_format: how `receive_weights` delivers; "named_tensors" is the only one of this version.
        streams: receivers run while the sender sends. False: after it, because there is nothing to see before.
        timeouts: deadlines of the phases; set by who builds the engine.
    """

    wire_format: ClassVar[str] = "named_tensors"
    streams: ClassVar[bool] = True
    timeouts: PhaseTimeouts = PhaseTimeouts()

    @abstractmethod
    def prepare(self) -> Any:
        """Get buffers and addresses ready; returns what the other ends must know about this one."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group` for each rank: those of the trainer, and those of the receivers.

        Args:
            metadata: answers of `prepare`, trainer ranks first.
        """

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Join the others. Blocks until all are there, or a deadline is over."""

    @abstractmethod
    def finalize(self) -> None:
        """A transfer ended, well or not: free what the next one does not reuse. May be called twice."""

    @abstractmethod
    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Send all tensors; called on every trainer rank, each with its iterator.

        Advancing it may be a collective operation, so every rank must exhaust it. Floating-point tensors have their
        type on the wire already. Returns metrics, or None.
        """

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """The tensors as they come; each is valid until the next one is asked for."""

    def stored_buckets(self, global_steps: int | None = None) -> list[StoredBucket] | None:
        """Receiver: the tensors where they lie, for an engine that transfers files; None: use `receive_weights`."""
        return None


class CheckpointEngineWithCache(CheckpointEngine):
    """An engine whose receiving end keeps the last weights, so that a replica can be updated without the trainer."""

    @abstractmethod
    def get_weights(self) -> AsyncIterator[tuple[str, Tensor]]:
        """The tensors of the last transfer."""


class WeightSender(Protocol):
    """What gives a trainer rank's tensors to the server on its node; `shared_memory.SharedMemorySender`."""

    async def send(self, params: Any, server: Any, version: int) -> WeightReceipt | None:
        """Send all tensors as weight version `version`; see `SharedMemorySender.send`."""


E = TypeVar("E", bound=type[CheckpointEngine])

# Modules that register the engines of this package, imported on first use.
_BUILT_IN = {
    "naive": "rlflow.checkpoint_engine.naive",
    "broadcast": "rlflow.checkpoint_engine.broadcast",
    "nccl": "rlflow.checkpoint_engine.broadcast",
    "disk": "rlflow.checkpoint_engine.disk",
}


class CheckpointEngineRegistry:
    """Checkpoint engines by the name in `rollout.checkpoint_engine.backend`."""

    _engines: ClassVar[dict[str, type[CheckpointEngine]]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[E], E]:
        """Decorator of an engine class."""

        def add(engine: E) -> E:
            cls._engines[backend] = engine
            return engine

        return add

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        """The class; `KeyError` for a name that nobody registered."""
        if backend not in cls._engines and backend in _BUILT_IN:
            importlib.import_module(_BUILT_IN[backend])
        return cls._engines[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        """An engine.

        Raises:
            ConfigError: (a ValueError) a name that nobody registered.
        """
        return cls.require(backend)(*args, **kwargs)

    @classmethod
    def require(cls, backend: str) -> type[CheckpointEngine]:
        """`get` with the error of `new`."""
        try:
            return cls.get(backend)
        except KeyError:
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={backend} is not registered. Known: {', '.join(cls.names())}. An "
                "engine of your own: @CheckpointEngineRegistry.register(NAME) on its class, in the module that "
                "rollout.checkpoint_engine.custom_backend_module names."
            ) from None

    @classmethod
    def names(cls) -> list[str]:
        """All known names."""
        return sorted({*_BUILT_IN, *cls._engines})


def build_engine(rollout_config: Any, *, is_master: bool) -> CheckpointEngine:
    """One end of the engine that `rollout.checkpoint_engine` configures.

    Args:
        is_master: trainer rank 0.
    """
    config = rollout_config.checkpoint_engine
    import_external_libs(config.get("custom_backend_module", None))
    backend = str(config.backend)
    options = dict((config.get("engine_kwargs", None) or {}).get(backend) or {})
    bucket = int(config.update_weights_bucket_megabytes * 2**20)
    engine = CheckpointEngineRegistry.new(backend, bucket_size=bucket, is_master=is_master, **options)
    engine.timeouts = PhaseTimeouts.from_config(config)
    return engine


def build_sender(rollout_config: Any, rank: int, world_size: int) -> WeightSender:
    """What this trainer rank sends to the server on its node with."""
    from rlflow.checkpoint_engine.shared_memory import SharedMemorySender

    return SharedMemorySender(rollout_config, rank, world_size)
