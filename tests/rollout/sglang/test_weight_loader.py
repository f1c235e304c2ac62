"""The receipt of an update is read from the parameters, whatever the model makes of the names. Needs no SGLang."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from rlflow.checkpoint_engine.base import TensorMeta
from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.checkpoint_engine.shared_memory import Segment
from rlflow.utils.errors import WeightSyncError
from rlflow.workers.rollout.sglang import weight_loader
from rlflow.workers.rollout.sglang.weight_loader import Ledger


class Stacked(nn.Module):
    """Loads as SGLang's models do: two projections in one parameter, padded embeddings, unknown names passed over.

    `ranks`: it keeps the first of that many equal parts of each projection.
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self.ranks = ranks
        self.gate_up = nn.Parameter(torch.zeros(2 * 4 // ranks, 3), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(8, 3), requires_grad=False)  # 6 rows and padding
        self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float32), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name in ("gate", "up"):
                rows = 4 // self.ranks
                assert tensor.shape == (4, 3), f"wants (4, 3), got {tuple(tensor.shape)}"
                part = self.gate_up[:rows] if name == "gate" else self.gate_up[rows:]
                part.data.copy_(tensor[:rows])
            elif name == "embed":
                self.embed[: len(tensor)].data.copy_(tensor)
                self.embed[len(tensor) :].data.fill_(0)
            elif name == "scale":
                self.scale.data.fill_(tensor.item())


def _sent(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (4, 3), "up": (4, 3), "embed": (6, 3), "scale": (1,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _checksum(tensors: dict[str, torch.Tensor]) -> int:
    return combine([tensor_digest(name, tensor) for name, tensor in tensors.items()])


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_receipt_is_that_of_the_sender(ranks):
    sent, ledger = _sent(), Ledger(Stacked(ranks))
    ledger.load([("gate", sent["gate"]), ("embed", sent["embed"])])  # two buckets, in any order
    ledger.load([("scale", sent["scale"]), ("up", sent["up"])])
    assert ledger.receipt() == {"count": 4, "checksum": _checksum(sent)}


def test_another_dtype_is_converted_and_still_accounted_for():
    sent = {name: tensor.bfloat16() for name, tensor in _sent().items()}
    ledger = Ledger(Stacked())
    ledger.load(sent.items())
    assert ledger.receipt()["checksum"] == _checksum(sent)


@pytest.mark.parametrize("missing", ["up", "embed", "scale"])
def test_a_parameter_that_got_nothing_is_named(missing):
    sent = _sent()
    del sent[missing]
    ledger = Ledger(Stacked(), frozenset(_sent()))
    ledger.load(sent.items())
    with pytest.raises(WeightSyncError, match=rf"1 parameters got no weights.*not sent this time: {missing}"):
        ledger.receipt()


def test_a_tensor_that_no_parameter_takes_is_named():
    with pytest.raises(WeightSyncError, match="somebody.else.*does not have"):
        Ledger(Stacked()).load([*_sent().items(), ("somebody.else", torch.zeros(2))])


def test_a_tensor_that_does_not_fit_is_named():
    with pytest.raises(WeightSyncError, match=r"'up' with shape \(3, 5\).*wants \(4, 3\)"):
        Ledger(Stacked()).load([("gate", _sent()["gate"]), ("up", torch.zeros(3, 5))])


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_that_change_after_the_load_do_not_pass(ranks):
    sent, model = _sent(), Stacked(ranks)
    ledger = Ledger(model)
    ledger.load(sent.items())
    model.gate_up.data[0, 0] += 1
    try:
        assert ledger.receipt()["checksum"] != _checksum(sent)
    except WeightSyncError as error:
        assert "gate" in str(error)


def _call(model, reply: Segment, **message):
    body = bytearray(json.dumps({**message, "reply": reply.path}).encode())
    reply.view(weight_loader.REPLY_BYTES)[:8].zero_()
    weight_loader.load(model, [("message", torch.frombuffer(body, dtype=torch.uint8))])
    memory = reply.view(weight_loader.REPLY_BYTES)
    size = int.from_bytes(bytes(memory[:8].tolist()), "little")
    return json.loads(bytes(memory[8 : 8 + size].tolist()))


def test_a_whole_update_by_messages():
    sent, model = _sent(), Stacked()
    bucket, reply, metas, offset = Segment("bucket"), Segment("reply"), [], 0
    try:
        view = bucket.view(4096)
        for name, tensor in sent.items():
            size = tensor.numel() * 4
            view[offset : offset + size].copy_(tensor.reshape(-1).view(torch.uint8))
            metas.append(vars(TensorMeta(name, tuple(tensor.shape), "float32", offset, size)))
            offset += 64 * -(-size // 64)
        assert _call(model, reply, op="forget") == {}
        assert _call(model, reply, op="load", path=bucket.path, metas=metas) == {}
        assert _call(model, reply, op="receipt") == {"count": 4, "checksum": _checksum(sent)}
        assert "no tensor arrived" in _call(model, reply, op="receipt")["error"]
        # The next update knows the names of this one.
        _call(model, reply, op="load", path=bucket.path, metas=metas[:1])
        assert "not sent this time: embed, scale, up" in _call(model, reply, op="receipt")["error"]
    finally:
        bucket.close()
        reply.close()


def test_no_error_leaves_the_loader():
    """It would end the scheduler process."""
    reply = Segment("reply")
    try:
        answer = _call(Stacked(), reply, op="load", path="/nowhere", metas=[])
        assert "cannot open the trainer's shared memory" in answer["error"]
        assert "KeyError" in _call(Stacked(), reply, op="nonsense")["error"]
    finally:
        reply.close()
