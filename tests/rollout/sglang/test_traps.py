"""What SGLang does that its callers do not expect, and that our engine takes care of. One real engine for all.

Each test shows the trap in the version that is pinned, so that an upgrade that changes it is noticed, and the way out.
"""

from __future__ import annotations

import pytest
import rollout_tiny as tiny
from sglang_probe import act, start_server, stop_server

from rlflow.utils.errors import WeightSyncError
from rlflow.utils.ray_utils import ray_get

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LONG = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(model_path, ray_cluster):
    actor = start_server(model_path, response_length=200, max_num_seqs=4)
    yield actor
    stop_server(actor)


def generate(server, prompt, request_id="r", **params):
    call = server.generate.remote(
        prompt, {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **params}, request_id
    )
    return ray_get(call, what="a generation", timeout_s=120)


def test_an_update_outside_a_session_is_refused_by_a_returned_value(server):
    """Not raised: whoever does not look at it trains on with old weights. Ours raises."""

    async def raw(it):
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[MultiprocessingSerializer.serialize([])])
        return await it._engine._manager.update_weights_from_tensor(request, None)

    success, message = act(server, raw)
    assert success is False and "between begin_weight_update() and end_weight_update()" in message

    async def ours(it):
        await it._engine.tell({"op": "forget"})

    with pytest.raises(WeightSyncError, match="SGLang refused a weight update.*begin_weight_update"):
        act(server, ours)


def test_a_second_session_is_refused_and_an_open_one_is_closed_by_ours(server):
    async def raw(it):
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await it._engine.begin_update()
        answer = await it._engine._manager.begin_weight_update(BeginWeightUpdateReqInput(), None)
        await it._engine.begin_update()
        await it._engine.end_update()
        await it._engine.end_update()
        return answer

    success, message = act(server, raw)
    assert success is False and "already open" in message


def test_a_payload_must_be_a_list_of_one_a_rank(server):
    """A dict is taken for a list of its keys."""

    async def raw(it):
        from sglang.srt.utils import normalize_serialized_named_tensor_payloads

        try:
            normalize_serialized_named_tensor_payloads({"flattened_tensor": b"", "metadata": b""})
        except Exception as error:  # noqa: BLE001 - of whatever type
            return type(error).__name__

    assert act(server, raw) is not None

    async def ours(it):
        await it._engine.begin_update()
        answers = await it._engine.tell({"op": "forget"})
        await it._engine.end_update()
        return answers

    assert act(server, ours) == [{}]  # one answer a rank


def test_memory_is_released_only_once_nothing_runs(server):
    """Asked for while it is busy, SGLang's scheduler asserts, and dies of it. Ours waits for the rest."""

    async def ours(it):
        import asyncio

        running = asyncio.ensure_future(it.generate([5, 6, 7], LONG, "busy"))
        while not it._gate.running:
            await asyncio.sleep(0.01)
        await it._engine.release(("kv_cache",))
        finished = running.done() or len((await running).token_ids) == 200
        await it._engine.release(("kv_cache",))  # given back already: asking again would end the scheduler, too
        await it._engine.resume()
        await it._engine.resume()
        return finished, it._engine.failure

    assert act(server, ours) == (True, None)
    assert len(generate(server, [5, 6, 7]).token_ids) == 4


def test_parameters_read_by_name_are_no_proof(server):
    """A few numbers of a few models (of Qwen2 none at all), so the receipt is made in the scheduler's process."""

    async def raw(it):
        from sglang.srt.managers.io_struct import GetWeightsByNameReqInput

        request = GetWeightsByNameReqInput(name="model.embed_tokens.weight", truncate_size=5)
        return await it._engine._manager.get_weights_by_name(request, None)

    rows = act(server, raw)
    assert rows is None or len(rows) == 5 < tiny.VOCAB


def test_a_request_is_not_aborted_with_one_whose_name_it_begins_with(server):
    """SGLang aborts all requests whose names begin so."""

    async def both(it):
        import asyncio

        calls = [asyncio.ensure_future(it.generate([5, 6], LONG, name)) for name in ("r1", "r10")]
        while it._gate.running < 2:
            await asyncio.sleep(0.01)
        assert await it.abort_request("r1")
        return [(await call).stop_reason for call in calls]

    assert act(server, both) == ["abort", "length"]


def test_usual_log_probs_do_not_know_of_truncation(server):
    """Ours ask for the support, whose log-probs sum to one."""

    async def raw(it):
        options = {"return_logprob": True, "return_sampling_mask": True}
        sampling = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 2, "ignore_eos": True, "sampling_seed": 3}
        meta = (await it._engine.generate([5, 6, 7], sampling, "raw", **options))["meta_info"]
        return [row[0] for row in meta["output_token_logprobs"]], meta["output_token_sampling_logprobs"]

    usual, own = act(server, raw)
    assert len(usual) == len(own) == 6 and all(a < b - 1e-4 for a, b in zip(usual, own, strict=True))
    params = {"temperature": 1.0, "top_k": 2, "logprobs": True, "max_tokens": 6, "seed": 3}
    assert generate(server, [5, 6, 7], **params).log_probs == pytest.approx(own, abs=1e-6)


def test_a_failed_scheduler_does_not_end_the_server_without_a_word(server):
    """A scheduler that dies sends its parent SIGQUIT, whose default is to end the process."""

    async def signal_to_itself(it):
        import asyncio
        import os
        import signal

        os.kill(os.getpid(), signal.SIGQUIT)
        await asyncio.sleep(0.2)
        return it._engine.failure

    assert act(server, signal_to_itself) is None


def test_an_idle_scheduler_leaves_the_cores_alone(server):
    """By itself it asks for work in a loop, beside a trainer on the same cores."""

    async def used(it):
        import asyncio

        import psutil

        schedulers = [psutil.Process(pid) for pid in it._engine.processes()]
        before = [sum(process.cpu_times()[:2]) for process in schedulers]
        await asyncio.sleep(3.0)
        return max(sum(p.cpu_times()[:2]) - b for p, b in zip(schedulers, before, strict=True))

    assert act(server, used) < 1.0
