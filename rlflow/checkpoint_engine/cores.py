"""Cores of a transfer within a node: both ends work at the same time, and each takes its half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from rlflow.utils.device import cpu_cores

_cores = lru_cache(maxsize=1)(cpu_cores)


@contextmanager
def half_of_the_cores() -> Iterator[None]:
    """Torch's operations in this thread use no more than half of the process's cores.

    With more threads than cores, each of the many short operations waits until a thread of the other end is preempted.
    """
    import torch

    threads, most = torch.get_num_threads(), max(1, _cores() // 2)
    if threads <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
