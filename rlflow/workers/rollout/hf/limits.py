"""Sizes of an engine, from the configuration, the model and the memory of the node."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from rlflow.utils.device import get_torch_device
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.hf.model import ServedModel

logger = logging.getLogger(__name__)

# Share of the machine's memory that the caches of all replicas of a node may reserve, unless
# rollout.engine_kwargs.hf.kv_cache_gb says otherwise. Pages are used only as sequences grow.
_CACHE_SHARE = 0.25


@dataclass(frozen=True)
class EngineLimits:
    """`max_num_seqs` sequences of up to `max_model_len` tokens; `prefill_tokens` prompt tokens a forward.

    `prompt_length` and `response_length` give the new tokens of a request that does not say how many it wants.
    """

    max_model_len: int
    max_num_seqs: int
    prompt_length: int
    response_length: int
    prefill_tokens: int = 8192


def engine_limits(rollout_config: Any, model: ServedModel, replicas_on_node: int) -> EngineLimits:
    """Sizes of the engine from the configuration and the memory of the node.

    Raises:
        ConfigError: a sequence longer than the model's positions, a cache that holds not even one sequence, or, with
            `full_determinism`, sizes that would depend on the machine.
    """
    config = rollout_config
    lengths = int(config.prompt_length), int(config.response_length)
    max_model_len = int(config.max_model_len or sum(lengths))
    positions = getattr(model.module.config, "max_position_embeddings", None)
    if positions and max_model_len > positions:
        raise ConfigError(
            f"rollout.max_model_len={max_model_len} (null = prompt_length + response_length) is over the model's "
            f"max_position_embeddings={positions}. Shorten prompts or responses, or take a model with a longer context."
        )
    options = (config.get("engine_kwargs") or {}).get("hf") or {}
    gigabytes = options.get("kv_cache_gb")
    if gigabytes is not None:
        room = float(gigabytes) * 2**30
    else:
        room = get_torch_device().mem_get_info()[1] * _CACHE_SHARE / replicas_on_node
    sequence = model.kv_shape.bytes_per_token(model.dtype) * max_model_len
    slots = min(int(config.max_num_seqs), int(room // sequence))
    if slots < 1:
        raise ConfigError(
            f"The key-value cache may take {room / 2**30:.2f} GiB, but one sequence of rollout.max_model_len="
            f"{max_model_len} tokens needs {sequence / 2**30:.2f} GiB. Raise rollout.engine_kwargs.hf.kv_cache_gb or "
            "shorten the sequences."
        )
    if slots < config.max_num_seqs and gigabytes is None and config.get("full_determinism"):
        raise ConfigError(
            f"rollout.full_determinism=true, but only {slots} of rollout.max_num_seqs={config.max_num_seqs} sequences "
            "fit this machine's memory, and results would depend on it. Set rollout.max_num_seqs to at most "
            f"{slots}, or rollout.engine_kwargs.hf.kv_cache_gb to what the cache may take on any machine."
        )
    if slots < config.max_num_seqs:
        logger.info(
            "%d sequences fit the key-value cache; rollout.max_num_seqs=%d is capped", slots, config.max_num_seqs
        )
    return EngineLimits(max_model_len, slots, *lengths, prefill_tokens=int(config.max_num_batched_tokens))
