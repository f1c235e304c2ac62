"""`broadcast` and `disk` from a policy of two FSDP ranks to replicas on devices of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import rollout_tiny as tiny
import torch
from omegaconf import OmegaConf, open_dict

from rlflow.checkpoint_engine.manager import build_manager
from rlflow.config.overrides import compose_config
from rlflow.utils.ray_utils import ray_get
from rlflow.workers.engine_workers import ActorRolloutRefWorker
from rlflow.workers.rollout.hf.replica import HFReplica

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
ROLE = "actor_rollout"


def policy_config(path: str, backend: str, folder: Path) -> Any:
    rollout = "actor_rollout_ref.rollout"
    config = compose_config(
        [
            f"actor_rollout_ref.model.path={path}",
            "data.train_files=x",
            "data.val_files=x",
            "data.max_prompt_length=32",
            "data.max_response_length=32",
            f"{rollout}.name=hf",
            f"{rollout}.dtype=bfloat16",
            f"{rollout}.load_format=dummy",
            f"{rollout}.checkpoint_engine.backend={backend}",
            f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=1",
            f"+{rollout}.checkpoint_engine.engine_kwargs.disk.folder={folder}",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.optim.total_training_steps=10",
            "trainer.device=cpu",
        ]
    ).actor_rollout_ref
    with open_dict(config):
        OmegaConf.resolve(config)
    return config


def held(replica: HFReplica) -> dict[str, torch.Tensor]:
    call = replica.server_handle.__ray_call__.remote(
        lambda server: {name: p.clone() for name, p in server._engine.model.module.named_parameters()}
    )
    return ray_get(call, what="the weights", timeout_s=60)


@pytest.mark.parametrize("backend", ["broadcast", "disk"])
def test_two_ranks_feed_standalone_replicas(ray_cluster: None, model_path: str, tmp_path: Path, backend: str) -> None:
    from rlflow.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

    config = policy_config(model_path, backend, tmp_path)
    cls = create_colocated_worker_cls({ROLE: RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role=ROLE)})
    pool = RayResourcePool([2], device_name="cpu")
    group = RayWorkerGroup(pool, cls, device_name="cpu")
    replicas = [HFReplica(rank, config.rollout, config.model, gpus_per_node=1) for rank in range(2)]
    manager = None
    try:
        actor = group.spawn({ROLE})[ROLE]
        actor.init_model()

        async def start() -> None:
            await asyncio.gather(*(replica.init_standalone() for replica in replicas))

        asyncio.run(start())
        manager = build_manager(config.rollout, actor, replicas)
        for version in (1, 2):
            metrics = manager.update_weights(version)
            assert (metrics["replicas"], metrics["version"]) == (2, version)
        wanted = dict(tiny.plain_model(model_path).named_parameters())
        for replica in replicas:
            got = held(replica)
            assert set(got) == set(wanted)
            for name, value in wanted.items():
                torch.testing.assert_close(got[name].float(), value.to(torch.bfloat16).float(), rtol=0, atol=0)
    finally:
        for replica in replicas:
            if manager is not None:
                manager.remove_replicas([replica])
            asyncio.run(replica.shutdown())
        group.shutdown()
        pool.release()
