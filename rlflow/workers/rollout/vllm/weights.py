"""The server's side of a weight sync: which weights the engine holds, and how they change.

    None or a version ──begin──> (same) ──first bucket──> None ──finish──> the new version
                                                            └──error, abandon──> None, with the reason

Invariants
    - From the first bucket to a good `finish` there is no version, and without a version nothing is served.
    - The prefix cache is emptied before a new version is: no key or value crosses versions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from rlflow.checkpoint_engine.base import TensorMeta, WeightReceipt
from rlflow.utils.errors import ContractError, WeightSyncError

logger = logging.getLogger(__name__)


class WeightDoor:
    """See the module.

    Args:
        call: runs a method of `WeightReceiver` in every worker process; returns their answers.
        clear: empties the caches of the engine.
        holder: for messages and receipts.
        version: of the weights that the engine started with; None = unusable ones.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[list[dict[str, Any]]]],
        clear: Callable[[], Awaitable[None]],
        holder: str,
        version: int | None,
    ) -> None:
        self._call, self._clear, self._holder = call, clear, holder
        self.version = version
        self.updating = False
        self._refusal = "it has no weights before the first weight sync (rollout.load_format=dummy)"
        self._touched = False
        self._bytes = 0

    def require_usable(self) -> None:
        """`ContractError` with the reason when there are no usable weights and none are on their way."""
        if self.version is None and not self.updating:
            raise ContractError(f"The rollout engine cannot generate: {self._refusal}.")

    async def begin(self, at_rest: bool) -> None:
        """Start an update; what an earlier one left unfinished is forgotten."""
        self._require_rest(at_rest)
        await self.abandon()
        self._bytes = 0

    async def load(self, metas: list[TensorMeta], path: str, at_rest: bool) -> int:
        """Hand a bucket to the workers; returns its bytes once all of them have taken it."""
        self._require_rest(at_rest)
        if not self._touched:
            self.version, self.updating, self._touched = None, True, True
            self._refusal = "its last weight update did not finish"
            await self._ask("begin_receiving")
        answers = await self._ask("receive_bucket", [asdict(meta) for meta in metas], path)
        self._bytes += answers[0]["bytes"]
        return int(answers[0]["bytes"])

    async def finish(self, version: int, tensor_count: int, checksum: int) -> WeightReceipt:
        """End an update: the engine serves `version` if every worker got what was sent, for all of its parameters."""
        started = time.perf_counter()
        answers = await self._ask("finish_receiving")
        self._touched = self.updating = False
        missing = sorted({name for answer in answers for name in answer["missing"]})
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise WeightSyncError(
                f"{self._holder}, weight version {version}: {len(missing)} parameters of the served model got no "
                f"weights in this sync: {shown}"
            )
        # Workers of one model that differ among themselves are reported by the one that differs from what was sent.
        counts = [(len(answer["names"]), int(answer["checksum"])) for answer in answers]
        found = next((count for count in counts if count != (tensor_count, checksum)), counts[0])
        if found == (tensor_count, checksum):
            await self._clear()
            self.version = version
        else:
            logger.error("%s: version %d holds %s, sent %s", self._holder, version, found, (tensor_count, checksum))
        seconds = time.perf_counter() - started
        return WeightReceipt(version, found[0], self._bytes, found[1], seconds, self._holder)

    async def abandon(self) -> None:
        """Give up an update. Weights that were touched are not served before a later one succeeds."""
        if self._touched:
            self._touched = self.updating = False
            await self._ask("stop_receiving")
        self.updating = False

    def end_waiting(self) -> None:
        """Generation goes on. An update that is still open has failed: requests are then refused, not kept."""
        self.updating = False

    async def _ask(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """One method in every worker. `WeightSyncError` with the first one's reason; the modules are made whole."""
        answers = await self._call(method, *args)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if not errors:
            return answers
        touched, self._touched, self.updating = self._touched, False, False
        if touched and method != "stop_receiving":
            left = [answer["error"] for answer in await self._call("stop_receiving") if "error" in answer]
            errors += [f"and the engine could not put its modules together again: {error}" for error in left]
        raise WeightSyncError(f"{self._holder}: {'; '.join(errors)}")

    def _require_rest(self, at_rest: bool) -> None:
        if not at_rest:
            raise ContractError(
                "Weights may not change while the rollout engine serves: pause it (abort_all_requests) or put it to "
                "sleep first."
            )
