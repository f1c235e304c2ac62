"""One weight update of one rollout server, call by call, and what an unanswered call means."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from rlflow.checkpoint_engine.phases import Phase, PhaseTimeouts
from rlflow.checkpoint_engine.receipt import TensorMeta, WeightReceipt
from rlflow.utils.errors import DeadlineError, WeightSyncError
from rlflow.utils.ray_utils import ray_await


class ServerLink:
    """The server's end of `base`'s picture.

    A server that dies, or leaves a bucket unanswered for half of the time a transfer may take, is lost: the error says
    so (`WeightSyncError.lost`), early enough for the others to end within that time.

    Attributes:
        buckets_at_once: how many buckets may be under way to the server.
    """

    def __init__(self, server: Any, version: int, timeouts: PhaseTimeouts) -> None:
        self._server, self._version, self._timeouts = server, version, timeouts
        self.buckets_at_once = 1

    async def begin(self, lora: dict[str, Any] | None = None) -> None:
        """Start; with `lora` (PEFT's config) the tensors are parts of an adapter."""
        arguments = (self._version,) if lora is None else (self._version, lora)
        answer = await self._answer(self._server.begin_update.remote(*arguments), "taking weights", Phase.PREPARE)
        self.buckets_at_once = int(answer or 1)

    async def load(self, metas: list[TensorMeta], path: str) -> None:
        """One bucket; on return the server has copied it."""
        got = await self._answer(
            self._server.load_bucket.remote(metas, path), f"loading {len(metas)} tensors", Phase.TRANSFER, 0.5
        )
        sent = sum(meta.size for meta in metas)
        if got != sent:
            raise WeightSyncError(
                f"A rollout server loaded {got} bytes of a bucket of {sent}: {metas[0].name} to {metas[-1].name}.",
                phase=Phase.TRANSFER.value,
                tensors=tuple(meta.name for meta in metas),
            )

    async def finish(self, tensor_count: int, checksum: int) -> WeightReceipt:
        """End the update; the server's receipt."""
        call = self._server.finish_update.remote(self._version, tensor_count, checksum)
        receipt: WeightReceipt = await self._answer(call, "its receipt", Phase.VERIFY)
        return receipt

    async def _answer(self, call: Awaitable[Any], what: str, phase: Phase, share: float = 1.0) -> Any:
        from ray.exceptions import RayActorError

        limit = self._timeouts.of(phase) * share
        try:
            return await ray_await(call, what=f"a rollout server, {what}", timeout_s=limit)
        except WeightSyncError as error:
            # From a remote call it comes wrapped, with the server's traceback for its text.
            cause = getattr(error, "cause", None)
            found = cause if isinstance(cause, WeightSyncError) else error
            found.phase = found.phase or phase.value
            raise found from None
        except RayActorError as error:
            raise self._lost(f"died before {what} was done", phase) from error
        except DeadlineError as error:
            raise self._lost(f"did not answer within {limit:g} s, {what}", phase) from error

    def _lost(self, how: str, phase: Phase) -> WeightSyncError:
        text = f"The rollout server {how} (weight version {self._version}, `{phase.value}`)."
        return WeightSyncError(text, phase=phase.value, lost=True)
