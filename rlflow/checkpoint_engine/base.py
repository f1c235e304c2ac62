"""The vocabulary of a weight sync, and the registry of the ways to do one.

    trainer ranks                                     rollout server of a replica
    leader                                ───────>    begin_update(version)
    iterate (name, full tensor) together  ──bytes──>  load_bucket(metas, path) ... load_bucket
    leader: count, bytes, checksum        ───────>    finish_update(version, count, checksum)
    compare  <───────── WeightReceipt of what the server's parameters hold ─────────

A server is anything with these three remote methods; this package does not know rollout engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.utils.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorMeta:
    """A tensor inside a bucket: `offset` and `size` in bytes, `dtype` as torch names it ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


@dataclass(frozen=True)
class WeightReceipt:
    """One end's weights: `checksum` as in `checksum.py`, `total_bytes` on the wire, `holder` for messages."""

    version: int
    tensor_count: int
    total_bytes: int
    checksum: int
    seconds: float = 0.0
    holder: str = ""

    def same_weights(self, other: WeightReceipt) -> bool:
        """Whether both describe the same version of the same tensors."""
        return (self.version, self.tensor_count, self.total_bytes, self.checksum) == (
            other.version,
            other.tensor_count,
            other.total_bytes,
            other.checksum,
        )

    def require_same(self, got: WeightReceipt) -> None:
        """Compare the sender's receipt (self) with the one of a server.

        Raises:
            WeightSyncError: names the holder, and what was expected and found.
        """
        if not self.same_weights(got):
            raise WeightSyncError(
                f"{got.holder or 'A rollout server'} does not hold the weights that were sent: expected "
                f"{self._text()}, got {got._text()}. Training stops here: its samples would come from other weights."
            )

    def _text(self) -> str:
        return (
            f"version {self.version}, {self.tensor_count} tensors, {self.total_bytes} bytes, "
            f"checksum {self.checksum:016x}"
        )


class WeightSender(ABC):
    """The trainer's end, one object in each rank."""

    @abstractmethod
    async def send(self, params: Iterator[tuple[str, Tensor]], server: Any, version: int) -> WeightReceipt | None:
        """Send all tensors as weight version `version`.

        Every rank calls it with its iterator (advancing it may be a collective operation, so every rank must exhaust
        it); only a rank with a `server` handle sends.

        Returns:
            The receipt that both ends agree on; None on a rank without a server.

        Raises:
            WeightSyncError: the server holds something else, or refused a tensor.
        """


class CheckpointEngineRegistry:
    """Senders by the name in `rollout.checkpoint_engine.backend`. Loaders are called on first use."""

    _loaders: dict[str, Callable[[], type[WeightSender]]] = {}

    @classmethod
    def register(cls, backend: str, loader: Callable[[], type[WeightSender]]) -> None:
        """`loader()` returns the sender class, built as `(rollout_config, rank, world_size)`."""
        cls._loaders[backend] = loader

    @classmethod
    def get(cls, backend: str) -> type[WeightSender]:
        """The sender class; `ConfigError` for a name nobody registered."""
        try:
            return cls._loaders[backend]()
        except KeyError:
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={backend} is not in this version. Known: "
                f"{', '.join(sorted(cls._loaders))}. `naive` moves weights between processes of one node."
            ) from None


def _shared_memory() -> type[WeightSender]:
    from rlflow.checkpoint_engine.shared_memory import SharedMemorySender

    return SharedMemorySender


CheckpointEngineRegistry.register("naive", _shared_memory)


def build_sender(rollout_config: Any, rank: int, world_size: int) -> WeightSender:
    """The sender of this rank for `rollout.checkpoint_engine.backend`."""
    backend = str(rollout_config.checkpoint_engine.backend)
    return CheckpointEngineRegistry.get(backend)(rollout_config, rank, world_size)  # type: ignore[call-arg]
