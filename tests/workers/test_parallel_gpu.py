"""What only a GPU can show: state that is moved away and back, and the table of combinations over NCCL."""

from __future__ import annotations

import parallel_cases
import pytest
import rank_jobs
import torch
from test_gradients import _relative
from test_parallel_table import differences

from rlflow.workers.engine.fsdp.engine import FSDPEngine

pytestmark = pytest.mark.gpu

PLAIN = parallel_cases.PLAIN
OFFLOADS = {
    "weights and optimizer": {"param_offload": True, "optimizer_offload": True, "grad_offload": True},
    "optimizer": {"optimizer_offload": True},
    "by fully_shard": {"offload_policy": True},
}


@pytest.fixture(scope="module")
def plain(table_models, single_process_group):
    return rank_jobs.plain_results(table_models)


def _devices(engine: FSDPEngine) -> tuple[set[str], set[str]]:
    """Devices of the weights and of the optimizer's tensors."""
    assert engine.optimizer is not None
    moments = (t for state in engine.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim())
    return {p.device.type for p in engine.module.parameters()}, {t.device.type for t in moments}


@pytest.mark.parametrize("way", OFFLOADS)
def test_state_waits_in_host_memory_and_nothing_changes(table_models, plain, way):
    options = OFFLOADS[way]
    engine = rank_jobs.build_case(table_models, PLAIN, **options)
    loss = rank_jobs.table_loss(PLAIN)
    for seed in range(3):
        data = parallel_cases.rollouts(seed)
        data = rank_jobs.tu.assign_non_tensor_whole(data, parallel_cases.batch_options(PLAIN))
        with engine.train_mode():
            engine.train_batch(data, loss)
    weights, moments = _devices(engine)
    assert weights == ({"cuda"} if way == "optimizer" else {"cpu"})
    assert moments == {"cpu"}
    assert _relative(rank_jobs.trained_params(engine), plain[parallel_cases.kind(PLAIN)]["AdamW"]) < 1e-5


def test_bf16_on_a_gpu_is_close(table_models, plain):
    engine = rank_jobs.build_case(table_models, PLAIN, dtype="bfloat16")
    out = engine.infer_batch(parallel_cases.rollouts(0))["model_output"]["log_probs"]
    exact = torch.cat([row for row in plain[parallel_cases.kind(PLAIN)]["outputs"]])
    assert float((out.values() - exact).abs().mean()) < 0.2


def test_no_combination_changes_the_numbers_over_nccl(table_models, run_ranks, plain):
    world = max((w for w in (2, 4) if w <= torch.cuda.device_count()), default=1)
    if world == 1:
        pytest.skip("one GPU")
    cases = parallel_cases.pairwise(world)
    results = run_ranks(world, "tables", device="cuda", models=table_models, cases={world: cases})[world]
    wrong = [f"{c}: {text}" for c, r in zip(cases, results, strict=True) for text in differences(c, r, plain)]
    assert not wrong, "\n".join(wrong)
