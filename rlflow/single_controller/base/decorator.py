"""`@register`: what makes a worker method callable on its whole group.

    class Actor(Worker):
        @register(dispatch_mode=mesh("actor"), reads=("input_ids", "responses"), writes=("old_log_probs",))
        def compute_log_prob(self, batch: TensorDict) -> TensorDict: ...

    group.compute_log_prob(meta)    # KVBatchMeta in, KVBatchMeta out; the tensors never pass through the controller

Invariants
    - A registered method still is a plain method: called in its own process with tensors it does what it says,
      nothing is fetched, split or written.
    - What a method reads and writes is declared here once; the bridge, the check at start-up and the docs read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from rlflow import protocol
from rlflow.single_controller.base import parallel  # noqa: F401 - adds its modes to Dispatch
from rlflow.single_controller.base.dispatch import (
    Dispatch,
    Execute,
    PerRank,
    Same,
    check_execute_mode,
    check_mode,
    get_predefined_dispatch_fn,
    get_predefined_execute_fn,
    make_nd_compute_dataproto_dispatch_fn,
    mesh,
    mesh_of,
    register_dispatch_mode,
    update_dispatch_mode,
)
from rlflow.utils.errors import ContractError

__all__ = [
    "MAGIC_ATTR",
    "Dispatch",
    "Execute",
    "PerRank",
    "Same",
    "get_predefined_dispatch_fn",
    "get_predefined_execute_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "mesh",
    "register",
    "register_dispatch_mode",
    "registered_methods",
    "update_dispatch_mode",
]

MAGIC_ATTR = "attrs_3141562937"

F = TypeVar("F", bound=Callable[..., Any])


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    reads: tuple[str, ...] | None = None,
    writes: tuple[str, ...] | None = None,
    optional_reads: tuple[str, ...] = (),
    optional_writes: tuple[str, ...] = (),
    timeout_s: float | None = None,
    transfer_mode: Any = None,
) -> Callable[[F], F]:
    """Make a method of a `Worker` (`def` or `async def`) callable on its group.

    Args:
        dispatch_mode: a `Dispatch` member, `mesh(name)`, or `{"dispatch_fn", "collect_fn"}`.
        execute_mode: `Execute.ALL` or `Execute.RANK_ZERO`.
        blocking: whether the group's call waits for the result; otherwise it returns a `Future` (modes that join
            results) or a list of refs, one a worker.
        materialize_futures: resolve `Future` arguments in the worker before the method runs.
        reads: fields of the queue that are fetched for a `KVBatchMeta` argument; None: all that its rows share.
        writes: fields the method returns, exactly; None: whatever it returns.
        optional_reads: fields fetched where all rows have them.
        optional_writes: fields it may return beside `writes`.
        timeout_s: deadline of a call; None: the group's.
        transfer_mode: another name of `dispatch_mode`, which may also be a member's name ("3D_PROTO").

    Raises:
        ContractError: at decoration, when a mode is none, the modes contradict one another, or a field is declared
            twice.
    """
    if transfer_mode is not None:
        dispatch_mode = _read_transfer_mode(transfer_mode, dispatch_mode)
    check_mode(dispatch_mode)
    check_execute_mode(execute_mode, dispatch_mode)
    attributes = {
        "dispatch_mode": dispatch_mode,
        "execute_mode": execute_mode,
        "blocking": blocking,
        "reads": _field_names("reads", reads),
        "writes": _field_names("writes", writes),
        "optional_reads": _field_names("optional_reads", optional_reads),
        "optional_writes": _field_names("optional_writes", optional_writes),
        "mesh": mesh_of(dispatch_mode),
        "timeout_s": timeout_s,
    }

    def decorate(method: F) -> F:
        wrapped = _wrap(method, attributes, materialize_futures)
        setattr(wrapped, MAGIC_ATTR, attributes)
        return wrapped

    return decorate


def _read_transfer_mode(transfer_mode: Any, dispatch_mode: Any) -> Any:
    if dispatch_mode is not Dispatch.ALL_TO_ALL:
        raise ContractError("transfer_mode and dispatch_mode mean the same; give one of them")
    if not isinstance(transfer_mode, str):
        return transfer_mode
    if transfer_mode not in Dispatch:
        names = ", ".join(member.name for member in Dispatch)
        raise ContractError(f"transfer_mode={transfer_mode!r} is no mode; there are {names}")
    return Dispatch[transfer_mode]


def _field_names(what: str, names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or len(set(names)) != len(tuple(names)):
        raise ContractError(f"{what}={names!r} must be a tuple of distinct field names")
    return tuple(names)


def _wrap(method: Any, attributes: dict[str, Any], materialize: bool) -> Any:
    def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not materialize:
            return args, kwargs
        return tuple(_resolve(arg) for arg in args), {key: _resolve(value) for key, value in kwargs.items()}

    def has_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return any(protocol.is_kv_meta(value) for value in (*args, *kwargs.values()))

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def run_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(args, kwargs)
            if not has_meta(args, kwargs):
                return await method(self, *args, **kwargs)
            from rlflow.single_controller import bridge  # imports torch, which a method without tensors can do without

            return await bridge.call_with_fields_async(method, attributes, self, args, kwargs)

        return run_async

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = prepare(args, kwargs)
        if not has_meta(args, kwargs):
            return method(self, *args, **kwargs)
        from rlflow.single_controller import bridge  # imports torch, which a method without tensors can do without

        return bridge.call_with_fields(method, attributes, self, args, kwargs)

    return run


def _resolve(value: Any) -> Any:
    return value.get() if isinstance(value, protocol.Future) else value


def registered_methods(cls: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, attributes) of every registered method of a worker class, inherited ones too, sorted by name.

    The attributes are the arguments of `register` plus "mesh": the name of the mesh the method splits over, or None.
    """
    for name in sorted(dir(cls)):
        attributes = getattr(inspect.getattr_static(cls, name), MAGIC_ATTR, None)
        if attributes is not None:
            yield name, attributes
