"""Bytes that a device of a run holds at its worst moments, by part.

A device is a GPU, or on device cpu one process. Its phases:

    train        an optimizer step: weights, gradients, optimizer, what the forward keeps, the head's logits
    weights      the weights on their way to the rollout server
    rollout      generation: the server's weights, its cache, the logits of the running sequences

Sizes are those of rows that are as long as they may be: a bound for most steps. What the libraries take before a model
is loaded is not counted. benchmarks/plan_memory.py compares these figures with real processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlflow.config.critic import need_critic
from rlflow.config.pools import has_reference_model, uses_lora
from rlflow.trainer.plan.batches import micro_batch_tokens
from rlflow.trainer.plan.model_size import ModelSize, model_size
from rlflow.trainer.plan.placement import devices_a_replica

Parts = dict[str, int]
_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
# Elements of a chunk of logits, as `rlflow.workers.engine.fsdp.log_prob` cuts them; log-softmax and gradient beside it.
_CHUNK = {"cpu": 7 * 2**20, "cuda": 2**27}
_LOGITS_COPIES = 3
# Of the machine's memory, for the caches of all embedded replicas (`rlflow.workers.rollout.hf.limits`).
_CACHE_SHARE = 0.25
# Of an adapter that is loaded from a folder, whose config is not read here.
_USUAL_RANK = 16


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
    """Estimates; `devices` is empty and `unknown` says why where the model's shapes are not known.

    `remark`: what an engine decides for itself.
    """

    devices: list[DeviceMemory] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    unknown: str = ""
    remark: str = ""


@dataclass(frozen=True)
class _Trained:
    """What a model that trains holds all the time, and in an optimizer step beside that."""

    resident: Parts
    update: Parts


def plan_memory(config: Any) -> MemoryPlan:
    """Estimates for a checked configuration."""
    model = config.actor_rollout_ref.model
    size = model_size(model.path, model.hf_config_path, dict(model.override_config or {}))
    if size is None:
        return MemoryPlan(unknown=f"{model.path} is not on this machine: download its config.json, or give a folder")
    parameters = {"actor": size.parameters}
    trained = [_actor(config, size)]
    if need_critic(config):
        critic = model_size(config.critic.model.path, config.critic.model.hf_config_path) or size
        parameters["critic"] = critic.parameters
        trained.append(_critic(config, critic))
    resident = {name: part for one in trained for name, part in one.resident.items()}
    if has_reference_model(config) and not config.actor_rollout_ref.ref.enable_resource_pool:
        resident["reference weights"] = _reference(config, size)
    # The models of a process are updated one after the other.
    worst = max((one.update for one in trained), key=lambda update: sum(update.values()))
    trainer = {"train": {**resident, **worst}, "weights": {**resident, **_sent(config, size)}}
    server = _server(config, size)
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    if config.trainer.device == "cpu":
        devices = [DeviceMemory("trainer process", ranks, trainer), DeviceMemory("rollout server", ranks, server)]
        return MemoryPlan(devices, parameters, remark=_remark(config))
    beside = {"server weights": server["rollout"]["weights"]}
    phases = {phase: {**parts, **beside} for phase, parts in trainer.items()}
    phases["rollout"] = {**resident, **{f"server {name}": part for name, part in server["rollout"].items()}}
    return MemoryPlan(
        [DeviceMemory("GPU (trainer and rollout server)", ranks, phases)], parameters, remark=_remark(config)
    )


def _actor(config: Any, size: ModelSize) -> _Trained:
    node, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    trained = size.parameters
    if uses_lora(config):
        trained = size.adapter_parameters(int(model.lora_rank) or _USUAL_RANK)
    update, resident = _training(config, node, node.fsdp_config, size, trained)
    tokens = micro_batch_tokens(config, node, "fsdp_config")
    update["activations"] = _activations(size, model, node.fsdp_config, tokens)
    update["gradients on their way"] = _passing(size, node.fsdp_config, tokens)
    if size.tied and trained == size.parameters:  # the head and the embedding each make a gradient of their matrix
        update["gradients on their way"] += size.vocab * size.hidden * _BYTES.get(str(node.fsdp_config.dtype), 2)
    update["logits"] = _logits(config, node.fsdp_config, size, tokens, head_trains=trained == size.parameters)
    return _Trained(resident, update)


def _critic(config: Any, size: ModelSize) -> _Trained:
    """A value head has one output: there are no logits."""
    node = config.critic
    update, resident = _training(config, node, node.fsdp, size, size.parameters)
    tokens = micro_batch_tokens(config, node, "fsdp")
    update["activations"] = _activations(size, node.model, node.fsdp, tokens)
    update["gradients on their way"] = _passing(size, node.fsdp, tokens)
    return _Trained(*({f"critic {name}": part for name, part in parts.items()} for parts in (resident, update)))


def _training(config: Any, node: Any, engine: Any, size: ModelSize, trained: int) -> tuple[Parts, Parts]:
    """Parts of an update and parts that stay; offloaded ones are loaded for the update."""
    device, shards = str(config.trainer.device), _shards(config, engine)
    stored, computed = _BYTES.get(str(engine.model_dtype or "fp32"), 4), _BYTES.get(str(engine.dtype), 2)
    # With offload_policy weights, gradients and optimizer live in host memory all the time.
    on_device = 0 if device != "cpu" and engine.offload_policy else 1
    states = 0 if node.optim.optimizer == "SGD" else 2
    weights = size.parameters * stored // shards * on_device
    optimizer = trained * stored * states // shards * on_device
    resident = {
        "weights": 0 if device != "cpu" and engine.param_offload else weights,
        "optimizer": 0 if device != "cpu" and engine.optimizer_offload else optimizer,
    }
    update = {"gradients": trained * stored // shards * on_device}
    update |= {"loaded weights": weights - resident["weights"], "loaded optimizer": optimizer - resident["optimizer"]}
    if shards > 1 or stored != computed:
        frees = shards > 1 and engine.reshard_after_forward
        gathered = size.root_parameters + 2 * size.layer_parameters if frees else size.parameters
        update["gathered weights"] = gathered * computed
        update["gradients before their reduction"] = (size.root_parameters + size.layer_parameters) * computed
    return update, resident


def _shards(config: Any, engine: Any) -> int:
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    return int(engine.fsdp_size) if 0 < engine.fsdp_size < ranks else ranks


def _activations(size: ModelSize, model: Any, engine: Any, tokens: int) -> int:
    computed = _BYTES.get(str(engine.dtype), 2)
    layer = tokens * size.saved_values_of_a_layer * computed
    if model.enable_gradient_checkpointing:
        return size.layers * tokens * size.hidden * computed + layer
    return size.layers * layer


def _passing(size: ModelSize, engine: Any, tokens: int) -> int:
    """Gradients of what one layer kept, while the backward is in it."""
    return tokens * size.saved_values_of_a_layer * _BYTES.get(str(engine.dtype), 2)


def _sent(config: Any, size: ModelSize) -> Parts:
    """Weights on their way: two buckets take turns; on a GPU each tensor is gathered first."""
    rollout = config.actor_rollout_ref.rollout
    stored = _BYTES.get(str(rollout.dtype), 2)
    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) * 2**20
    parts = {"bucket": min(size.parameters * stored, 2 * bucket)}
    if config.trainer.device != "cpu":
        parts["one gathered tensor"] = size.vocab * size.hidden * stored
    return parts


def _logits(config: Any, engine: Any, size: ModelSize, tokens: int, head_trains: bool) -> int:
    """Chunks of logits in fp32, the head's gradient in fp32, and all log-softmaxes where they are kept."""
    rows = tokens
    if engine.entropy_from_logits_with_chunking:
        chunk = _CHUNK.get(str(config.trainer.device), _CHUNK["cuda"])
        rows = min(tokens, max(32, chunk // size.vocab), int(engine.entropy_from_logits_chunk_size))
    kept = 0 if engine.entropy_checkpointing else tokens * size.vocab
    return 4 * (_LOGITS_COPIES * rows * size.vocab + kept + (size.vocab * size.hidden if head_trains else 0))


def _reference(config: Any, size: ModelSize) -> int:
    engine = config.actor_rollout_ref.ref.fsdp_config
    if config.trainer.device != "cpu" and (engine.param_offload or engine.offload_policy):
        return 0
    return size.parameters * _BYTES.get(str(engine.model_dtype or "bf16"), 2) // _shards(config, engine)


def _remark(config: Any) -> str:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "hf":
        return ""
    share = f"gpu_memory_utilization={rollout.gpu_memory_utilization} of each device"
    return f"{rollout.name} sizes its cache itself ({share}); the figures are what the embedded engine would take"


def _server(config: Any, size: ModelSize) -> dict[str, Parts]:
    """Phases of a rollout server, with the cache of the embedded engine."""
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
    weights = size.parameters * computed // devices_a_replica(config)
    return {
        "rollout": {
            "weights": weights,
            "key-value cache": cache,
            "prompts": prefill * (6 * size.hidden + 3 * size.ffn * size.active_experts) * computed,
            "logits": 3 * running * size.vocab * 4,
        },
        "weights": {"weights": weights, "bucket": _sent(config, size)["bucket"]},
    }


def _cache_limit(rollout: Any, replicas: int) -> int:
    import psutil

    given = ((rollout.engine_kwargs or {}).get("hf") or {}).get("kv_cache_gb")
    room = float(given) * 2**30 if given is not None else psutil.virtual_memory().total * _CACHE_SHARE / replicas
    return int(room)
