"""Replicas on devices of their own, two runs in one cluster, and the trainer's end of a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import rollout_tiny as tiny
import torch

from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout import BaseRollout, get_rollout_class
from rlflow.workers.rollout.llm_server import LLMServerManager
from rlflow.workers.rollout.replica import RolloutMode, get_rollout_replica_class

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def names_and_groups() -> tuple[set[str], dict[str, str]]:
    """Named actors of the cluster, and the states of its placement groups by name."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    assert ray.is_initialized()
    actors = {item["name"] for item in list_named_actors(all_namespaces=True)}
    return actors, {group["name"]: group["state"] for group in placement_group_table().values()}


async def ask(manager: LLMServerManager) -> list[int]:
    output = await manager.get_client().generate("r", prompt_ids=[5, 6, 7], sampling_params=GREEDY)
    return list(output.token_ids)


async def launch(*paths: str) -> list[LLMServerManager]:
    configs = [tiny.config(path, nnodes=1, n_gpus_per_node=1) for path in paths]
    return list(await asyncio.gather(*[_create(config) for config in configs]))


async def _create(config: Any) -> LLMServerManager:
    return await LLMServerManager.create(config)


def test_two_runs_share_a_cluster_with_replicas_in_pools_of_their_own(ray_cluster, model_path, tmp_path_factory):
    other_path = tiny.save_model(tmp_path_factory.mktemp("other-model"), seed=5)
    actors_before, groups_before = names_and_groups()
    managers = asyncio.run(launch(model_path, other_path))
    try:
        actors, groups = names_and_groups()
        assert actors == actors_before, "nothing can be found, or taken for another's, by its name"
        new = {name: state for name, state in groups.items() if name not in groups_before}
        pools = [name for name, state in new.items() if name.startswith("rollout_pool_0_") and state == "CREATED"]
        assert len(pools) == 2
        replicas = [manager.get_replicas()[0] for manager in managers]
        assert all(replica.rollout_mode is RolloutMode.STANDALONE for replica in replicas)
        assert all(replica.resource_pool.max_colocate_count == 2 for replica in replicas)
        answers = [asyncio.run(ask(manager)) for manager in managers]
        for path, answer in zip((model_path, other_path), answers, strict=True):
            logits = tiny.plain_model(path)(torch.tensor([[5, 6, 7, *answer[:-1]]])).logits[0, 2:]
            assert logits.argmax(-1).tolist() == answer
        check_adapter(replicas[0], model_path, answers[0])
    finally:
        for manager in managers:
            manager.shutdown()
    _, groups = names_and_groups()
    assert all(groups[name] == "REMOVED" for name in pools)


def check_adapter(replica: Any, path: str, before: list[int]) -> None:
    """Weights that a user's code sends by hand are served under the version it says."""
    cls = get_rollout_class("hf")
    assert issubclass(cls, BaseRollout)
    adapter: Any = cls(replica.config, replica.model_config, None, server=replica.server_handle)
    model = tiny.plain_model(path)
    for param in model.parameters():
        param.data.mul_(0.5)

    async def exchange() -> Any:
        await adapter.release()
        receipt = await adapter.update_weights(model.named_parameters(), global_steps=9)
        await adapter.resume(["weights", "kv_cache"])
        return receipt, await replica.server_handle.generate.remote([5, 6, 7], GREEDY, "by-hand", 30.0)

    receipt, output = asyncio.run(exchange())
    assert receipt.version == 9 and output.extra_fields["version_spans"] == [[9, 8]]
    assert model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax().item() == output.token_ids[0]
    assert output.token_ids != before


@pytest.mark.parametrize(
    ("arguments", "match"),
    [(("hf", "sync"), "mode='sync'"), (("mine",), "name='mine'")],
)  # fmt: skip
def test_an_adapter_that_does_not_exist_is_named(arguments, match):
    with pytest.raises(ConfigError, match=match):
        get_rollout_class(*arguments)


def test_devices_that_replicas_do_not_fit_are_refused(model_path):
    with pytest.raises(ConfigError, match="0 devices cannot hold rollout replicas of 1 .*both must be set"):
        LLMServerManager.create(tiny.config(model_path))
    with pytest.raises(ConfigError, match="prefill and decode"):
        get_rollout_replica_class("hf", disaggregation_enabled=True)
