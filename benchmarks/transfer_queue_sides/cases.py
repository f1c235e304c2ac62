"""The works of `transfer_queue.py`, written once against the calls that both packages have.

A work makes its data in `prepare`, does itself once in `sample`, which returns {figure: seconds}, and takes its rows
away in `finish`. What is not timed in `sample` (clearing, checking) stands outside the timers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

T = TypeVar("T")
Figures = dict[str, float]

_CHUNK = 4096  # rows of one put while a partition is filled


def timed(function: Callable[..., T], *args: Any) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def touch(batch: Any) -> int:
    """Read every byte of a batch of tensors."""
    total = 0
    for name in batch.keys():
        value = batch.get(name)
        total += int((value.values() if value.is_nested else value).sum())
    return total


def dense(rows: int, length: int, columns: int) -> TensorDict:
    """`columns` int64 columns of `rows` rows of `length`."""
    made = {f"c{i}": torch.randint(0, 50_000, (rows, length)) for i in range(columns)}
    return TensorDict(made, batch_size=[rows])


def jagged(rows: int, mean: float, columns: int) -> TensorDict:
    """Columns of trajectories: lognormal lengths (sigma 0.8) of this mean; int64 and float32 columns in turn."""
    draw = np.random.default_rng(0).lognormal(np.log(mean) - 0.32, 0.8, rows)
    lengths = torch.from_numpy(np.clip(draw, 1, 16 * mean).astype(np.int64))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total, made = int(offsets[-1]), {}
    for i in range(columns):
        values = torch.randint(0, 50_000, (total,))
        made[f"c{i}"] = torch.nested.nested_tensor_from_jagged(values.float() if i % 2 else values, offsets)
    return TensorDict(made, batch_size=[rows])


class Work:
    """See the module's docstring; `tq` is the package under test."""

    def __init__(self, tq: Any, quick: bool) -> None:
        self.tq = tq
        self.quick = quick
        self.turn = 0

    def prepare(self) -> None:
        """Make the data."""

    def sample(self) -> Figures:
        """Do the work once."""
        raise NotImplementedError

    def finish(self) -> None:
        """Take the rows away."""

    def new_keys(self, rows: int) -> list[str]:
        """Keys that were never used."""
        self.turn += 1
        return [f"s{self.turn}_{i}" for i in range(rows)]

    def fill(self, partition: str, prefix: str, rows: int) -> None:
        """Rows that only have a tag."""
        for start in range(0, rows, _CHUNK):
            keys = [f"{prefix}{i}" for i in range(start, min(start + _CHUNK, rows))]
            self.tq.kv_batch_put(keys=keys, partition_id=partition, tags=[{"status": "running"}] * len(keys))

    def empty(self, partition: str) -> None:
        """Clear a partition."""
        keys = list(self.tq.kv_list(partition_id=partition).get(partition, {}))
        for start in range(0, len(keys), _CHUNK):
            self.tq.kv_clear(keys=keys[start : start + _CHUNK], partition_id=partition)


class Move(Work):
    """Put a batch under new keys, get all of it, read every byte, clear it."""

    def __init__(self, tq: Any, quick: bool, make: Callable[[], TensorDict]) -> None:
        super().__init__(tq, quick)
        self._make = make

    def prepare(self) -> None:
        self.data = self._make()
        self._sum = touch(self.data)

    def sample(self) -> Figures:
        keys = self.new_keys(len(self.data))
        put_s, _ = timed(lambda: self.tq.kv_batch_put(keys=keys, partition_id="move", fields=self.data))
        get_s, got = timed(lambda: self.tq.kv_batch_get(keys=keys, partition_id="move"))
        touch_s, total = timed(touch, got)
        if total != self._sum:
            raise AssertionError("what came back is not what was put")
        del got
        self.tq.kv_clear(keys=keys, partition_id="move")
        return {"put": put_s, "get": get_s, "get_touch": get_s + touch_s}


class OneTag(Work):
    """A put of one entry into the tag of one row."""

    def prepare(self) -> None:
        self.tq.kv_put(key="row", partition_id="tag", tag={"status": "pending"})

    def sample(self) -> Figures:
        self.turn += 1
        seconds, _ = timed(lambda: self.tq.kv_put(key="row", partition_id="tag", tag={"turn": self.turn}))
        return {"tag": seconds}

    def finish(self) -> None:
        self.empty("tag")


class ManyTags(Work):
    """16384 new rows with a tag of one entry in one put; then merging one entry into each; listing them."""

    def prepare(self) -> None:
        self._rows = 2048 if self.quick else 16384

    def sample(self) -> Figures:
        keys = self.new_keys(self._rows)
        tags = [{"status": "pending"}] * self._rows
        more = [{"status": "finished"}] * self._rows
        new_s, _ = timed(lambda: self.tq.kv_batch_put(keys=keys, partition_id="tags", tags=tags))
        merge_s, _ = timed(lambda: self.tq.kv_batch_put(keys=keys, partition_id="tags", tags=more))
        list_s, listed = timed(lambda: self.tq.kv_list(partition_id="tags"))
        if len(listed["tags"]) != self._rows or listed["tags"][keys[-1]] != {"status": "finished"}:
            raise AssertionError("the list is not what was put")
        self.tq.kv_clear(keys=keys, partition_id="tags")
        return {"new": new_s, "merge": merge_s, "list": list_s}


class Columns(Work):
    """One column of twelve, beside the same column where it is the only one."""

    def prepare(self) -> None:
        rows = 256 if self.quick else 1024
        self._keys = [f"k{i}" for i in range(rows)]
        data = dense(rows, 1024, 12)
        self.tq.kv_batch_put(keys=self._keys, partition_id="twelve", fields=data)
        self.tq.kv_batch_put(keys=self._keys, partition_id="one", fields=data.select("c7"))

    def sample(self) -> Figures:
        def get(partition: str) -> Any:
            return self.tq.kv_batch_get(keys=self._keys, partition_id=partition, select_fields=["c7"])

        self.turn += 1
        took = {}
        for partition in (
            ("twelve", "one") if self.turn % 2 else ("one", "twelve")
        ):  # whoever comes first has cold caches
            took[partition], _ = timed(get, partition)
        all_s, _ = timed(lambda: self.tq.kv_batch_get(keys=self._keys, partition_id="twelve"))
        return {"of_twelve": took["twelve"], "alone": took["one"], "all": all_s}

    def finish(self) -> None:
        self.empty("twelve")
        self.empty("one")


class Poll(Work):
    """Where there is no waiting: one list of a partition with many keys, which is what a poll costs."""

    def prepare(self) -> None:
        self.fill("held", "other", 10_000 if self.quick else 100_000)

    def sample(self) -> Figures:
        seconds, _ = timed(lambda: self.tq.kv_list(partition_id="held"))
        return {"poll": seconds}

    def finish(self) -> None:
        self.empty("held")


def works(tq: Any, quick: bool) -> dict[str, Work]:
    """The works that both packages can do, by name."""
    large = (128 if quick else 512, 8192, 4)
    ragged = (512 if quick else 4096, 300, 6)
    return {
        "large": Move(tq, quick, lambda: dense(*large)),
        "small": Move(tq, quick, lambda: dense(64, 1024, 4)),
        "jagged": Move(tq, quick, lambda: jagged(*ragged)),
        "tag": OneTag(tq, quick),
        "tags": ManyTags(tq, quick),
        "columns": Columns(tq, quick),
        "held": Poll(tq, quick),
    }
