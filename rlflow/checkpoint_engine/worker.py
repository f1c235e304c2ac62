"""The receiving end of a checkpoint engine: a process beside a replica that hands what arrives to its server."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from rlflow.checkpoint_engine.base import CheckpointEngine, build_engine
from rlflow.checkpoint_engine.receipt import WeightReceipt
from rlflow.checkpoint_engine.shared_memory import SharedMemorySender
from rlflow.single_controller.base import Dispatch, Worker, WorkerContext, register
from rlflow.utils.errors import ContractError


class CheckpointEngineWorker(Worker):
    """One for each replica on devices of its own, on the node of its (first) server.

    Args:
        rollout_config, model_config: the nodes `actor_rollout_ref.rollout` and `.model`.
        server_adapter: handle of the server that it feeds.
        replica_rank: of that replica.
        context: place in a worker group; None: from the environment.
    """

    def __init__(
        self,
        rollout_config: Any,
        model_config: Any,
        server_adapter: Any = None,
        *args: Any,
        replica_rank: int = 0,
        context: WorkerContext | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(context=context)
        self._server, self._replica_rank = server_adapter, replica_rank
        self.checkpoint_engine: CheckpointEngine = build_engine(rollout_config, is_master=False)
        self._sender = SharedMemorySender(rollout_config, replica_rank, 1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None) -> WeightReceipt:
        """Receive a version and hand it to the server; the receipt of what the server holds.

        A server that fails does not end the reception: the other receivers go on.
        """
        if self._server is None:
            raise ContractError("a CheckpointEngineWorker without server_adapter has no server to feed")
        version = int(global_steps or 0)
        stored = self.checkpoint_engine.stored_buckets(version)
        if stored is not None:
            return await self._sender.send_stored(stored, self._server, version)
        receipt = await self._sender.send(self.checkpoint_engine.receive_weights(version), self._server, version)
        assert receipt is not None
        return receipt

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    async def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """`prepare`, `init_process_group` or `finalize` of this end, in a thread: joining a group blocks."""
        return await asyncio.to_thread(getattr(self.checkpoint_engine, method), *args, **kwargs)

    async def ping(self) -> int:
        """Whether this process is alive: its pid."""
        return os.getpid()

    def get_replica_rank(self) -> int:
        """Rank of the replica."""
        return self._replica_rank

    def is_leader_rank(self) -> bool:
        """Whether this process feeds the replica; with one process a replica it always does."""
        return True
