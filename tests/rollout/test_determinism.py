"""Two replicas, client and balancer over Ray: the same sessions get the same bits (`rollout.full_determinism`)."""

from __future__ import annotations

import asyncio
import random

import pytest
import rollout_tiny as tiny
from omegaconf import OmegaConf

from rlflow.utils.determinism import determinism_environment, is_full_determinism
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.limits import engine_limits
from rlflow.workers.rollout.hf.model import load_model
from rlflow.workers.rollout.llm_server import LLMServerManager

PROMPTS = [f"e0r{row}a0" for row in range(4)]
SESSIONS = [f"{uid}_{number}" for uid in PROMPTS for number in range(3)]
IDS = dict(zip(PROMPTS, tiny.prompts(4, seed=50), strict=True))


@pytest.fixture(scope="module")
def servers(ray_cluster, model_path):
    config = tiny.config(model_path, full_determinism=True, max_num_seqs=4)
    config.actor_rollout_ref.rollout.nnodes = 1
    config.actor_rollout_ref.rollout.n_gpus_per_node = 2
    manager = LLMServerManager.create(OmegaConf.create(config))
    yield manager
    manager.shutdown()


def play(servers, order, fail: str | None = None):
    """All sessions, begun in that order: two turns each but for one that ends at once."""
    client = servers.get_client()
    client.announce_sessions(SESSIONS, [])

    async def unfold(session):
        results = []
        try:
            ids = list(IDS[session.split("_")[0]])
            for turn in range(2):
                if session == SESSIONS[5]:
                    return results
                params = {"logprobs": True, "max_tokens": 5 + turn, "ignore_eos": True, "seed": SESSIONS.index(session)}
                output = await client.generate(
                    "any id", prompt_ids=ids, sampling_params=params, session=session, turn=turn
                )
                results.append((output.token_ids, output.log_probs))
                ids += output.token_ids
            return results
        finally:
            client.end_session(session)

    async def everything():
        tasks = {session: asyncio.create_task(unfold(session)) for session in order}
        return {session: await tasks[session] for session in SESSIONS}

    return asyncio.run(everything())


def test_sessions_get_the_same_bits_in_any_order_and_share_the_replicas(servers):
    runs = [play(servers, random.Random(seed).sample(SESSIONS, len(SESSIONS))) for seed in range(3)]
    assert runs[0] == runs[1] == runs[2]
    states = [asyncio.run(replica.status()) for replica in servers.get_replicas()]
    own = [sum(len(ids) for turns in list(runs[0].values())[part] for ids, _ in turns) for part in
           (slice(0, 6), slice(6, 12))]  # fmt: skip
    assert [state["decode_tokens"] for state in states] == [3 * tokens for tokens in own]


def test_more_sessions_than_an_actor_takes_calls_by_default(servers):
    client = servers.get_client()
    names = [f"e{number}r0a0_0" for number in range(2200)]
    client.announce_sessions(names, [])

    async def one(number):
        params = {"max_tokens": 1, "seed": number}
        output = await client.generate("x", prompt_ids=[5], sampling_params=params, session=names[number])
        client.end_session(names[number])
        return output.token_ids

    async def everything():
        return await asyncio.gather(*(one(number) for number in range(len(names))))

    assert all(asyncio.run(everything()))


def test_the_size_of_the_batch_may_not_depend_on_the_machine(model_path):
    import torch

    node = tiny.config(model_path, full_determinism=True, max_num_seqs=10**9, engine_kwargs={"hf": {}})
    rollout = node.actor_rollout_ref.rollout
    model = load_model(node.actor_rollout_ref.model, rollout, torch.device("cpu"))
    with pytest.raises(ConfigError, match="full_determinism=true, but only .*kv_cache_gb"):
        engine_limits(rollout, model, 1)
    rollout.engine_kwargs = {"hf": {"kv_cache_gb": 0.001}}
    assert engine_limits(rollout, model, 1).max_num_seqs < 100
    rollout.engine_kwargs, rollout.full_determinism = {"hf": {}}, False
    assert engine_limits(rollout, model, 1).max_num_seqs < 10**9


def test_processes_of_a_deterministic_run_know_it(monkeypatch):
    for name in ("RLFLOW_FULL_DETERMINISM", "VERL_FULL_DETERMINISM"):
        monkeypatch.delenv(name, raising=False)
    assert not is_full_determinism()
    env = determinism_environment(7)
    assert (env["PYTHONHASHSEED"], env["VLLM_BATCH_INVARIANT"]) == ("7", "1")
    monkeypatch.setenv("RLFLOW_FULL_DETERMINISM", env["RLFLOW_FULL_DETERMINISM"])
    assert is_full_determinism()


def test_a_server_that_died_before_an_announcement_is_passed_over(servers):
    """Last: one of the servers is gone."""
    import os
    import signal

    os.kill(servers.get_replicas()[1].pids[0], signal.SIGKILL)
    results = play(servers, SESSIONS)
    assert all(len(turns) == 2 for session, turns in results.items() if session != SESSIONS[5])
