"""Bytes that a device of a run holds at its worst moments, by part.

A device is a GPU, or on device cpu one process. Its phases:

    train        an optimizer step: weights, gradients, optimizer, what the forward keeps, the head's logits
    weights      the weights on their way to the rollout server
    rollout      generation: the server's weights, its cache, the logits of the running sequences

Sizes are those of rows that are as long as they may be: a bound for most steps. What the libraries take before a model is
loaded is not counted. benchmarks/plan_memory.py compares these figures with real processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.critic import need_critic
from rlflow.trainer.plan.batches import micro_batch_tokens, uses_lora
from rlflow.trainer.plan.model_size import ModelSize, model_size
from rlflow.trainer.plan.placement import _has_reference as has_reference

Parts = dict[str, int]
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
# Elements of a chunk of logits, as `rlflow.workers.engine.fsdp.log_prob` cuts them; log-softmax and gradient beside it.
_CHUNK = {"cpu": 7 * 2**20, "cuda": 2**27}
_LOGITS_COPIES = 3
# Of the machine's memory, for the caches of all embedded replicas (`rlflow.workers.rollout.hf.limits`).
_CACHE_SHARE = 0.25


@dataclass(frozen=True)
class DeviceMemory:
    """One kind of device or process: phase -> part -> bytes."""

    name: str
    count: int
    phases: dict[str, Parts]

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes of each phase together."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}


@dataclass(frozen=True)
class MemoryPlan:
    """Estimates; `devices` is empty and `unknown` says why where the model's shapes are not known."""

    devices: list[DeviceMemory] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    unknown: str = ""


def plan_memory(config: Any) -> MemoryPlan:
    """Estimates for a checked configuration."""
    model = config.actor_rollout_ref.model
    size = model_size(model.path, model.hf_config_path, dict(model.override_config or {}))
    if size is None:
        return MemoryPlan(unknown=f"{model.path} is not on this machine: download its config.json, or give a folder")
    parameters = {"actor": size.parameters}
    trainer = _actor(config, size)
    if has_reference(config) and not config.actor_rollout_ref.ref.enable_resource_pool:
        _everywhere(trainer, "reference weights", _reference(config, size))
    if need_critic(config):
        critic = model_size(config.critic.model.path, config.critic.model.hf_config_path) or size
        parameters["critic"] = critic.parameters
        parts = _critic(config, critic)
        _everywhere(trainer, "critic weights", parts["weights"])
        _everywhere(trainer, "critic optimizer", parts["optimizer"])
        if _sum(parts["update"]) > _sum(trainer["train"]) - _sum(_resident(trainer["train"])):
            trainer["train"] = {**_resident(trainer["train"]), **parts["update"]}
    server = _server(config, size)
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    if config.trainer.device == "cpu":
        devices = [DeviceMemory("trainer process", ranks, trainer), DeviceMemory("rollout server", ranks, server)]
        return MemoryPlan(devices, parameters)
    kept = {f"server {name}": size for name, size in server["rollout"].items() if name == "weights"}
    phases = {name: {**parts, **kept} for name, parts in trainer.items()}
    phases["rollout"] = {**_resident(trainer["train"]), **{f"server {k}": v for k, v in server["rollout"].items()}}
    return MemoryPlan([DeviceMemory("GPU (trainer and rollout server)", ranks, phases)], parameters)


def _actor(config: Any, size: ModelSize) -> dict[str, Parts]:
    """Phases of a trainer process."""
    node, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    rank = int(model.lora_rank) or (8 if uses_lora(config) else 0)
    trained = size.adapter_parameters(rank) if uses_lora(config) else size.parameters
    parts = _training(config, node, node.fsdp_config, model, size, trained)
    rollout = config.actor_rollout_ref.rollout
    sent = size.parameters * _BYTES.get(str(rollout.dtype), 2)
    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) * 2**20
    on_the_way = {"bucket": min(sent, 2 * bucket)}
    if config.trainer.device != "cpu":
        on_the_way["one gathered tensor"] = size.vocab * size.hidden * _BYTES.get(str(rollout.dtype), 2)
    return {"train": {**parts["resident"], **parts["update"]}, "weights": {**parts["resident"], **on_the_way}}


def _critic(config: Any, size: ModelSize) -> dict[str, Any]:
    node = config.critic
    parts = _training(config, node, node.fsdp, node.model, size, size.parameters)
    update = {f"critic {name}": value for name, value in parts["update"].items() if name != "logits"}
    resident = parts["resident"]
    return {"weights": resident["weights"], "optimizer": resident["optimizer"], "update": update}


def _training(
    config: Any, node: Any, engine: Any, model: Any, size: ModelSize, trained: int
) -> dict[str, Parts]:
    """What a model that trains holds all the time (`resident`), and in a step (`update`)."""
    device = str(config.trainer.device)
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    shards = ranks if engine.fsdp_size in (-1, 0) or engine.fsdp_size > ranks else int(engine.fsdp_size)
    stored, computed = _BYTES.get(str(engine.model_dtype or "fp32"), 4), _BYTES.get(str(engine.dtype), 2)
    on_device = device == "cpu" or not engine.offload_policy
    states = 0 if node.optim.optimizer == "SGD" else 2
    resident = {
        "weights": size.parameters * stored // shards if on_device and not _leaves(engine, device) else 0,
        "optimizer": trained * stored * states // shards if on_device and not _leaves(engine, device, True) else 0,
    }
    update = {"gradients": trained * stored // shards if on_device else 0}
    if not resident["weights"]:
        update["loaded weights"] = size.parameters * stored // shards if on_device else 0
    if not resident["optimizer"]:
        update["loaded optimizer"] = trained * stored * states // shards if on_device else 0
    if shards > 1 or stored != computed:
        gathered = size.parameters if shards == 1 or not engine.reshard_after_forward else (
            size.root_parameters + 2 * size.layer_parameters
        )
        update["gathered weights"] = gathered * computed
        update["gradients before their reduction"] = (size.root_parameters + size.layer_parameters) * computed
    tokens = micro_batch_tokens(config, node, "fsdp" if node is config.critic else "fsdp_config")
    layer = tokens * size.saved_values_of_a_layer * computed
    if model.enable_gradient_checkpointing:
        update["activations"] = size.layers * tokens * size.hidden * computed + layer
    else:
        update["activations"] = size.layers * layer
    update["logits"] = _logits(engine, size, tokens, device, bool(trained == size.parameters))
    return {"resident": resident, "update": update}


def _leaves(engine: Any, device: str, optimizer: bool = False) -> bool:
    """Whether the part goes to host memory between steps."""
    return device != "cpu" and bool(engine.optimizer_offload if optimizer else engine.param_offload)


def _logits(engine: Any, size: ModelSize, tokens: int, device: str, head_trains: bool) -> int:
    """Chunks of logits in fp32, the head's gradient in fp32, and all log-softmaxes where they are kept."""
    rows = max(32, _CHUNK.get(device, _CHUNK["cuda"]) // size.vocab)
    limit = engine.entropy_from_logits_chunk_size
    rows = min(rows, int(limit)) if engine.entropy_from_logits_with_chunking and limit else rows
    rows = min(rows, tokens) if engine.entropy_from_logits_with_chunking else tokens
    total = _LOGITS_COPIES * rows * size.vocab * 4
    total += size.vocab * size.hidden * 4 if head_trains else 0
    return total if engine.entropy_checkpointing else total + tokens * size.vocab * 4


def _reference(config: Any, size: ModelSize) -> int:
    engine = config.actor_rollout_ref.ref.fsdp_config
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    if _leaves(engine, str(config.trainer.device)):
        return 0
    return size.parameters * _BYTES.get(str(engine.model_dtype or "bf16"), 2) // ranks


def _server(config: Any, size: ModelSize) -> dict[str, Parts]:
    """Phases of a rollout server of the embedded engine."""
    from rlflow.utils.device import cpu_has_slow_bf16

    rollout, on_cpu = config.actor_rollout_ref.rollout, config.trainer.device == "cpu"
    stored = _BYTES.get(str(rollout.dtype), 2)
    wish = ((rollout.engine_kwargs or {}).get("hf") or {}).get("compute_dtype")
    computed = _BYTES.get(str(wish), stored)
    if wish in (None, "auto") and stored == 2 and on_cpu and cpu_has_slow_bf16():
        computed = 4
    longest = int(rollout.max_model_len or rollout.prompt_length + rollout.response_length)
    replicas = max(1, int(config.trainer.n_gpus_per_node))
    wanted = -(-int(config.data.train_batch_size) * int(rollout.n) // (replicas * int(config.trainer.nnodes)))
    running = min(int(rollout.max_num_seqs), wanted) if on_cpu else int(rollout.max_num_seqs)
    cache = running * longest * size.kv_values * computed
    cache = min(cache, _cache_limit(rollout, replicas))
    prefill = min(int(rollout.max_num_batched_tokens), running * int(rollout.prompt_length))
    sent = size.parameters * stored
    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) * 2**20
    weights = size.parameters * computed
    return {
        "rollout": {
            "weights": weights,
            "key-value cache": cache,
            "prompts": prefill * (6 * size.hidden + 3 * size.ffn * size.active_experts) * computed,
            "logits": 3 * running * size.vocab * 4,
        },
        "weights": {"weights": weights, "bucket": min(sent, 2 * bucket)},
    }


def _cache_limit(rollout: Any, replicas: int) -> int:
    import psutil

    given = ((rollout.engine_kwargs or {}).get("hf") or {}).get("kv_cache_gb")
    room = float(given) * 2**30 if given is not None else psutil.virtual_memory().total * _CACHE_SHARE / replicas
    return int(room)


def _everywhere(phases: dict[str, Parts], part: str, size: int) -> None:
    for parts in phases.values():
        parts[part] = size


def _resident(parts: Parts) -> Parts:
    return {name: size for name, size in parts.items() if name.endswith(("weights", "optimizer")) and "ga" not in name[:2]}


def _sum(parts: Parts) -> int:
    return sum(parts.values())
