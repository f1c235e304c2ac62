"""How often the controller and the storage units are asked for what, and how long it takes.

Only a class made by `metered` is timed; without metrics the plain class runs, at no cost.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import psutil

C = TypeVar("C", bound=type)

# Upper bounds of the histogram's buckets, in seconds.
BOUNDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
# Latest calls of an operation that its quantiles are taken of.
RECENT = 512


class _Operation:
    __slots__ = ("buckets", "calls", "errors", "recent", "rows", "seconds")

    def __init__(self) -> None:
        self.calls = self.errors = self.rows = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.recent: deque[float] = deque(maxlen=RECENT)


class Meter:
    """Figures of each operation of one object. Written by its process's event loop, read from any thread."""

    def __init__(self) -> None:
        self.arrived = 0
        self.started = time.monotonic()
        self._operations: dict[str, _Operation] = {}

    def record(self, name: str, seconds: float, rows: int, failed: bool) -> None:
        """Take note of one call that has ended.

        Args:
            name: the operation.
            seconds: how long it took, waiting included.
            rows: how many rows it was about.
            failed: whether it raised.
        """
        operation = self._operations.setdefault(name, _Operation())
        operation.calls += 1
        operation.errors += failed
        operation.rows += rows
        operation.seconds += seconds
        operation.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1
        operation.recent.append(seconds)

    def figures(self) -> dict[str, Any]:
        """Plain values: `arrived`, `uptime_s`, `rss_bytes` of the process, and for each operation `calls`, `errors`,
        `rows`, `seconds`, `buckets` (counts, see `BOUNDS`), and `avg`, `p50`, `p99` of the latest calls in seconds.
        """
        operations = {}
        for name, operation in list(self._operations.items()):
            recent = np.array(operation.recent)
            operations[name] = {
                "calls": operation.calls,
                "errors": operation.errors,
                "rows": operation.rows,
                "seconds": operation.seconds,
                "buckets": list(operation.buckets),
                "avg": float(recent.mean()),
                "p50": float(np.quantile(recent, 0.5)),
                "p99": float(np.quantile(recent, 0.99)),
            }
        return {
            "arrived": self.arrived,
            "uptime_s": time.monotonic() - self.started,
            "rss_bytes": psutil.Process(os.getpid()).memory_info().rss,
            "operations": operations,
        }


def metered(cls: C, rows_of: Callable[[str, Sequence[Any], Any], int]) -> C:
    """A subclass whose public methods are timed by a `Meter` in the attribute `meter`.

    Args:
        cls: the class.
        rows_of: how many rows a call was about, from its method's name, its arguments and its result (None after an
            error).
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.meter = Meter()
        cls.__init__(self, *args, **kwargs)  # type: ignore[misc]

    methods = {
        name: _timed(name, method, rows_of)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and not name.endswith("_packed")  # those unpack a message and call the other
    }
    return type(cls.__name__, (cls,), {**methods, "__init__": init, "__doc__": cls.__doc__, "__module__": __name__})  # type: ignore[return-value]


def _timed(name: str, method: Callable[..., Any], rows_of: Callable[[str, Sequence[Any], Any], int]) -> Any:
    def end(self: Any, start: float, args: Sequence[Any], result: Any, failed: bool) -> None:
        self.meter.record(name, time.perf_counter() - start, rows_of(name, args, result), failed)

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.arrived += 1
        start, result, failed = time.perf_counter(), None, True
        try:
            result = method(self, *args, **kwargs)
            failed = False
            return result
        finally:
            end(self, start, args, result, failed)

    @functools.wraps(method)
    async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.arrived += 1
        start, result, failed = time.perf_counter(), None, True
        try:
            result = await method(self, *args, **kwargs)
            failed = False
            return result
        finally:
            end(self, start, args, result, failed)

    return run_async if asyncio.iscoroutinefunction(method) else run


# -- rows of a call --------------------------------------------------------------------------------

_BY_KEYS = frozenset(
    ("put", "clear", "locate", "lineage", "describe", "insert", "indexes", "keys_of", "set_tags", "clear_rows")
)


def rows_of_controller_call(name: str, args: Sequence[Any], result: Any) -> int:
    """Rows that a call of the controller names, or that it gave out."""
    if name in ("fetch", "force_fetch"):
        return 0 if result is None else len(result["indexes"])
    return len(args[0]) if name in _BY_KEYS and args else 0


def no_rows(name: str, args: Sequence[Any], result: Any) -> int:
    """A storage unit knows blocks, not rows."""
    return 0


def unit_class_for(config: dict[str, Any], cls: C) -> C:
    """The class of a storage unit; with `transfer_queue.metrics.enabled` its `stats` has `requests`, see `Meter`."""
    if not config["metrics"]["enabled"]:
        return cls
    timed = metered(cls, no_rows)

    def stats(self: Any) -> dict[str, Any]:
        return {**cls.stats(self), "requests": self.meter.figures()}  # type: ignore[attr-defined]

    return type(cls.__name__, (timed,), {"stats": stats, "__module__": __name__})  # type: ignore[return-value]
