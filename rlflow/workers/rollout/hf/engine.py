"""The embedded rollout engine: a thread that steps a Hugging Face causal LM for all running requests at once.

    submit ──> admission ──> slots ──> prefill, then one decode step after another ──> future
                 waits while paused, asleep or full

Invariants
    - Requests join and leave between two steps; a step is one forward for one token of every running request.
    - Equal prompts are prefilled once: later ones copy the keys and values of one that runs. Nothing else is reused,
      so no key or value outlives its request, let alone its weight version.
    - Weights change only while nothing runs (`weight_updates`).
    - What the thread may do next is decided here; that it runs, and how it ends, in `loop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.workers.rollout.base import RolloutError, SamplingParams, prompt_budget
from rlflow.workers.rollout.hf.admission import Admission, FirstCome
from rlflow.workers.rollout.hf.batch import Batch, Generation, Request
from rlflow.workers.rollout.hf.decode import EngineCounters, decode
from rlflow.workers.rollout.hf.kv_cache import SlotKVCache
from rlflow.workers.rollout.hf.limits import EngineLimits
from rlflow.workers.rollout.hf.model import ServedModel
from rlflow.workers.rollout.hf.prefill import admit, prefill
from rlflow.workers.rollout.hf.weight_updates import WeightUpdates

logger = logging.getLogger(__name__)


class HFEngine(WeightUpdates):
    """See the module. All methods may be called from any thread.

    Args:
        version: weight version of `model`; None means that its weights are not usable before the first update.
        seed: basis of the seeds of requests that bring none.
        admission: who may join the batch; None = first come, first served.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: EngineLimits,
        *,
        version: int | None,
        seed: int = 0,
        admission: Admission | None = None,
    ) -> None:
        if limits.max_num_seqs < 1:
            raise ConfigError(f"rollout.max_num_seqs={limits.max_num_seqs} must be at least 1.")
        super().__init__(version)
        self.model, self.limits, self.counters = model, limits, EngineCounters()
        self._seed = seed
        self._waiting: Admission = FirstCome() if admission is None else admission
        self._batch = Batch(limits.max_num_seqs, model.vocab_size, model.device)
        self._cache: SlotKVCache | None = None
        self._abort_ids: set[str] = set()
        self._abort_all = False
        self._paused = self._asleep = False
        self._next_deadline = float("inf")
        self._submitted = 0
        self._start()

    # --- callers ------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        timeout_s: float = 600.0,
        session: str = "",
        turn: int = 0,
    ) -> Future[Generation]:
        """Queue a request. While paused or asleep it waits; its deadline counts from now.

        Args:
            session, turn: who asks, and the number of this request of it; for `admission.Rounds`.

        Raises:
            ContractError: no usable weights, a prompt without room, or a token id outside the vocabulary.
            RolloutError: the engine died.
        The future raises `DeadlineError` or `RolloutError`; an abort is a result.
        """
        lim = self.limits
        max_tokens = prompt_budget(
            prompt_ids,
            params,
            request_id,
            vocab_size=self.model.vocab_size,
            max_model_len=lim.max_model_len,
            prompt_length=lim.prompt_length,
            response_length=lim.response_length,
        )
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.model.eos_token_ids)
        with self._condition:
            self._check_alive()
            if self._version is None and not self._updating:
                raise ContractError(f"The rollout engine cannot generate: {self._refusal}.")
            self._submitted += 1
            seed = params.seed if params.seed is not None else self._seed * 1_000_003 + self._submitted
            deadline = time.monotonic() + timeout_s
            request = Request(
                request_id, list(prompt_ids), params, seed, max_tokens, stop_ids, deadline, timeout_s, session, turn
            )
            self._waiting.add(request)
            self._next_deadline = min(self._next_deadline, request.deadline)
            self._condition.notify_all()
        return request.future

    def announce(self, sessions: Sequence[str], keep: Collection[str] = ()) -> None:
        """Expect requests of these sessions; see `Admission.announce`.

        What a session of that name asked for before is aborted: it belongs to a life that is over.
        """
        with self._condition:
            self._check_alive()
            names = set(sessions)
            self._abort_ids.update(r.request_id for r in (*self._batch.requests, *self._waiting) if r.session in names)
            self._waiting.announce(sessions, keep)
            self._condition.notify_all()

    def end_session(self, session: str) -> None:
        """No more requests of this session will come."""
        with self._condition:
            self._waiting.end_session(session)
            self._condition.notify_all()

    def abort(self, request_id: str) -> bool:
        """End one request with the tokens it has; False when it is not (or no longer) here."""
        with self._condition:
            known = any(r.request_id == request_id for r in (*self._waiting, *self._batch.requests))
            if known:
                self._abort_ids.add(request_id)
                self._condition.notify_all()
            return known

    def pause(self, timeout_s: float = 120.0) -> list[str]:
        """Abort every request and admit no other until `resume`. Returns the aborted ids once nothing runs."""
        with self._condition:
            self._check_alive()
            ids = [r.request_id for r in (*self._batch.requests, *self._waiting)]
            self._paused = self._abort_all = True
            self._condition.notify_all()
            self._await_quiet("a pause", timeout_s)
            return ids

    def resume(self) -> None:
        """Admit requests again. A weight update that is still open has failed: requests are then refused, not kept."""
        with self._condition:
            self._check_alive()
            self._paused = self._updating = False
            self._condition.notify_all()

    def sleep(self, drain_timeout_s: float = 60.0, *, free: bool = True) -> None:
        """Let running requests end, then free the cache. Queued and new requests wait until `wake_up`.

        A request that has not ended after `drain_timeout_s` is aborted. `free=False` keeps the cache.
        """
        with self._condition:
            self._check_alive()
            self._asleep = True
            drained = self._condition.wait_for(self._quiet, timeout=drain_timeout_s)
            if not drained:
                logger.warning(
                    "%d requests run %.0f s after sleep was asked for; aborting them", len(self._batch), drain_timeout_s
                )
                self._abort_ids.update(r.request_id for r in self._batch.requests)
                self._condition.notify_all()
                self._await_quiet("sleep", 120.0)
            self._check_alive()
            if free:
                self._cache = None

    def wake_up(self) -> None:
        """Serve again; the cache comes back with the first request."""
        with self._condition:
            self._check_alive()
            self._asleep = False
            self._condition.notify_all()

    def status(self) -> dict[str, Any]:
        """Counts and state, for logs, tests and health checks."""
        with self._condition:
            return {
                "running": len(self._batch),
                "waiting": len(self._waiting),
                "paused": self._paused,
                "asleep": self._asleep,
                "version": self._version,
                "failure": str(self._failure) if self._failure else None,
                "kv_cache_allocated": self._cache is not None,
                **vars(self.counters),
            }

    def _quiet(self) -> bool:
        return self._failure is not None or not (self._stepping or self._batch.requests)

    def _await_quiet(self, what: str, timeout_s: float) -> None:
        if not self._condition.wait_for(lambda: self._quiet() and not self._abort_all, timeout=timeout_s):
            raise DeadlineError(f"The rollout engine did not come to rest for {what} within {timeout_s:.0f} s.")
        self._check_alive()

    # --- the thread (see `EngineLoop`) ----------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self._batch.requests) or self._may_admit()

    def _wake_at(self) -> float:
        return self._next_deadline

    def _admits(self) -> bool:
        return not (self._paused or self._asleep or self._updating)

    def _may_admit(self) -> bool:
        return self._admits() and self._waiting.ready(len(self._batch))

    def _settle(self) -> None:
        """End requests that were aborted, are over their deadline, or wait for weights that will not come."""
        requests = (*self._batch.requests, *self._waiting)
        if self._abort_all or self._abort_ids:
            gone = [r for r in requests if self._abort_all or r.request_id in self._abort_ids]
            self._abort_all, self._abort_ids = False, set()
            self._leave(gone)
            for request in gone:
                self._answer(request, "abort")
        now = time.monotonic()
        if now >= self._next_deadline:
            late = [r for r in requests if r.deadline <= now and not r.future.done()]
            awaited = self._waiting.awaited()
            self._leave(late)
            for r in late:
                r.future.set_exception(self._overdue(r, awaited))
            left = (*self._batch.requests, *self._waiting)
            self._next_deadline = min((r.deadline for r in left), default=float("inf"))
        if self._version is None and self._admits() and self._waiting:
            refused = list(self._waiting)
            self._leave(refused)
            for r in refused:
                r.future.set_exception(ContractError(f"The rollout engine cannot generate: {self._refusal}."))

    def _overdue(self, request: Request, awaited: str) -> DeadlineError:
        made = len(request.token_ids)
        where = f"after {made} tokens" if made else "before its first token"
        where += f", while waiting for {awaited}" if awaited else ""
        return DeadlineError(
            f"Request {request.request_id} ended {where}: its deadline of {request.timeout_s:.0f} s is over "
            f"({len(self._batch)} running, {len(self._waiting)} waiting, paused={self._paused}, "
            f"asleep={self._asleep}). Raise rollout.request_timeout_s or lower the load."
        )

    def _leave(self, gone: list[Request]) -> None:
        self._batch.remove([r for r in gone if r.slot >= 0], self._cache)
        self._waiting.discard(gone)

    def _answer(self, request: Request, reason: str) -> None:
        request.future.set_result(Generation(request.token_ids, request.log_probs, reason, self._version))

    def _forget_all(self, error: RolloutError) -> None:
        for request in (*self._batch.requests, *self._waiting):
            if not request.future.done():
                request.future.set_exception(error)
        self._batch.requests.clear()
        self._waiting.discard(list(self._waiting))
        self._abort_all = False

    def _step(self) -> None:
        with self._condition:
            admitted = admit(self._batch, self._waiting) if self._may_admit() else []
            if self._cache is None:
                model, slots = self.model, self._batch.slots
                self._cache = SlotKVCache(model.kv_shape, slots, self.limits.max_model_len, model.dtype, model.device)
            cache = self._cache
        if admitted:
            started = time.perf_counter()
            computed, copied = prefill(self.model, cache, admitted, self.limits.prefill_tokens)
            self.counters.prefill_tokens += computed
            self.counters.shared_tokens += copied
            self.counters.prefill_s += time.perf_counter() - started
        started = time.perf_counter()
        ended = decode(self.model, cache, self._batch, self.counters)
        self.counters.decode_s += time.perf_counter() - started
        if ended:
            with self._condition:
                self._batch.remove([request for request, _ in ended], cache)
                for request, reason in ended:
                    self._answer(request, reason)
