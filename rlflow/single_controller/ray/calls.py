"""Waiting for the workers of one call.

Invariants
    - The first failure ends the wait: the peers of a failed rank may hang in a collective that it never joins.
    - The error names the rank that failed first in cause: a dead process before the exceptions its peers raised about
      it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.single_controller.errors import WorkerError
from rlflow.utils.errors import DeadlineError
from rlflow.utils.ray_utils import ray_get

# After a first failure others are awaited this long, to tell a cause from its consequences.
_GRACE_S = 0.5
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class RefWaiter:
    """Fetches the values of one call; pickles, so that a future can be resolved in another process.

    Attributes:
        role, method: what was called.
        ranks: rank of each ref.
        timeout_s: deadline unless one is given.
        where: rank -> "pid ... on ...", for messages.
    """

    role: str
    method: str
    ranks: tuple[int, ...]
    timeout_s: float
    where: tuple[str, ...] = ()

    def __call__(self, refs: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """Values in the order of `refs`.

        Raises:
            WorkerError: a worker raised or died.
            DeadlineError: some worker did not answer in time; the message names their ranks.
        """
        import ray

        timeout = self.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + timeout
        # The same object may serve several ranks; ray.wait takes it once.
        waiting = list(dict.fromkeys(refs))
        values: dict[Any, Any] = {}
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise DeadlineError(self._overdue(refs, waiting, timeout))
            # Whatever is finished by now is taken along: one failure among many results is seen at once.
            more, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
            for ref in [*ready, *more]:
                values[ref] = self._value(ref)
            if any(isinstance(value, _Failure) for value in values.values()):
                self._raise(refs, values, waiting)
        return [values[ref] for ref in refs]

    def _value(self, ref: Any) -> Any:
        from ray.exceptions import RayError

        try:
            return ray_get(ref, what=f"{self.role}.{self.method}")
        except RayError as error:
            return _Failure(error)

    def _raise(self, refs: Sequence[Any], values: dict[Any, Any], waiting: list[Any]) -> None:
        import ray
        from ray.exceptions import RayActorError

        if waiting:
            late, _ = ray.wait(waiting, num_returns=len(waiting), timeout=_GRACE_S)
            values.update({ref: self._value(ref) for ref in late})
        failed = [
            (rank, values[ref].error)
            for rank, ref in zip(self.ranks, refs, strict=True)
            if isinstance(values.get(ref), _Failure)
        ]
        dead = [item for item in failed if isinstance(item[1], RayActorError)]
        rank, error = (dead or failed)[0]
        others = [f"{other} ({_summary(e)})" for other, e in failed if other != rank]
        # In a collective the one that hangs is the cause, and those that fail about it are told first.
        silent = [rank for rank, ref in zip(self.ranks, refs, strict=True) if ref not in values]
        raise self.failure(rank, error, others, silent) from error

    def failure(
        self, rank: int, error: Exception, others: Sequence[str] = (), silent: Sequence[int] = ()
    ) -> WorkerError:
        """The error for one rank's failure; `silent` ranks have not answered."""
        from ray.exceptions import RayActorError

        died = isinstance(error, RayActorError)
        text = _ANSI.sub("", str(error))  # Ray's text ends in the worker's traceback
        place = f" ({self.where[rank]})" if rank < len(self.where) else ""
        what = "its process died" if died else _summary(error)
        message = f"rank {rank}{place}, role {self.role!r}, method {self.method!r}: {what}"
        if others:
            message += f"\n    also failed: rank {'; rank '.join(others)}"
        if silent:
            message += f"\n    no answer yet from {self._places(silent)}"
        message += "\n" + "\n".join(f"    | {line}" for line in text.strip().splitlines())
        return WorkerError(message, rank, self.role, self.method, died, text)

    def _overdue(self, refs: Sequence[Any], waiting: Sequence[Any], timeout: float) -> str:
        late = [rank for rank, ref in zip(self.ranks, refs, strict=True) if ref in set(waiting)]
        return (
            f"Waited {timeout:g} s for {self.role}.{self.method} and got no answer from {self._places(late)}. The "
            "process is hung or overloaded (py-spy dump --pid shows where), or the deadline is too short for it "
            "(trainer.call_timeout_s; register(timeout_s=...) for one method)."
        )

    def _places(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {r} ({self.where[r]})" if r < len(self.where) else f"rank {r}" for r in ranks)


@dataclass(frozen=True)
class _Failure:
    error: Exception


def _summary(error: Exception) -> str:
    cause = getattr(error, "cause", None)
    shown = cause if isinstance(cause, BaseException) else error
    first = str(shown).strip().splitlines()
    return f"{type(shown).__name__}: {first[0] if first else ''}"
