"""Reward models as Ray actors: their numbers, their deaths, and the door for functions that ask them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import urllib.error
import urllib.request

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlflow.config import HFModelConfig
from rlflow.config.reward import RewardConfig
from rlflow.reward_loop import Invalid, RewardInput, RewardLoopManager
from rlflow.reward_loop.router import RewardRouter
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.rollout.hf.scoring_server import HFScoringServer

PROMPT = [{"role": "user", "content": "1+1"}]


def config(path, pool, **reward):
    node = {"enable": True, "enable_resource_pool": pool, "n_gpus_per_node": 1, "nnodes": 1, "model_path": str(path)}
    node["rollout"] = {"dtype": "float32", "prompt_length": 40, "response_length": 40, "request_timeout_s": 60.0}
    base = OmegaConf.structured(RewardConfig(num_workers=1))
    rollout = {"full_determinism": False}
    return OmegaConf.create(
        {
            "reward": OmegaConf.merge(base, {"reward_model": node, **reward}),
            "actor_rollout_ref": {"rollout": rollout, "model": {"path": str(path), "external_lib": None}},
        }
    )


def data(text, **columns):
    row = {"raw_prompt": PROMPT, "data_source": "s", "reward_model": {"ground_truth": "2"}, "extra_info": {}, **columns}
    return RewardInput([1], [2], [1], text, row)


def expected(path, text):
    """A plain transformers forward over the rendered conversation."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    rendered = AutoTokenizer.from_pretrained(path).apply_chat_template(
        [*PROMPT, {"role": "assistant", "content": text}], tokenize=False
    )
    assert rendered == f"<s>[user] 1+1</s><s>[assistant] {text}</s>"
    ids = AutoTokenizer.from_pretrained(path)(rendered, return_tensors="pt")
    with torch.no_grad():
        return pytest.approx(model(**ids).logits.item(), rel=1e-4, abs=1e-5)


def scores(manager, *inputs):
    handle = manager.workers[0]
    return ray_get([handle.compute_score.remote(item) for item in inputs], what="scores", timeout_s=120)


def server_pid(manager):
    server = manager.reward_model.rollout_replicas[0].server_handle
    return ray_get(server.status.remote(), what="status", timeout_s=60)["pid"]


@pytest.mark.timeout(240)
def test_a_model_on_its_own_pool_scores_at_any_time_and_survives_a_kill(ray_cluster, tiny_reward_model_dir):
    import ray

    manager = RewardLoopManager(config(tiny_reward_model_dir, pool=True))
    try:
        assert manager.reward_loop_worker_handles == manager.workers
        with pytest.raises(ContractError, match="colocated"):
            manager.compute_rm_score([])
        texts = ["2", "three", "it is 2"]
        result = scores(manager, *map(data, texts), data("x" * 90), data("2", raw_prompt=None))
        for text, score in zip(texts, result[:3], strict=True):
            assert score.value == expected(tiny_reward_model_dir, text)
            assert score.extra_info == {"score": score.value}
        assert isinstance(result[3], Invalid) and "more than 80" in result[3].reason
        assert isinstance(result[4], Invalid) and "raw_prompt" in result[4].reason
        assert manager.status()[0]["scorer_pids"] == [], "a model needs no scorer process"

        first = server_pid(manager)
        os.kill(first, 9)
        [again] = scores(manager, data("2"))
        # Up to rounding: the first time other rows were in its batch.
        assert again.value == expected(tiny_reward_model_dir, "2") and server_pid(manager) != first

        ray.kill(manager.reward_model.rollout_replicas[0].server_handle)
        started = time.monotonic()
        [gone] = scores(manager, data("2"))
        assert isinstance(gone, Invalid) and "servers of the reward model died" in gone.reason
        assert time.monotonic() - started < 30
    finally:
        manager.shutdown()


def test_the_router_answers_in_http():
    class Client:
        timeout_s = 5.0

        async def score(self, conversation):
            if conversation == "long":
                raise ContractError("too long")
            return float(len(conversation))

    async def run():
        router = RewardRouter(Client())

        def post(path, body):
            try:
                with urllib.request.urlopen(f"http://{router.address}{path}", json.dumps(body).encode()) as reply:
                    return reply.status, json.load(reply)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)["error"]

        status, reply = await asyncio.to_thread(post, "/classify", {"input": ["ab", "abc"]})
        assert status == 200
        assert reply["data"] == [{"index": i, "probs": [n], "num_classes": 1} for i, n in enumerate((2.0, 3.0))]
        status, reply = await asyncio.to_thread(post, "/classify", {"messages": PROMPT})
        assert (status, reply["data"][0]["probs"]) == (200, [1.0])
        for path, body, code, message in (
            ("/classify", {"input": "long"}, 400, "too long"),
            ("/classify", {"input": 3}, 400, "text"),
            ("/classify", {"text": "a"}, 400, "messages"),
            ("/v1/chat/completions", {}, 501, "Generative"),
            ("/metrics", {}, 404, "not served"),
        ):
            status, reply = await asyncio.to_thread(post, path, body)
            assert status == code and message in reply
        router.close()

    asyncio.run(run())


def test_what_cannot_score_says_why_when_asked_to_be_ready(tiny_model_dir, tiny_reward_model_dir, tmp_path):
    rollout = config(tiny_model_dir, pool=True).reward.reward_model.rollout
    with pytest.raises(ConfigError, match="no classification head"):
        asyncio.run(HFScoringServer(rollout, HFModelConfig(path=str(tiny_model_dir)), 0).ready())
    mute = shutil.copytree(tiny_reward_model_dir, tmp_path / "mute")
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        asyncio.run(HFScoringServer(rollout, HFModelConfig(path=str(mute)), 0).ready())


def test_a_bos_that_template_and_tokenizer_both_put_in_front_is_there_once(tiny_reward_model_dir, tmp_path):
    folder = shutil.copytree(tiny_reward_model_dir, tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("ab")["input_ids"][0] == 1
    rollout = config(folder, pool=True).reward.reward_model.rollout
    server = HFScoringServer(rollout, HFModelConfig(path=str(folder)), 0)

    async def score(conversation):
        return await server.score(conversation)

    answered = asyncio.run(score([*PROMPT, {"role": "assistant", "content": "2"}]))
    assert answered == expected(tiny_reward_model_dir, "2")


@pytest.mark.gpu
def test_on_a_device_sleep_moves_the_weights_away_and_scores_stay(tiny_reward_model_dir, monkeypatch):
    monkeypatch.setenv("RLFLOW_DEVICE", "cuda")
    rollout = config(tiny_reward_model_dir, pool=False).reward.reward_model.rollout
    server = HFScoringServer(rollout, HFModelConfig(path=str(tiny_reward_model_dir)), 0)
    conversation = [*PROMPT, {"role": "assistant", "content": "2"}]

    async def run():
        before = await server.score(conversation)
        held = torch.cuda.memory_allocated()
        await server.sleep()
        assert torch.cuda.memory_allocated() < held
        await server.wake_up()
        assert await server.score(conversation) == before == expected(tiny_reward_model_dir, "2")

    asyncio.run(run())
