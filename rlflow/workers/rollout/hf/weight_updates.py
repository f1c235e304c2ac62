"""The weights of a running engine: updates, and what a prompt's tokens have for log-probs.

Invariants
    - Weights change only while nothing runs, and from the first change to a good `finish_update` nothing is served;
      if an update fails, the engine refuses requests until one succeeds.
    - All of it happens in the engine's thread. So nothing computes meanwhile, and no other thread of the process gets
      OpenMP threads of its own: with more of them than cores, libgomp lets waiting ones sleep at once, and steps slow
      down.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from rlflow.utils.errors import ContractError
from rlflow.workers.rollout.hf.batch import Batch
from rlflow.workers.rollout.hf.kv_cache import SlotKVCache
from rlflow.workers.rollout.hf.limits import EngineLimits
from rlflow.workers.rollout.hf.loop import EngineLoop
from rlflow.workers.rollout.hf.model import ServedModel

T = TypeVar("T")


class WeightUpdates(EngineLoop):
    """The part of `HFEngine` that this module describes; all methods may be called from any thread."""

    model: ServedModel
    limits: EngineLimits
    _batch: Batch
    _cache: SlotKVCache | None
    _paused: bool
    _asleep: bool

    def __init__(self, version: int | None) -> None:
        super().__init__()
        self._version, self._updating = version, False
        self._refusal = "it has no weights before the first weight sync (rollout.load_format=dummy)"

    def prompt_log_probs(self, token_ids: list[int]) -> Future[list[float]]:
        """Log-probs of all tokens but the first under the present weights, between two steps.

        Raises:
            ContractError: fewer than two tokens, more than a sequence may have, or ids outside the vocabulary.
        """
        if not 2 <= len(token_ids) <= self.limits.max_model_len:
            raise ContractError(
                f"prompt_log_probs takes 2 to rollout.max_model_len={self.limits.max_model_len} tokens, got "
                f"{len(token_ids)}."
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self.model.vocab_size:
            raise ContractError(f"prompt_log_probs: token ids outside the vocabulary of {self.model.vocab_size}.")
        return self._post(partial(self.model.log_probs, list(token_ids)), at_rest=False)

    def start_update(self, lora: dict[str, Any] | None = None) -> Future[None]:
        """Forget what an unfinished update loaded. `ContractError` (here or in the future) unless at rest.

        With `lora`, PEFT's config, an adapter comes; the base weights stay.
        """
        return self._post(partial(self.model.begin, lora))

    def load_weights(self, load: Callable[[ServedModel], T]) -> Future[T]:
        """Let `load(model)` change parameters. From here to a good `finish_update` there are no usable weights.

        `ContractError` (here or in the future) unless the engine is paused or asleep.
        """

        def job() -> T:
            self._invalidate()
            try:
                return load(self.model)
            except BaseException:
                self._end_update(None)
                raise

        return self._post(job)

    def finish_update(self, version: int, tensor_count: int, checksum: int) -> Future[tuple[int, int]]:
        """All tensors are loaded. The parameters become `version` if they hold what was announced.

        The future gives the count and checksum that were found, or `WeightSyncError` for parameters without weights.
        """

        def job() -> tuple[int, int]:
            self._invalidate()
            found = None
            try:
                found = self.model.finish()
                return found
            finally:
                self._end_update(version if found == (tensor_count, checksum) else None)

        return self._post(job)

    def abandon_update(self) -> None:
        """The weights that are there must not be served, whatever was verified; until the next good update."""
        with self._condition:
            self._version, self._updating = None, False
            self._refusal = "its last weight update was withdrawn by the trainer"

    def _invalidate(self) -> None:
        with self._condition:
            self._updating, self._version = True, None
            self._refusal = "its last weight update did not finish"
            # Stale values are never attended to, but an infinity among them would survive a mask.
            self._cache = None

    def _end_update(self, version: int | None) -> None:
        with self._condition:
            self._version, self._updating = version, False

    def _check_rest(self) -> None:
        if not (self._paused or self._asleep) or self._batch.requests:
            raise ContractError(
                "Weights may not change while the rollout engine serves: pause it (abort_all_requests) or put it to "
                "sleep first."
            )

    def set_version(self, version: int) -> None:
        """Relabel the present weights, for example after the trainer resumed from a checkpoint they come from."""
        with self._condition:
            if self._version is not None:
                self._version = version

    @property
    def version(self) -> int | None:
        """Weight version; None without usable weights."""
        return self._version
