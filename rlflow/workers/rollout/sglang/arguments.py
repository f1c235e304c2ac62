"""From the configuration to the arguments of `sglang.Engine`.

Every argument that rlflow chooses is chosen here; `rollout.engine_kwargs.sglang` overrides any of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.utils.device import get_torch_device
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.sglang.translate import check_penalty
from rlflow.workers.rollout.sglang.weight_loader import LOADER

logger = logging.getLogger(__name__)

# SGLang keeps a few positions of its context for itself: a prompt must be 6 tokens shorter, a sequence 2.
CONTEXT_MARGIN = 8
# Share of a CPU machine's memory that the key-value pools of all replicas of a node may take.
_CACHE_SHARE = 0.25
_LOAD_FORMATS = ("dummy", "auto", "safetensors")
# What a replica that shares its devices with training frees while it sleeps.
MEMORY_TAGS = ("kv_cache", "weights")

_ENVIRONMENT = {
    # The context is longer than the model's positions by the margin; `token_budget` keeps sequences inside them.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
_CORES_OF_RANKS = "SGLANG_CPU_OMP_THREADS_BIND"
_RAW_LOG_PROBS = "SGLANG_RETURN_ORIGINAL_LOGPROB"
_CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Small helpers are decorated with torch.compile: seconds of compilation, for nothing on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
}


@dataclass(frozen=True)
class EngineArguments:
    """What an engine is started with, and the sizes that its server checks requests against.

    Fields:
        kwargs: of `sglang.Engine`.
        max_model_len: tokens of a sequence, prompt included.
        prompt_length, response_length: give the new tokens of a request that does not say how many it wants.
        eos_token_ids: tokens that end a sequence unless the request ignores them.
        dtype: of weights and arithmetic, as torch names it ("torch.bfloat16").
        tp_size: processes that each hold a part of the weights.
        on_cpu: whether the engine computes on the CPU.
        raw_log_probs: they are of the model's own distribution, instead of the one that was sampled from.
        memory_tags: what `sleep` frees.
    """

    kwargs: dict[str, Any]
    max_model_len: int
    max_num_seqs: int
    prompt_length: int
    response_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    tp_size: int = 1
    on_cpu: bool = True
    raw_log_probs: bool = False
    memory_tags: tuple[str, ...] = MEMORY_TAGS


def engine_environment(rollout_config: Any, device: str) -> dict[str, str]:
    """Variables that SGLang reads when it is imported."""
    raw = {_RAW_LOG_PROBS: "1"} if wants_raw_log_probs(rollout_config) else {}
    return _ENVIRONMENT | raw | (_CPU_ENVIRONMENT if device == "cpu" else {})


def wants_raw_log_probs(rollout_config: Any) -> bool:
    """Log-probs of the model's own distribution, instead of the one that was sampled from."""
    return rollout_config.get("logprobs_mode", None) == "raw_logprobs"


def engine_arguments(
    rollout_config: Any,
    model_config: Any,
    *,
    device: str,
    replica_rank: int = 0,
    replicas_on_node: int = 1,
    own_devices: bool = False,
) -> EngineArguments:
    """Arguments of one replica's engine.

    Args:
        device: "cpu" or "cuda".
        own_devices: nothing else computes on the replica's devices, so its weights may stay while it sleeps.

    Raises:
        ConfigError: sizes the model or the memory cannot give, or an unknown load format.
    """
    from transformers import AutoConfig

    from rlflow.workers.rollout.hf.model import eos_token_ids, parse_dtype

    config, model = rollout_config, model_config
    check_penalty(float(config.get("repetition_penalty", 1.0)), "rollout")
    path = str(Path(str(model.path)).expanduser())
    trust = bool(model.get("trust_remote_code", False))
    hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    text_config = hf_config.get_text_config()
    dtype = parse_dtype(config.dtype, "rollout.dtype")
    if config.load_format not in _LOAD_FORMATS:
        raise ConfigError(
            f"rollout.load_format={config.load_format} is not known to the sglang engine. Try dummy (weights come with "
            "the first sync), auto or safetensors"
        )
    max_model_len = _max_model_len(config, text_config)
    kwargs = {
        **_model_arguments(config, model, path, trust, str(dtype)),
        "tp_size": int(config.tensor_model_parallel_size),
        "context_length": max_model_len + CONTEXT_MARGIN,
        "max_running_requests": int(config.max_num_seqs),
        "chunked_prefill_size": int(config.max_num_batched_tokens),
        "random_seed": int(config.get("seed", 0)) + replica_rank,
        # Every token of the vocabulary may be in the support of a truncated distribution.
        "sampling_mask_max_tokens": int(text_config.vocab_size),
        "grammar_backend": "none",
        # An idle scheduler would keep a core busy while the trainer computes.
        "sleep_on_idle": True,
        "log_level": "warning",
    }
    if device == "cpu":
        kwargs |= _cpu_arguments(config, text_config, dtype, max_model_len, replicas_on_node)
    else:
        kwargs |= _gpu_arguments(config, own_devices)
    kwargs |= _overrides(config)
    tokenizer_path = str(model.get("tokenizer_path") or path)
    return EngineArguments(
        kwargs=kwargs,
        max_model_len=max_model_len,
        max_num_seqs=int(kwargs["max_running_requests"]),
        prompt_length=int(config.prompt_length),
        response_length=int(config.response_length),
        vocab_size=int(text_config.vocab_size),
        eos_token_ids=eos_token_ids(path, hf_config, tokenizer_path, trust),
        dtype=str(dtype),
        tp_size=int(kwargs["tp_size"]),
        on_cpu=device == "cpu",
        raw_log_probs=wants_raw_log_probs(config),
        memory_tags=("kv_cache",) if own_devices else MEMORY_TAGS,
    )


def _model_arguments(config: Any, model: Any, path: str, trust: bool, dtype: str) -> dict[str, Any]:
    override = model.get("override_config") or {}
    return {
        "model_path": path,
        "trust_remote_code": trust,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "dtype": dtype.removeprefix("torch."),
        "load_format": str(config.load_format),
        "custom_weight_loader": [LOADER],
        "json_model_override_args": json.dumps(_plain(override)),
    }


def _cpu_arguments(
    config: Any, text_config: Any, dtype: Any, max_model_len: int, replicas_on_node: int
) -> dict[str, Any]:
    if config.tensor_model_parallel_size > 1 and not os.environ.get(_CORES_OF_RANKS):
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={config.tensor_model_parallel_size}: on a CPU SGLang wants to be told "
            f"which cores each rank computes on. Set it to 1, or the variable {_CORES_OF_RANKS} (0-3|4-7)."
        )
    return {
        "device": "cpu",
        # The default for a CPU needs kernels that are not published for it.
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "max_total_tokens": _pool_tokens(config, text_config, dtype, max_model_len, replicas_on_node),
    }


def _gpu_arguments(config: Any, own_devices: bool) -> dict[str, Any]:
    frees = bool(config.free_cache_engine)
    return {
        "mem_fraction_static": float(config.get("gpu_memory_utilization", None) or 0.5),
        "disable_cuda_graph": bool(config.get("enforce_eager", False)),
        "disable_radix_cache": not bool(config.get("enable_prefix_caching", True)),
        # Sleep gives memory back through it; the copy on the CPU lets a replica wake without a sync.
        "enable_memory_saver": frees,
        "enable_weights_cpu_backup": frees and not own_devices,
    }


def _max_model_len(config: Any, text_config: Any) -> int:
    length = int(config.max_model_len or config.prompt_length + config.response_length)
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions and length > positions:
        raise ConfigError(
            f"rollout.max_model_len={length} (null = prompt_length + response_length) is over the model's "
            f"max_position_embeddings={positions}. Shorten prompts or responses, or take a model with a longer context."
        )
    return length


def _pool_tokens(config: Any, text_config: Any, dtype: Any, max_model_len: int, replicas_on_node: int) -> int:
    """Tokens of the key-value pool on a CPU: what the sequences can need, capped by the machine's memory."""
    from rlflow.workers.rollout.hf.kv_cache import KVShape

    sequence = max_model_len + CONTEXT_MARGIN
    room = get_torch_device().mem_get_info()[1] * _CACHE_SHARE / replicas_on_node
    fit = int(room // KVShape.from_config(text_config).bytes_per_token(dtype))
    if fit < sequence:
        raise ConfigError(
            f"The key-value pool may take {room / 2**30:.2f} GiB, which holds {fit} tokens; one sequence of "
            f"rollout.max_model_len={max_model_len} needs more. Shorten the sequences, or set "
            "rollout.engine_kwargs.sglang.max_total_tokens."
        )
    return min(fit, int(config.max_num_seqs) * sequence)


def _overrides(config: Any) -> dict[str, Any]:
    return _plain((config.get("engine_kwargs") or {}).get("sglang") or {})


def _plain(node: Mapping[str, Any]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    return plain
