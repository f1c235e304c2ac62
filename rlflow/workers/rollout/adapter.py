"""A rollout server as a trainer's rank sees it: it sleeps, wakes up and takes weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlflow.checkpoint_engine.base import build_sender
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.ray_utils import ray_await
from rlflow.workers.rollout.base import BaseRollout

if TYPE_CHECKING:
    from torch import Tensor

CALL_TIMEOUT_S = 300.0


class ServerAdapter(BaseRollout):
    """Talks to one server, whose handle it is given: servers have no name to be found by.

    Args:
        server: handle of the server on this rank's node; None on a rank that only gathers.
        rank, world_size: of this process among those that send.
    """

    def __init__(
        self,
        config: Any,
        model_config: Any,
        device_mesh: Any = None,
        *args: Any,
        server: Any = None,
        rank: int = 0,
        world_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        self._server = server
        self._sender = build_sender(config, rank, world_size)

    async def resume(self, tags: list[str]) -> None:
        await self._call("wake_up", tags)

    async def release(self) -> None:
        await self._call("sleep")

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> Any:
        """Returns the `WeightReceipt` that both ends agree on.

        Raises:
            ConfigError: another wire format than whole tensors by name.
            WeightSyncError: the server does not hold what was sent.
        """
        if wire_format != "named_tensors":
            raise ConfigError(f"wire_format={wire_format!r} is not in this version; use named_tensors")
        return await self._sender.send(iter(weights), self._server, int(kwargs.get("global_steps") or 0))

    async def _call(self, method: str, *args: Any) -> None:
        if self._server is None:
            raise ContractError(f"this rank has no rollout server to {method}; pass server=handle")
        await ray_await(getattr(self._server, method).remote(*args), what=method, timeout_s=CALL_TIMEOUT_S)
