"""What the controller makes of the receipts of a sync: do all replicas hold the same weights, and compute with them?"""

from __future__ import annotations

from typing import Any

from rlflow.checkpoint_engine.canary import Canary, check_canary, default_tolerance
from rlflow.checkpoint_engine.phases import Phase
from rlflow.checkpoint_engine.receipt import WeightReceipt
from rlflow.checkpoint_engine.sync_run import SyncRun
from rlflow.utils.errors import WeightSyncError
from rlflow.utils.ray_utils import ray_await


class Proof:
    """The phase `verify` over all replicas.

    Attributes:
        metrics: of the last check.
    """

    def __init__(self, config: Any, actor_wg: Any) -> None:
        self._actor_wg = actor_wg
        self._when = str(config.get("canary", None) or "auto")
        tolerance = config.get("canary_tolerance", None)
        self._tolerance = None if tolerance is None else float(tolerance)
        self._last: WeightReceipt | None = None
        self.metrics: dict[str, float] = {}

    async def check(self, run: SyncRun, receipts: dict[int, WeightReceipt]) -> None:
        """Compare the receipts with each other and with those of the version so far; ask for the canary where needed.

        Raises:
            WeightSyncError: nobody is left, or all replicas agree on other weights than this version had.
        """
        self.metrics = {}
        self._agree(run, receipts)
        asked = [r for r in run.replicas if self._when == "always" or not receipts[r.replica_rank].from_parameters]
        if asked and self._when != "never":
            async with run.clock.phase(Phase.VERIFY):
                canary, tolerance = await self._canary(run)
            errors = await run.each(
                Phase.VERIFY,
                lambda replica: check_canary(
                    canary,
                    replica.server_handle,
                    replica_rank=replica.replica_rank,
                    version=run.version,
                    tolerance=tolerance,
                    timeout_s=run.timeouts.verify,
                ),
                replicas=asked,
            )
            self.metrics = {"canary_error": max(errors)} if errors else {}
        if run.replicas:
            self._last = receipts[run.replicas[0].replica_rank]

    def _agree(self, run: SyncRun, receipts: dict[int, WeightReceipt]) -> None:
        if not run.replicas:
            return
        first = receipts[run.replicas[0].replica_rank]
        if run.partial and self._last is not None and self._last.version == run.version:
            # The others hold this version already, from a sync at which the trainer may have had other weights.
            first = self._last
        for replica in list(run.replicas):
            try:
                first.require_same(receipts[replica.replica_rank])
            except WeightSyncError as error:
                if run.partial:
                    error = WeightSyncError(f"{error} (The trainer has newer weights; wait for the next sync.)")
                run.fail(replica, Phase.VERIFY, error)

    async def _canary(self, run: SyncRun) -> tuple[Canary, float]:
        answer: Any = self._actor_wg.canary()
        answers = answer if isinstance(answer, list) else [answer]
        found = [
            await ray_await(a, what="the actor's canary", timeout_s=run.timeouts.verify)
            if hasattr(a, "__await__")
            else a
            for a in answers
        ]
        canary, dtype = found[0]
        return canary, default_tolerance(dtype) if self._tolerance is None else self._tolerance
