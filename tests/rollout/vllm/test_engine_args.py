"""What vLLM is started with; none of it needs vLLM."""

from __future__ import annotations

import pytest
import rollout_tiny as tiny

from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.vllm.engine_args import build_engine_args, cpu_binding, engine_environment


@pytest.fixture
def args(model_path):
    """args(device="cpu", replica_rank=0, model={...}, **rollout) -> engine arguments."""

    def build(*, device="cpu", replica_rank=0, replicas_on_node=1, model=None, **rollout):
        node = tiny.config(model_path, name="vllm", tensor_model_parallel_size=1, **rollout).actor_rollout_ref
        for key, value in (model or {}).items():
            node.model[key] = value
        return build_engine_args(
            node.rollout, node.model, replica_rank=replica_rank, device=device, replicas_on_node=replicas_on_node
        )

    return build


def test_the_configuration_arrives_under_vllms_names(args, model_path):
    found = args(
        replica_rank=3,
        seed=7,
        max_num_seqs=5,
        dtype="bfloat16",
        logprobs_mode="raw_logprobs",
        scheduling_policy="priority",
    )
    expected = {
        "model": model_path,
        "seed": 10,
        "max_num_seqs": 5,
        "max_model_len": 64,
        "dtype": "bfloat16",
        "logprobs_mode": "raw_logprobs",
        "scheduling_policy": "priority",
        "enable_prefix_caching": True,
        "tensor_parallel_size": 1,
    }
    assert {key: found[key] for key in expected} == expected


def test_the_models_generation_config_is_left_aside(args):
    found = args(temperature=0.7, top_k=4)
    assert found["generation_config"] == "vllm"
    assert found["override_generation_config"] == {
        "temperature": 0.7,
        "top_k": 4,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 32,
    }


def test_engine_kwargs_override_everything(args):
    found = args(engine_kwargs={"vllm": {"seed": 1, "enforce_eager": False, "kv_cache_memory_bytes": 5}})
    assert (found["seed"], found["enforce_eager"], found["kv_cache_memory_bytes"]) == (1, False, 5)


def test_a_cpu_runs_eagerly_with_a_cache_of_stated_size(args):
    found = args(max_num_seqs=4, dtype="float32")
    token = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head size, bytes
    assert found["enforce_eager"] is True
    assert found["kv_cache_memory_bytes"] == 4 * 2 * 128 * token
    assert "gpu_memory_utilization" not in found and "enable_sleep_mode" not in found


def test_the_cache_of_many_replicas_is_bounded_by_the_machine_but_holds_a_sequence(args, monkeypatch):
    from rlflow.utils.device import CpuDevice

    monkeypatch.setattr(CpuDevice, "mem_get_info", staticmethod(lambda device=None: (0, 2**20)))
    assert args(max_num_seqs=4, replicas_on_node=4)["kv_cache_memory_bytes"] == 2 * 128 * 2 * 2 * 2 * 16 * 4


def test_a_gpu_takes_its_share_of_memory_and_may_sleep(args):
    found = args(device="cuda", gpu_memory_utilization=0.4)
    assert found["gpu_memory_utilization"] == 0.4 and found["enable_sleep_mode"] is True
    assert "kv_cache_memory_bytes" not in found and found["enforce_eager"] is False
    assert args(device="cuda", free_cache_engine=False)["enable_sleep_mode"] is False


def test_all_running_sequences_fit_a_step(args):
    assert args(max_num_seqs=600, max_num_batched_tokens=100)["max_num_batched_tokens"] == 600


def test_overrides_of_the_model_reach_vllm_but_not_the_trainers_attention(args):
    override = {"rope_theta": 5e5, "attn_implementation": "sdpa"}
    assert args(model={"override_config": override})["hf_overrides"] == {"rope_theta": 5e5}


@pytest.mark.parametrize(
    ("rollout", "match"),
    [
        ({"load_format": "gguf"}, "load_format=gguf.*dummy"),
        ({"full_determinism": True}, "full_determinism=true.*rollout.name=hf"),
        ({"prompt_length": 400}, "max_model_len=432.*max_position_embeddings=256"),
    ],
)
def test_what_vllm_cannot_do_is_refused(args, rollout, match):
    with pytest.raises(ConfigError, match=match):
        args(**rollout)


@pytest.mark.parametrize(
    ("cores", "ranks", "place", "replicas", "expected"),
    [
        ([0, 1], 1, 0, 1, "0,1"),
        ([0, 1], 1, 1, 2, "1"),
        ([4, 5, 6, 7], 2, 0, 1, "4,5|6,7"),
        ([4, 5, 6, 7], 2, 1, 2, "6|7"),
        ([0, 1, 2], 1, 1, 2, "1"),
        ([0], 1, 0, 2, "nobind"),
    ],
)
def test_replicas_and_their_ranks_get_cores_of_their_own(cores, ranks, place, replicas, expected):
    assert cpu_binding(cores, ranks=ranks, place=place, replicas=replicas) == expected


def test_a_binding_that_the_user_set_wins(monkeypatch):
    assert engine_environment("0,1")["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    env = engine_environment("0,1")
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
