"""What travels in a weight sync, and the proof that it arrived."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.utils.errors import WeightSyncError

_SHOWN = 5


@dataclass(frozen=True)
class TensorMeta:
    """Where a tensor, or a piece of one, lies in a bucket. Offsets and sizes in bytes.

    Attributes:
        name: under which the trainer exports it (Hugging Face's, PEFT's for a part of an adapter).
        shape: of the whole tensor.
        dtype: as torch names it ("bfloat16").
        chunk_offset: where the piece begins in the tensor; 0 for a whole one.
        chunk_size: of the piece.
        offset: of the piece in the bucket.
        digest: of the whole tensor (`checksum.tensor_digest`), where the sender knows it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunk_offset: int
    chunk_size: int
    offset: int
    digest: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the piece in the bucket."""
        return self.chunk_size


@dataclass(frozen=True)
class BucketReceipt:
    """One bucket as it was sent and confirmed: `checksum` over its tensors as in `checksum.combine`."""

    tensor_count: int
    total_bytes: int
    checksum: int


@dataclass(frozen=True)
class WeightReceipt:
    """One end's weights.

    Attributes:
        version: of the weights.
        tensor_count, total_bytes, checksum: of all tensors (`checksum.combine`); bytes on the wire.
        seconds: this end's time.
        holder: who it is, for messages.
        names: tensors that the engine reports as loaded; None where it only counts them.
        buckets: what each bucket held; the sender's.
        lora_modules: modules that an adapter of this version is bound to; None without an adapter.
        from_parameters: whether `checksum` is of what the engine's parameters hold. False: of the bytes that arrived,
            because the engine repacks its parameters; a canary then has to show that it computes with them.
        metrics: figures of this end by name, seconds of its phases among them.
    """

    version: int
    tensor_count: int
    total_bytes: int
    checksum: int
    seconds: float = 0.0
    holder: str = ""
    names: tuple[str, ...] | None = None
    buckets: tuple[BucketReceipt, ...] = ()
    lora_modules: tuple[str, ...] | None = None
    from_parameters: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)

    def same_weights(self, other: WeightReceipt) -> bool:
        """Whether both describe the same version of the same tensors."""
        return self._weights() == other._weights()

    def require_same(self, got: WeightReceipt, sent_names: Collection[str] = ()) -> None:
        """Compare the sender's receipt (self) with the one of a server.

        Args:
            sent_names: what was sent, to be compared with the names that the engine reports.

        Raises:
            WeightSyncError: names the holder, what was expected and found, and the tensors where the names differ.
        """
        holder = got.holder or "A rollout server"
        if sent_names and got.names is not None and (odd := _difference(sent_names, got.names)):
            raise WeightSyncError(
                f"{holder} did not load the tensors that were sent: {odd[0]}.", phase="verify", tensors=odd[1]
            )
        if not self.same_weights(got):
            raise WeightSyncError(
                f"{holder} does not hold the weights that were sent: expected {self._text()}, got {got._text()}. "
                "Training stops here: its samples would come from other weights.",
                phase="verify",
            )

    def _weights(self) -> tuple[Any, ...]:
        return self.version, self.tensor_count, self.total_bytes, self.checksum

    def _text(self) -> str:
        return (
            f"version {self.version}, {self.tensor_count} tensors, {self.total_bytes} bytes, "
            f"checksum {self.checksum:016x}"
        )


def require_modules(modules: Collection[str] | None, holder: str) -> None:
    """`WeightSyncError` unless an adapter that was sent is bound to at least one module."""
    if not modules:
        raise WeightSyncError(
            f"{holder} took a LoRA adapter but bound it to no module, so it would serve the base model. The names in "
            "model.target_modules must be modules of the served model.",
            phase="verify",
        )


def some(names: Collection[str]) -> str:
    """The first names of many, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def _difference(sent: Collection[str], loaded: Collection[str]) -> tuple[str, tuple[str, ...]] | None:
    missing, unknown = set(sent) - set(loaded), set(loaded) - set(sent)
    if not missing and not unknown:
        return None
    parts = [f"{len(missing)} missing ({some(missing)})"] if missing else []
    parts += [f"{len(unknown)} that nobody sent ({some(unknown)})"] if unknown else []
    return "; ".join(parts), tuple(sorted(missing | unknown))
