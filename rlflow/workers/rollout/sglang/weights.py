"""Which weights an SGLang replica serves, and how they change.

    None or a version ──begin──> (same) ──first bucket──> None ──finish──> the new version
                                                            └──error, abandon──> None, with the reason

Invariants
    - From the first bucket to a good `finish` there is no version, and without a version nothing is served.
    - SGLang's weight calls happen inside its begin/end session and while nothing runs; the session is closed on every
      way out.
    - The cache is emptied before a new version is: no key or value crosses versions.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt
from rlflow.utils.errors import ContractError, WeightSyncError
from rlflow.workers.rollout.sglang.engine import SGLangEngine

logger = logging.getLogger(__name__)


class ServedWeights:
    """See the module.

    Args:
        holder: for messages and receipts.
        version: of the weights that the engine starts with; None = unusable ones.
    """

    def __init__(self, engine: SGLangEngine, holder: str, version: int | None) -> None:
        self._engine, self._holder = engine, holder
        self.version = version
        self._updating = False
        self._refusal = "it has no weights before the first weight sync (rollout.load_format=dummy)"
        self._bytes = 0

    def require_usable(self, *, may_wait: bool = False) -> None:
        """`ContractError` when there are no usable weights. `may_wait`: those of an update under way will do."""
        if self.version is None and not (may_wait and self._updating):
            raise ContractError(f"The rollout engine cannot generate: {self._refusal}.")

    async def begin(self, at_rest: bool) -> None:
        """Start an update; what an earlier one left unfinished is forgotten."""
        _require_rest(at_rest)
        await self._engine.begin_update()
        self._bytes = 0

    async def load(self, metas: list[TensorMeta], path: str, at_rest: bool) -> int:
        """Let the scheduler processes copy a bucket into their parameters; returns its bytes."""
        _require_rest(at_rest)
        self._invalidate()
        described = [dataclasses.asdict(meta) for meta in metas]
        try:
            await self._engine.tell({"op": "load", "path": path, "metas": described})
        except WeightSyncError as error:
            await self._fail(error)
        size = sum(meta.size for meta in metas)
        self._bytes += size
        return size

    async def finish(self, version: int, tensor_count: int, checksum: int, at_rest: bool) -> WeightReceipt:
        """Verify in every scheduler process that the parameters hold what was sent, and make it `version`."""
        _require_rest(at_rest)
        started = time.perf_counter()
        self._invalidate()
        try:
            answers = await self._engine.tell({"op": "receipt"})
        except WeightSyncError as error:
            await self._fail(WeightSyncError(f"weight version {version}: {error}"))
        await self.abandon()
        await self._engine.flush()
        # Ranks of one model that differ among themselves are reported by the one that differs from what was sent.
        counts = [(int(answer["count"]), int(answer["checksum"])) for answer in answers]
        found = next((count for count in counts if count != (tensor_count, checksum)), counts[0])
        if found == (tensor_count, checksum):
            await self._engine.label(version)
            self.version = version
        else:
            logger.error("%s: version %d holds %s, sent %s", self._holder, version, found, (tensor_count, checksum))
        return WeightReceipt(version, found[0], self._bytes, found[1], time.perf_counter() - started, self._holder)

    async def abandon(self) -> None:
        """Give up the update that is open, if one is. Weights that it touched are not served."""
        self._updating = False
        await self._engine.end_update()

    async def relabel(self, version: int) -> None:
        """Call the present weights by another number."""
        if self.version is not None:
            await self._engine.label(version)
            self.version = version

    def end_waiting(self) -> None:
        """Generation goes on. An update that is still open has failed: requests are then refused, not kept."""
        self._updating = False

    def _invalidate(self) -> None:
        self._updating, self.version = True, None
        self._refusal = "its last weight update did not finish"

    async def _fail(self, error: WeightSyncError) -> None:
        await self.abandon()
        raise WeightSyncError(f"{self._holder}: {error}") from error


def _require_rest(at_rest: bool) -> None:
    if not at_rest:
        raise ContractError(
            "Weights may not change while the rollout engine serves: pause it (abort_all_requests) or put it to "
            "sleep first."
        )
