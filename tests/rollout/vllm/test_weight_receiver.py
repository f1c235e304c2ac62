"""The two ends of a sync around vLLM's processes: what counts as missing, and which weights may serve."""

from __future__ import annotations

import asyncio

import pytest
import torch

from rlflow.checkpoint_engine.base import TensorMeta
from rlflow.utils.errors import ContractError, WeightSyncError
from rlflow.workers.rollout.vllm.weights import WeightDoor
from rlflow.workers.rollout.vllm.worker_extension import missing_tensors, shared_parameters

META = [TensorMeta("a", (2,), "float32", 0, 8)]


class Packed(torch.nn.Module):
    """Two packed projections, a plain one, and parts that the checkpoint packs as the model does."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleDict(
            {name: torch.nn.Linear(2, 2, bias=False) for name in ("qkv_proj", "o_proj", "norm")}
        )


def names(*parts: str) -> set[str]:
    return {f"layer.{part}.weight" for part in parts}


@pytest.mark.parametrize(
    ("sent", "loaded", "missing"),
    [
        (names("q_proj", "k_proj", "v_proj", "o_proj", "norm"), names("qkv_proj", "o_proj", "norm"), []),
        (names("q_proj", "v_proj", "o_proj", "norm"), names("qkv_proj", "o_proj", "norm"), ["layer.k_proj.weight"]),
        (names("q_proj", "k_proj", "v_proj", "norm"), names("qkv_proj", "norm"), ["layer.o_proj.weight"]),
        # A checkpoint that has the parts in one tensor already.
        (names("qkv_proj", "o_proj", "norm"), names("qkv_proj", "o_proj", "norm"), []),
        (set(), set(), sorted(names("q_proj", "k_proj", "v_proj", "o_proj", "norm"))),
    ],
)
def test_a_part_of_a_packed_parameter_that_never_came_is_missing(sent, loaded, missing):
    assert missing_tensors(Packed(), sent, loaded, {}) == missing


def test_a_head_that_shares_the_embeddings_weights_is_not_missing():
    model = torch.nn.Module()
    model.embed, model.head, model.norm = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
    model.head.weight = model.embed.weight
    shared = shared_parameters(model)
    assert shared == {"embed.weight": {"head.weight"}, "head.weight": {"embed.weight"}}
    # While weights are received the two are parameters of their own.
    model.head.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    came = {"embed.weight", "norm.weight"}
    assert missing_tensors(model, came, came, shared) == []
    assert missing_tensors(model, {"norm.weight"}, {"norm.weight"}, shared) == ["embed.weight", "head.weight"]


class Workers:
    """Two worker processes that answer as told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers = {
            "begin_receiving": [{}, {}],
            "receive_bucket": [{"bytes": 8}, {"bytes": 8}],
            "finish_receiving": [{"names": ["a"], "checksum": 5, "missing": []}] * 2,
            "stop_receiving": [{}, {}],
        }
        self.door = WeightDoor(self.call, self.clear, "Rollout replica 0", 1)

    async def call(self, method, *args):
        self.calls.append(method)
        return self.answers[method]

    async def clear(self):
        self.calls.append("clear")


@pytest.fixture
def workers():
    return Workers()


def update(workers, version=2, count=1, checksum=5):
    async def run():
        await workers.door.begin(True)
        await workers.door.load(META, "/nowhere", True)
        return await workers.door.finish(version, count, checksum)

    return asyncio.run(run())


def test_a_good_update_clears_the_caches_before_its_version_serves(workers):
    receipt = update(workers)
    assert (receipt.version, receipt.tensor_count, receipt.total_bytes, receipt.checksum) == (2, 1, 8, 5)
    assert workers.calls == ["begin_receiving", "receive_bucket", "finish_receiving", "clear"]
    assert workers.door.version == 2


def test_an_update_that_touched_nothing_leaves_the_old_weights_served(workers):
    asyncio.run(workers.door.begin(True))
    asyncio.run(workers.door.abandon())
    assert workers.calls == [] and workers.door.version == 1
    workers.door.require_usable()


def test_from_the_first_bucket_there_is_no_version(workers):
    asyncio.run(workers.door.begin(True))
    asyncio.run(workers.door.load(META, "/nowhere", True))
    assert workers.door.version is None
    workers.door.require_usable()  # requests wait: an update is on its way
    workers.door.end_waiting()
    with pytest.raises(ContractError, match="last weight update did not finish"):
        workers.door.require_usable()
    asyncio.run(workers.door.abandon())
    assert workers.calls[-1] == "stop_receiving" and workers.door.version is None


@pytest.mark.parametrize(
    ("method", "answers", "match"),
    [
        ("begin_receiving", [{}, {"error": "RuntimeError: out of memory"}], "Rollout replica 0: RuntimeError: out of"),
        ("receive_bucket", [{"error": "ValueError: tensor 'a'"}, {"bytes": 8}], "tensor 'a'"),
        ("finish_receiving", [{"error": "ValueError: shapes"}, {"error": "ValueError: shapes"}], "shapes"),
        ("finish_receiving", [{"names": ["a"], "checksum": 5, "missing": ["b"]}] * 2, "1 parameters .* no weights .*b"),
    ],
)
def test_an_error_in_any_worker_stops_the_update(workers, method, answers, match):
    workers.answers[method] = answers
    with pytest.raises(WeightSyncError, match=match):
        update(workers)
    assert workers.door.version is None and not workers.door.updating
    if "error" in str(answers):
        assert workers.calls[-1] == "stop_receiving"
    assert "clear" not in workers.calls


def test_modules_that_cannot_be_made_whole_are_reported_too(workers):
    workers.answers |= {"receive_bucket": [{"error": "first"}], "stop_receiving": [{"error": "second"}]}
    with pytest.raises(WeightSyncError, match="first; and the engine could not put its modules together again: second"):
        update(workers)


def test_one_worker_with_other_bytes_gives_the_receipt_that_differs(workers):
    workers.answers["finish_receiving"] = [
        {"names": ["a"], "checksum": 5, "missing": []},
        {"names": ["a"], "checksum": 6, "missing": []},
    ]
    assert update(workers).checksum == 6
    assert workers.door.version is None


def test_weights_change_only_at_rest(workers):
    for call in (workers.door.begin(False), workers.door.load(META, "/nowhere", False)):
        with pytest.raises(ContractError, match="pause it"):
            asyncio.run(call)
