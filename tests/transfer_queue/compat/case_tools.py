"""What the cases share.

A case is a function `case(tq, see, partition)`: `see(step, call)` records what a call gives. Cases are independent:
each has partitions of its own, named after the argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

CASES: dict[str, Callable[..., None]] = {}
# Settings of `controller` for the cases that need a table of their own: {name: settings(tq)}.
CONTROLLERS: dict[str, Callable[[Any], dict[str, Any]]] = {}


def case(function: Callable[..., None]) -> Callable[..., None]:
    """Add a case under its function's name."""
    CASES[function.__name__] = function
    return function


def polling_with(sampler: Callable[[Any], Any]) -> Callable[..., Any]:
    """Give a case a table in polling mode with the sampler `sampler(tq)`."""

    def keep(function: Callable[..., None]) -> Callable[..., None]:
        CONTROLLERS[function.__name__] = lambda tq: {"sampler": sampler(tq), "polling_mode": True}
        return function

    return keep


def jagged(*rows: list[float]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(size: int, **fields: Any) -> TensorDict:
    return TensorDict(fields, batch_size=[size])


def numbers(*values: int) -> TensorDict:
    return batch(len(values), n=torch.tensor(values))


def texts(*values: str) -> TensorDict:
    return batch(len(values), text=NonTensorStack(*values))
