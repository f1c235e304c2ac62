"""From the `rollout` and `model` nodes to the arguments of vLLM's engine, and to the environment of its processes.

`rollout.engine_kwargs.vllm` overrides everything else: its keys are the names of vLLM's own arguments.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from rlflow.utils.errors import ConfigError

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "rlflow.workers.rollout.vllm.worker_extension.WeightReceiver"
_LOAD_FORMATS = ("dummy", "auto", "safetensors")
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# vLLM's block on a CPU, tokens; a sequence's last block is rarely full.
_CPU_BLOCK = 128
# Share of the machine's memory that the caches of all replicas of a node may take on a CPU.
_CPU_CACHE_SHARE = 0.25


def build_engine_args(
    rollout: Any, model: Any, *, replica_rank: int, device: str, replicas_on_node: int = 1
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    Args:
        rollout, model: the nodes `actor_rollout_ref.rollout` and `.model`, resolved.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: what this engine cannot do.
    """
    if rollout.load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"rollout.load_format={rollout.load_format} is not known to the vllm adapter. Try dummy (weights come with "
            f"the first sync) or one of {', '.join(_LOAD_FORMATS[1:])}"
        )
    if rollout.get("full_determinism", False):
        raise ConfigError(
            "rollout.full_determinism=true cannot hold with rollout.name=vllm: its batches depend on when requests "
            "arrive. Use rollout.name=hf"
        )
    hf_config = _hf_config(model)
    lengths = int(rollout.prompt_length), int(rollout.response_length)
    max_model_len = int(rollout.max_model_len or sum(lengths))
    positions = getattr(hf_config, "max_position_embeddings", None)
    if positions and max_model_len > positions:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} (null = prompt_length + response_length) is over the model's "
            f"max_position_embeddings={positions}. Shorten prompts or responses, or take a model with a longer context."
        )
    args: dict[str, Any] = {
        "model": str(Path(str(model.path)).expanduser()),
        "trust_remote_code": bool(model.get("trust_remote_code", False)),
        "dtype": str(rollout.dtype),
        "load_format": str(rollout.load_format),
        "max_model_len": max_model_len,
        "max_num_seqs": int(rollout.max_num_seqs),
        # Sequences that decode must all fit one step.
        "max_num_batched_tokens": max(int(rollout.max_num_batched_tokens), int(rollout.max_num_seqs)),
        "enable_chunked_prefill": bool(rollout.enable_chunked_prefill),
        "enable_prefix_caching": bool(rollout.enable_prefix_caching),
        "scheduling_policy": str(rollout.scheduling_policy),
        "logprobs_mode": str(rollout.logprobs_mode),
        "enforce_eager": bool(rollout.enforce_eager),
        "disable_log_stats": bool(rollout.disable_log_stats),
        "skip_tokenizer_init": bool(rollout.skip_tokenizer_init),
        "seed": int(rollout.seed) + replica_rank,
        "tensor_parallel_size": int(rollout.tensor_model_parallel_size),
        "pipeline_parallel_size": int(rollout.pipeline_model_parallel_size),
        "data_parallel_size": int(rollout.data_parallel_size),
        "distributed_executor_backend": "mp",
        "worker_extension_cls": WORKER_EXTENSION,
        "generation_config": "vllm",  # not the model's own, which may truncate or penalise
        "override_generation_config": {
            "temperature": float(rollout.temperature),
            "top_k": int(rollout.top_k),
            "top_p": float(rollout.top_p),
            "repetition_penalty": 1.0,
            "max_new_tokens": int(rollout.response_length),
        },
        "hf_overrides": _hf_overrides(model),
    }
    if tokenizer := model.get("tokenizer_path"):
        args["tokenizer"] = str(Path(str(tokenizer)).expanduser())
    args |= _lora_args(model)
    if device == "cpu":
        args |= _cpu_args(rollout, hf_config, max_model_len, replicas_on_node)
    else:
        args |= {
            "gpu_memory_utilization": float(rollout.gpu_memory_utilization),
            "enable_sleep_mode": bool(rollout.free_cache_engine),
        }
    own = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    return args | _plain(own)


def _cpu_args(rollout: Any, hf_config: Any, max_model_len: int, replicas_on_node: int) -> dict[str, Any]:
    """What differs on a CPU: no compilation, and a cache of a stated size.

    Compiling takes minutes, and each weight sync replaces the packed matrices that compiled code would hold on to.
    """
    from rlflow.utils.device import get_torch_device
    from rlflow.workers.rollout.hf.kv_cache import KVShape
    from rlflow.workers.rollout.hf.model import parse_dtype

    if not rollout.enforce_eager:
        logger.info("rollout.enforce_eager is taken as true on a CPU; engine_kwargs.vllm.enforce_eager overrides it")
    token = KVShape.from_config(hf_config).bytes_per_token(parse_dtype(str(rollout.dtype), "rollout.dtype"))
    sequence = (-(-max_model_len // _CPU_BLOCK) + 1) * _CPU_BLOCK * token
    room = int(get_torch_device().mem_get_info()[1] * _CPU_CACHE_SHARE / replicas_on_node)
    # vLLM writes the whole cache when it starts, so one larger than all sequences need would only cost memory.
    size = min(sequence * int(rollout.max_num_seqs), max(room, sequence))
    return {"enforce_eager": True, "kv_cache_memory_bytes": size}


def _lora_args(model: Any) -> dict[str, Any]:
    """An adapter is served as one only if the trainer sends it as one (`model.lora.merge` false)."""
    rank = int(model.get("lora_rank", 0) or 0)
    if not rank or (model.get("lora") or {}).get("merge", False):
        return {}
    fitting = [size for size in _LORA_RANKS if size >= rank]
    if not fitting:
        raise ConfigError(
            f"model.lora_rank={rank} is over vLLM's largest rank, {_LORA_RANKS[-1]}. Lower it, or set "
            "model.lora.merge=true to send merged weights."
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}


def _hf_config(model: Any) -> Any:
    from transformers import AutoConfig

    path = str(Path(str(model.get("hf_config_path") or model.path)).expanduser())
    return AutoConfig.from_pretrained(path, trust_remote_code=bool(model.get("trust_remote_code", False)))


def _hf_overrides(model: Any) -> dict[str, Any]:
    override = _plain(model.get("override_config") or {})
    override = override.get("model_config") or override
    # The trainer's attention implementation; the engine brings its own.
    return {key: value for key, value in override.items() if key != "attn_implementation"}


def _plain(node: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def cpu_binding(cores: list[int], *, ranks: int, place: int, replicas: int) -> str:
    """Value of VLLM_CPU_OMP_THREADS_BIND: cores of each rank of a replica, disjoint from those of its neighbours.

    vLLM's own choice, "auto", gives every replica of a machine the same cores.

    Args:
        cores: that the node's processes may use.
        ranks: worker processes of one replica.
        place: number of this replica among the `replicas` of the node.
    """
    workers = ranks * replicas
    if len(cores) < workers:
        return "nobind"
    share = len(cores) // workers
    first = place * ranks * share
    parts = [cores[first + rank * share : first + (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in part) for part in parts)


def engine_environment(binding: str) -> dict[str, str]:
    """Variables that vLLM's processes read, to be set before vLLM is imported."""
    env = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy the actor's threads and locks
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
    }
    env |= {key: os.environ[key] for key in env if key in os.environ and key != "VLLM_WORKER_MULTIPROC_METHOD"}
    return env
