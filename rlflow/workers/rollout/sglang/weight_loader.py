"""Runs in SGLang's scheduler processes: fills the model's parameters, and proves what they hold.

SGLang calls `load` between `begin_weight_update` and `end_weight_update`, for an update whose `load_format` is its
name. The update carries no weights but one message (JSON in a uint8 tensor): where the trainer's shared memory lies,
or the request for a receipt. The answer is written into a memory file of the server.

Invariants
    - No pickle crosses a trust boundary. The message is wrapped by SGLang's own serialiser on its way from the server
      to its child processes; the weights are raw bytes described by `TensorMeta`.
    - Which part of which parameter each tensor was copied to is observed, not computed: stacked parameters (qkv,
      gate_up) and parameters split over ranks need no table of names.
    - The receipt is read from the parameters. A tensor that reached none, and a parameter that was reached by none,
      are errors that name it.
    - No exception leaves `load`: it would end the scheduler process.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlflow.checkpoint_engine.base import TensorMeta
from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.utils.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LOADER = "rlflow.workers.rollout.sglang.weight_loader.load"
REPLY_BYTES = 1 << 16
_NAMED = 5  # tensors that a message lists

_aten = torch.ops.aten
_WRITES = {_aten.copy_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


@dataclass
class _Part:
    """Where (a part of) a sent tensor lies in a parameter. `digest`: of the bytes that belong there, if it is a part."""

    held: Tensor
    digest: int | None = None


class _Watch(TorchDispatchMode):
    """Reports every write to a tensor while it is active."""

    def __init__(self, wrote: Any) -> None:
        super().__init__()
        self._wrote = wrote

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WRITES:
            self._wrote(args[0], args[1] if func is _aten.copy_.default else None)
        return result


class Ledger:
    """What one update brought into a model. Collects until `receipt`.

    Args:
        expected: names of an earlier whole update, to name a tensor that is missing this time.
    """

    def __init__(self, model: Any, expected: frozenset[str] = frozenset()) -> None:
        self._model, self._expected = model, expected
        self._owners = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters()}
        self._parts: dict[str, list[_Part]] = {}
        self._wire: dict[str, int] = {}  # digests of tensors that do not lie in one piece
        self._sizes = {name: param.numel() for name, param in model.named_parameters()}
        self._filled: dict[str, dict[tuple[int, int], int]] = {name: {} for name in self._sizes}
        self._sent: tuple[str, Tensor] | None = None

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Give the tensors to the model's own loader.

        Raises:
            WeightSyncError: a tensor that no parameter took, or that does not fit.
        """
        names: list[str] = []

        def stream() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                names.append(name)
                self._sent = (name, tensor)
                yield name, tensor
            self._sent = None

        try:
            with torch.no_grad(), _Watch(self._wrote):
                self._model.load_weights(stream())
        except Exception as error:
            if self._sent is None:
                raise
            name, tensor = self._sent
            raise WeightSyncError(
                f"The trainer sent {name!r} with shape {tuple(tensor.shape)}, which the served "
                f"{type(self._model).__name__} cannot take ({error or type(error).__name__}). Actor and rollout must "
                "be built from the same config (actor_rollout_ref.model)."
            ) from error
        if lost := [name for name in names if name not in self._parts]:
            raise WeightSyncError(
                f"The trainer sent {_listed(lost)}, which the served {type(self._model).__name__} does not have. Actor "
                "and rollout must be built from the same config (actor_rollout_ref.model)."
            )

    def names(self) -> frozenset[str]:
        """Names of the tensors that were loaded."""
        return frozenset(self._parts)

    def receipt(self) -> dict[str, Any]:
        """{"count", "checksum"} of the tensors that the parameters hold.

        Raises:
            WeightSyncError: a parameter that got nothing (or not all of it), or that holds something else by now.
        """
        if empty := [n for n, size in self._sizes.items() if sum(self._filled[n].values()) < size]:
            unsent = sorted(self._expected - self.names())
            sources = f" (not sent this time: {_listed(unsent)})" if unsent else ""
            raise WeightSyncError(f"{len(empty)} parameters got no weights in this sync: {_listed(empty)}{sources}.")
        changed = [n for n, parts in self._parts.items() if any(p.digest not in (None, _bytes(p.held)) for p in parts)]
        if changed:
            raise WeightSyncError(f"{_listed(changed)}: the parameters hold something else than what was sent.")
        digests = [self._wire.get(name) or tensor_digest(name, _plain(p[0].held)) for name, p in self._parts.items()]
        return {"count": len(digests), "checksum": combine(digests)}

    def _wrote(self, target: Any, source: Any) -> None:
        owner = self._owners.get(target.untyped_storage().data_ptr()) if isinstance(target, torch.Tensor) else None
        if owner is None:
            return
        held = target.detach()
        if source is None and held.numel() == 1 and self._sent is not None:
            source = self._sent[1]  # a single value is filled in, not copied
        if source is None and held.numel() == self._sizes[owner]:
            return  # cleared, to be written afterwards
        self._filled[owner][held.data_ptr(), held.numel()] = held.numel()
        if self._sent is None or source is None:  # padding, which nobody sent
            return
        name, sent = self._sent
        whole = held.numel() == sent.numel() and held.dtype == sent.dtype and held.is_contiguous()
        if whole:
            self._parts[name] = [_Part(held.view(sent.shape))]
        else:
            self._wire[name] = tensor_digest(name, _plain(sent))
            self._parts.setdefault(name, []).append(_Part(held, _bytes(source.to(held.dtype))))


def load(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Entry point for SGLang; see the module. `named_tensors` holds one message."""
    message = json.loads(bytes(named_tensors[0][1].cpu().tolist()))
    try:
        answer = _OPERATIONS[message["op"]](model, message)
    except Exception as error:  # noqa: BLE001 - it belongs to the server, which waits for the answer
        known = isinstance(error, WeightSyncError)
        logger.error("weight update: %s", error if known else traceback.format_exc())
        answer = {"error": str(error) if known else f"{type(error).__name__}: {error}"}
    write_reply(message["reply"], answer)


def _load_bucket(model: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    from rlflow.checkpoint_engine.shared_memory import open_bucket

    ledger: Ledger | None = getattr(model, "_rlflow_ledger", None)
    if ledger is None:
        ledger = model._rlflow_ledger = Ledger(model, getattr(model, "_rlflow_names", frozenset()))
    metas = [TensorMeta(**{**meta, "shape": tuple(meta["shape"])}) for meta in message["metas"]]
    with open_bucket(message["path"], metas) as tensors:
        ledger.load(_drained(tensors))
    return {}


def _receipt(model: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    ledger: Ledger | None = getattr(model, "_rlflow_ledger", None)
    model._rlflow_ledger = None
    if ledger is None:
        raise WeightSyncError("no tensor arrived.")
    receipt = ledger.receipt()
    model._rlflow_names = ledger.names()
    return receipt


def _forget(model: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    model._rlflow_ledger = None
    return {}


_OPERATIONS = {"load": _load_bucket, "receipt": _receipt, "forget": _forget}


def _drained(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, no longer held by the list: views must not outlive their memory."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


def write_reply(path: str, answer: Mapping[str, Any]) -> None:
    """Length (8 bytes) and JSON into the server's memory file."""
    body = json.dumps(answer).encode()[: REPLY_BYTES - 8]
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, REPLY_BYTES) as memory:
            memory[8 : 8 + len(body)] = body
            memory[:8] = len(body).to_bytes(8, "little")
    finally:
        os.close(fd)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> int:
    return tensor_digest("", _plain(tensor).reshape(-1))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
