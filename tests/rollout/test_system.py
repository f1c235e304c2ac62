"""Trainer processes, weight sync, replicas, balancer and client together, over Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal

import pytest
import rollout_tiny as tiny
import rollout_worker
import torch

from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.checkpoint_engine.manager import CheckpointEngineManager, SyncState
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError, WeightSyncError
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.base import RolloutError, SamplingParams
from rlflow.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

GREEDY = {"temperature": 0.0, "logprobs": True, "max_tokens": 12, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "logprobs": True, "max_tokens": 12, "ignore_eos": True, "seed": 11}


class System:
    """Two workers, two replicas and what connects them."""

    def __init__(self, path: str, **rollout) -> None:
        import ray

        from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        ray.cloudpickle.register_pickle_by_value(rollout_worker)
        self.config = tiny.config(path, load_format="dummy", **rollout)
        node = self.config.actor_rollout_ref.rollout
        pool = RayResourcePool([2], use_gpu=False)
        cls = RayClassWithInitArgs(ray.remote(rollout_worker.FeedWorker), path, node)
        self.workers = RayWorkerGroup(pool, cls, device_name="cpu")
        self.servers = LLMServerManager.create(self.config, self.workers)
        self.workers.bind_rollout(self.servers.handles_by_worker())
        self.sync = CheckpointEngineManager(node.checkpoint_engine, self.workers, self.servers.get_replicas())
        self.client = pickle.loads(pickle.dumps(self.servers.get_client()))

    def generate(self, prompt, params, request_id="r"):
        return asyncio.run(self.client.generate(request_id, prompt_ids=prompt, sampling_params=params))

    def close(self) -> None:
        self.servers.shutdown()
        self.workers.shutdown()


@pytest.fixture(scope="module")
def system(ray_cluster, model_path):
    system = System(model_path)
    yield system
    system.close()


def cold_output(system, make_engine, prompt, **params):
    """What an engine that never held other weights makes of the trainer's present weights."""
    engine = make_engine(version=None, load_format="dummy")
    weights = system.workers.weights()[0]
    engine.pause()
    engine.load_weights(lambda model: [model.load(name, tensor) for name, tensor in weights.items()]).result(30)
    checksum = combine([tensor_digest(name, tensor) for name, tensor in weights.items()])
    engine.finish_update(1, len(weights), checksum).result(30)
    engine.resume()
    return engine.submit(prompt, SamplingParams.from_dict(params), request_id="cold").result(30)


def test_generation_before_the_first_sync_is_refused(system):
    with pytest.raises(ContractError, match="before the first weight sync"):
        system.generate([5, 6], GREEDY)


def test_a_sync_brings_the_trainers_weights(system, make_engine, plain):
    metrics = system.sync.update_weights(0)
    size = sum(p.numel() * 4 for p in plain.parameters())
    assert metrics["bytes"] == size and metrics["version"] == 0 and metrics["replicas"] == 2
    assert metrics["tensor_count"] == len(list(plain.parameters()))
    assert system.sync.state is SyncState.SERVING
    prompt = tiny.prompts(1, seed=20)[0]
    output = system.generate(prompt, SAMPLED)
    assert output.extra_fields["global_steps"] == 0
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 0)
    assert output.stop_reason == "length" and output.extra_fields["raw_stop_reason"] == "length"
    expected = tiny.log_probs_of(plain, prompt, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=1e-4, rtol=0)


def test_after_an_update_no_key_or_value_of_the_old_weights_is_left(system, make_engine):
    system.sync.update_weights(1)
    prompt = tiny.prompts(1, seed=21, low=20)[0]
    before = [system.generate(prompt, SAMPLED, f"c{i}") for i in range(2)]
    system.workers.change(7)
    system.sync.sleep_replicas()
    assert system.sync.state is SyncState.ASLEEP
    system.sync.update_weights(2)
    after = [system.generate(prompt, SAMPLED, f"c{i}") for i in range(2)]
    cold = cold_output(system, make_engine, prompt, **SAMPLED)
    assert before[0].token_ids == before[1].token_ids != after[0].token_ids
    for output in after:
        assert output.extra_fields["global_steps"] == 2
        assert output.token_ids == cold.token_ids
        assert output.log_probs == pytest.approx(cold.log_probs, abs=1e-6)


def test_requests_during_a_sync_are_aborted_or_wait_and_see_one_version_each(system):
    system.sync.update_weights(3)

    async def scenario():
        params = {**SAMPLED, "max_tokens": 50}
        calls = [
            asyncio.create_task(
                system.client.generate(f"q{i}", prompt_ids=[5 + i], sampling_params={**params, "seed": i})
            )
            for i in range(12)
        ]
        while sum([s["running"] for s in [await r.status() for r in system.servers.get_replicas()]]) == 0:
            if all(c.done() for c in calls):
                break
        system.workers.change(8)
        await system.sync.update_weights(4)
        late = await system.client.generate("late", prompt_ids=[5], sampling_params=SAMPLED)
        return await asyncio.gather(*calls), late

    outputs, late = asyncio.run(scenario())
    assert late.extra_fields["global_steps"] == 4
    for output in outputs:
        assert output.stop_reason in ("length", "abort")
        assert len(output.token_ids) == len(output.log_probs)
        assert output.extra_fields["min_global_steps"] == output.extra_fields["max_global_steps"]


def test_the_fully_async_client_hides_an_interruption(system):
    system.sync.update_weights(5)
    client = system.servers.get_client(FullyAsyncLLMServerClient)
    params = {**SAMPLED, "max_tokens": 58}
    given = dict(params)

    async def scenario():
        calls = [
            asyncio.create_task(client.generate(f"f{i}", prompt_ids=[4 + i, 5], sampling_params=params))
            for i in range(8)
        ]
        while sum([s["running"] for s in [await r.status() for r in system.servers.get_replicas()]]) == 0:
            if all(c.done() for c in calls):
                break
        await system.sync.update_weights(6)
        return await asyncio.gather(*calls)

    outputs = asyncio.run(scenario())
    assert params == given
    for i, output in enumerate(outputs):
        assert output.stop_reason == "length" and len(output.token_ids) == len(output.log_probs) == 58
        assert 5 <= output.extra_fields["min_global_steps"] <= output.extra_fields["max_global_steps"] <= 6
        whole = system.generate([4 + i, 5], params)  # versions 5 and 6 are the same weights
        assert output.token_ids == whole.token_ids


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("drop", "got no weights in this sync: model.layers.1.mlp.up_proj.weight"),
        ("rename", "'model.somebody.else', which the served LlamaForCausalLM does not have"),
    ],
)
def test_a_wrong_set_of_tensors_stops_the_run_and_names_them(system, what, match):
    system.workers.change(9, fault=(what, "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightSyncError, match=match):
        system.sync.update_weights(7)
    # Generation was resumed, and is refused rather than served from a mixture of weights.
    with pytest.raises(ContractError, match="weight update did not finish"):
        system.generate([5], GREEDY)
    system.workers.change(9, fault=None)
    system.sync.update_weights(8)
    assert system.generate([5], GREEDY).extra_fields["global_steps"] == 8


def test_a_sync_that_fails_before_it_touches_the_weights_leaves_them_served(system):
    system.workers.change(9, fault=("double", "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightSyncError, match="'model.layers.1.mlp.up_proj.weight' twice"):
        system.sync.update_weights(9)
    assert system.generate([5], GREEDY).extra_fields["global_steps"] == 8


def test_an_exception_while_gathering_resumes_generation(system):
    from rlflow.single_controller.errors import WorkerError

    system.workers.change(9, fault=("raise", "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WorkerError, match="gathering failed"):
        system.sync.update_weights(9)
    assert system.sync.state is SyncState.SERVING
    status = [asyncio.run(r.status()) for r in system.servers.get_replicas()]
    assert not any(s["paused"] or s["asleep"] for s in status)
    system.workers.change(9, fault=None)
    system.sync.update_weights(10)
    assert system.generate([5], GREEDY).extra_fields["global_steps"] == 10


def test_a_value_altered_on_the_way_is_noticed(system):
    def flip(server):
        model = server._engine.model
        load = type(model).load

        def altered(name, tensor, digest=None):
            if name == "model.norm.weight":
                tensor = tensor.clone()
                tensor[3] += 1e-3
            load(model, name, tensor, digest)

        model.load = altered

    def restore(server):
        del server._engine.model.load

    handle = system.servers.server_handles[1]
    ray_get(handle.__ray_call__.remote(flip), what="the fault", timeout_s=30)
    with pytest.raises(WeightSyncError, match="replica 1.*hold other values than were sent: model.norm.weight"):
        system.sync.update_weights(11)
    ray_get(handle.__ray_call__.remote(restore), what="its end", timeout_s=30)
    system.sync.update_weights(12)


def test_weights_may_not_change_while_a_replica_serves(system):
    handle = system.servers.server_handles[0]
    with pytest.raises(ContractError, match="pause it"):
        ray_get(handle.load_bucket.remote([], "/nowhere"), what="a bucket", timeout_s=30)


def test_the_callers_parameters_are_not_changed_and_unknown_ones_are_refused(system):
    params = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": False, "seed": 3}
    given = dict(params)
    output = system.generate([5, 6], params)
    assert params == given and output.log_probs is None
    with pytest.raises(ConfigError, match="engine hf cannot use beam_width=4"):
        system.generate([5], {"beam_width": 4})
    with pytest.raises(ContractError, match="cannot be continued"):
        system.generate([5] * 64, GREEDY)


def test_a_cancelled_caller_frees_its_slot(system):
    async def scenario():
        await system.sync.abort_replicas()
        call = asyncio.create_task(system.client.generate("gone", prompt_ids=[5], sampling_params=GREEDY))
        replicas = system.servers.get_replicas()
        while sum([(await r.status())["waiting"] for r in replicas]) == 0:
            pass
        call.cancel()
        while sum([(await r.status())["waiting"] for r in replicas]) > 0:
            pass
        await system.sync.resume_generation_replicas()
        balancer = system.servers.global_load_balancer
        return await balancer.get_total_inflight.remote()

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == 0


def test_a_request_over_its_deadline_fails_with_the_reason(system):
    client = pickle.loads(pickle.dumps(system.client))
    client._timeout_s = 0.3

    async def scenario():
        await system.sync.abort_replicas()
        try:
            await client.generate("slow", prompt_ids=[5], sampling_params=GREEDY)
        finally:
            await system.sync.resume_generation_replicas()

    with pytest.raises(DeadlineError, match="before its first token.*paused=True"):
        asyncio.run(scenario())


def test_shared_memory_is_used_again_and_no_server_holds_on_to_it(system):
    def memory(pid):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        with open(f"/proc/{pid}/maps") as maps:
            mapped = sorted(line.split()[4] for line in maps if "rlflow-weights" in line)  # inodes
        return sum("rlflow-weights" in link for link in links), mapped

    system.sync.update_weights(13)
    before = [memory(pid) for pid in system.workers.pids]
    system.sync.update_weights(14)
    assert [memory(pid) for pid in system.workers.pids] == before
    assert all(len(mapped) <= 3 for _, mapped in before)
    for handle in system.servers.server_handles:
        pid = ray_get(handle.ready.remote(), what="its process", timeout_s=30)["pid"]
        assert memory(pid) == (0, [])


def test_a_dead_server_is_removed_and_its_requests_go_elsewhere(system):
    """Last in this module: it kills the replicas."""
    pids = [asyncio.run(r.status())["pid"] for r in system.servers.get_replicas()]
    balancer = system.servers.global_load_balancer

    async def scenario():
        await system.client.generate("sticky", prompt_ids=[5], sampling_params=GREEDY)
        server_id, _ = await balancer.acquire_server.remote("sticky")
        os.kill(pids[int(server_id.removeprefix("replica_"))], signal.SIGKILL)
        output = await system.client.generate("sticky", prompt_ids=[5], sampling_params=GREEDY)
        return server_id, output, await balancer.get_all_servers.remote()

    dead, output, left = asyncio.run(scenario())
    assert len(output.token_ids) == 12 and dead not in left and len(left) == 1
    with pytest.raises(RolloutError, match="replica .* died"):
        system.sync.sleep_replicas()
    os.kill(pids[int(next(iter(left)).removeprefix("replica_"))], signal.SIGKILL)
    with pytest.raises(RolloutError, match="no rollout server is alive"):
        system.generate([5], GREEDY)
