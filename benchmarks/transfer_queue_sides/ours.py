"""What only one side of `transfer_queue.py` does: waking a waiter (rlflow), and the yardsticks beside it.

Yardsticks run in the same process and between the same turns: a copy of the same bytes into touched memory, `ray.put`
and `ray.get` of the same arrays, and calls of actors that do nothing.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
from cases import Figures, Move, Work, timed

_DEADLINE_S = 60.0
_BATCH = 64


def ray_get(ref: Any) -> Any:
    """`ray.get` with the deadline of this benchmark."""
    return ray.get(ref, timeout=_DEADLINE_S)


# ----- waking ---------------------------------------------------------------------------------------------------------


class Waiter:
    """A process that waits for rows."""

    def wait(self, partition: str, keys: list[str]) -> float:
        """The clock when all of `keys` are finished."""
        import rlflow.transfer_queue as tq

        tq.kv_wait(partition, keys=keys, predicate=tq.Predicate("finished"), timeout_s=_DEADLINE_S)
        return time.monotonic()


class Wake(Work):
    """From the start of a batch's last put to the return of another process's `kv_wait`.

    Once in a partition that holds nothing else, once in one that holds many more keys. `ready` is a wait whose rows are
    there already.
    """

    def prepare(self) -> None:
        self._waiter = ray.remote(num_cpus=0)(Waiter).remote()
        self.fill("held", "other", 10_000 if self.quick else 100_000)

    def _wake(self, partition: str) -> tuple[float, float]:
        keys = self.new_keys(_BATCH)
        self.tq.kv_batch_put(keys=keys[:-1], partition_id=partition, tags=[{"status": "finished"}] * (_BATCH - 1))
        woken = self._waiter.wait.remote(partition, keys)
        time.sleep(0.3)  # until it sleeps in the controller, of which nothing tells from outside
        start = time.monotonic()
        self.tq.kv_put(key=keys[-1], partition_id=partition, tag={"status": "finished"})
        wake_s = ray_get(woken) - start
        finished = self.tq.Predicate("finished")
        ready_s, _ = timed(lambda: self.tq.kv_wait(partition, keys=keys, predicate=finished, timeout_s=_DEADLINE_S))
        self.tq.kv_clear(keys=keys, partition_id=partition)
        return wake_s, ready_s

    def sample(self) -> Figures:
        alone_s, ready_alone_s = self._wake("nothing else")
        held_s, ready_s = self._wake("held")
        return {"wake": held_s, "wake_alone": alone_s, "ready": ready_s, "ready_alone": ready_alone_s}

    def finish(self) -> None:
        self.empty("held")
        ray.kill(self._waiter)


# ----- yardsticks -----------------------------------------------------------------------------------------------------


class Bytes(Work):
    """The bytes of a `Move`, copied, and through Ray's object store."""

    def __init__(self, move: Move) -> None:
        super().__init__(move.tq, move.quick)
        self._move = move

    def prepare(self) -> None:
        values = [self._move.data.get(name) for name in self._move.data.keys()]
        self._arrays = [(value.values() if value.is_nested else value).numpy() for value in values]
        self._touched = [np.copy(array) for array in self._arrays]

    def _copy(self) -> None:
        for target, array in zip(self._touched, self._arrays, strict=True):
            np.copyto(target, array)

    def sample(self) -> Figures:
        copy_s, _ = timed(self._copy)
        sum_s, _ = timed(lambda: [array.sum() for array in self._touched])
        put_s, ref = timed(ray.put, self._arrays)
        get_s, got = timed(ray_get, ref)
        del got, ref
        return {"memcpy": copy_s, "memcpy_touch": copy_s + sum_s, "ray_put": put_s, "ray_get": get_s}

    def nbytes(self) -> int:
        """Bytes of one move."""
        return sum(array.nbytes for array in self._arrays)


class Plain:
    """An actor that does nothing."""

    def echo(self, *args: Any) -> Any:
        """Returns the last argument."""
        return args[-1]


class Async:
    """An actor with an event loop that does nothing, as the table's controller is one."""

    async def echo(self, *args: Any) -> Any:
        """Returns the last argument."""
        return args[-1]


class Calls(Work):
    """One call with the arguments of a tag put."""

    def prepare(self) -> None:
        self._plain = ray.remote(num_cpus=0)(Plain).remote()
        self._async = ray.remote(num_cpus=0)(Async).options(max_concurrency=1000).remote()

    def sample(self) -> Figures:
        self.turn += 1
        args = (["row"], "tag", [{"turn": self.turn}])
        plain_s, _ = timed(lambda: ray_get(self._plain.echo.remote(*args)))
        async_s, _ = timed(lambda: ray_get(self._async.echo.remote(*args)))
        return {"plain": plain_s, "async": async_s}

    def finish(self) -> None:
        ray.kill(self._plain)
        ray.kill(self._async)


def own_works(tq: Any, quick: bool, shared: dict[str, Work]) -> dict[str, Work]:
    """What is measured on rlflow's side only, by name; `shared` are the works of both sides."""
    moves = {name: work for name, work in shared.items() if isinstance(work, Move)}
    return {
        **{f"{name}.bytes": Bytes(move) for name, move in moves.items()},
        "tag.calls": Calls(tq, quick),
        "wake": Wake(tq, quick),
    }
