"""PPO with a critic on a CUDA device: policy and critic in one process over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ppo_on_the_gpu(
    dtype: str,
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    tiny_model_dir: Path,
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    run_trainer(
        [
            *tiny_overrides,
            "trainer.device=cuda",
            "algorithm.adv_estimator=gae",
            f"critic.model.path={tiny_model_dir}",
            f"critic.fsdp.dtype={dtype}",
            f"actor_rollout_ref.actor.fsdp_config.dtype={dtype}",
            f"actor_rollout_ref.rollout.dtype={dtype}",
            "critic.optim.lr=1e-3",
            "trainer.save_freq=2",
        ]
    )
    lines = read_metrics()
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        data = line["data"]
        assert data["actor/grad_norm"] > 0 and data["critic/grad_norm"] > 0
        assert data["critic/vf_loss"] >= 0
        assert data["critic/values/max"] > data["critic/values/min"]
    assert (tmp_path / "checkpoints" / "global_step_2" / "critic").is_dir()


def test_the_values_are_those_of_a_cpu(tiny_model_dir: Path) -> None:
    """The same engine, jagged rows in, on the device of this machine; a plain transformers model on the CPU."""
    from rlflow.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from rlflow.utils import tensordict_utils as tu
    from rlflow.workers.engine.fsdp.engine import FSDPEngineWithValueHead

    engine = FSDPEngineWithValueHead(
        HFModelConfig(path=str(tiny_model_dir)),
        FSDPEngineConfig(dtype="float32", max_token_len_per_gpu=256),
        FSDPOptimizerConfig(),
    )
    engine.initialize()
    assert engine.device.type == "cuda"
    rows = [torch.randint(3, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14, 30)]
    data = tu.get_tensordict(
        {"input_ids": tu.nested_from_list(rows), "responses": tu.nested_from_list([row[4:] for row in rows])}
    )
    values = engine.infer_batch(data)["model_output"]["values"].unbind()
    model = type(engine.module.hf_model)(engine.hf_config).eval()
    model.load_state_dict({name: tensor.cpu() for name, tensor in engine.get_per_tensor_param()[0]})
    for row, mine in zip(rows, values, strict=True):
        expected = model(row[None]).logits[0, 3:-1, 0].detach()
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
