"""What is vLLM's own, on real replicas: its processes, its extra parameters, and weights of models with biases."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import contract_engines as engines
import rollout_tiny as tiny
from contract_replica import Served, changed, expect_log_probs, parameters

from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.rollout.base import RolloutError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = {"temperature": 0.0, "logprobs": True, "max_tokens": 8, "ignore_eos": True}


def save_qwen(folder: Path) -> str:
    """A tiny Qwen2: biases in the attention, an output head of its own, and a vocabulary that vLLM pads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=500,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    model = Qwen2ForCausalLM(config)
    for param in model.parameters():
        if param.dim() == 1:
            param.data.add_(torch.randn(param.shape) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory, ray_cluster):
    """Raw log-probs, priorities, bfloat16: what the contract's replica has not."""
    case = engines.CASES["vllm"]
    if not case.installed:
        pytest.skip("vllm is not installed; tests/run_engines.sh builds its environment")
    path = save_qwen(tmp_path_factory.mktemp("qwen"))
    served = Served(case, path, logprobs_mode="raw_logprobs", scheduling_policy="priority").launch()
    yield served
    served.close()


def test_weights_with_biases_and_a_padded_vocabulary_arrive(qwen):
    prompt = tiny.prompts(1, seed=40)[0]
    prompt = [token % 500 for token in prompt]
    for version in (1, 2):
        receipt = qwen.sync(version, changed(qwen.model, version))
        assert receipt.tensor_count == len(parameters(qwen.model))
        output = qwen.generate(prompt, GREEDY)
        assert output.token_ids == engines.greedy(qwen.model, prompt, 8)
        expect_log_probs(qwen, prompt, output)


def test_raw_log_probs_are_of_the_models_own_distribution(qwen):
    prompt = [7, 8, 9]
    output = qwen.generate(prompt, {**GREEDY, "temperature": 0.5, "top_k": 2, "seed": 1})
    expect_log_probs(qwen, prompt, output, temperature=1.0)


def test_vllms_own_parameters_are_understood_and_checked(qwen):
    likeliest = engines.greedy(qwen.model, [5], 1)[0]
    output = qwen.generate([5], {**GREEDY, "max_tokens": 1, "logit_bias": {likeliest: -100.0}})
    assert output.token_ids[0] != likeliest
    with pytest.raises(ContractError, match="min_p"):
        qwen.generate([5], {"min_p": 3.0})
    with pytest.raises(ConfigError, match="image_data"):
        qwen.generate([5], {}, image_data=["x"])


def test_requests_of_a_lower_number_are_served_first(qwen):
    """More requests than sequences; those that ask last, with priority, do not end last."""

    async def scenario():
        ended: list[int] = []

        async def one(number: int, priority: int) -> None:
            params = {**GREEDY, "max_tokens": 60}
            await qwen.result(qwen.start([5 + number], params, priority=priority))
            ended.append(number)

        late = [one(number, 5) for number in range(3 * engines.MAX_NUM_SEQS)]
        tasks = [asyncio.create_task(call) for call in late]
        await qwen.until(running=3 * engines.MAX_NUM_SEQS)
        urgent = asyncio.create_task(one(100, 0))
        await asyncio.gather(*tasks, urgent)
        return ended.index(100)

    assert asyncio.run(scenario()) < 2 * engines.MAX_NUM_SEQS + 1


def tree_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_a_killed_server_leaves_no_process(qwen):
    """Last on this replica: it kills it."""
    pid = asyncio.run(qwen.call("ready"))["pid"]
    processes = tree_of(pid)
    assert len(processes) >= 2  # scheduler and worker
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, f"left behind: {processes}"
        time.sleep(0.1)


def test_an_engine_whose_worker_died_says_so_and_ends_with_its_server(contract_model_folder, ray_cluster):
    case = engines.CASES["vllm"]
    if not case.installed:
        pytest.skip("vllm is not installed; tests/run_engines.sh builds its environment")
    served = Served(case, contract_model_folder).launch()
    try:
        facts = asyncio.run(served.call("ready"))
        processes = tree_of(facts["pid"])
        os.kill(facts["workers"][0]["pid"], signal.SIGKILL)
        with pytest.raises(RolloutError, match="engine process died"):
            served.generate([5, 6], {**GREEDY, "max_tokens": 300})
        assert "died" in asyncio.run(served.call("status"))["failure"]
    finally:
        served.close()
    psutil.wait_procs(processes, timeout=20)
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def contract_model_folder(tmp_path_factory):
    return engines.save_model(tmp_path_factory.mktemp("vllm-model"))
