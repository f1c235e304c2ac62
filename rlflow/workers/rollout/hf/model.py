"""The model a replica serves: loading, arithmetic type, and in-place weight updates with proof.

Invariants
    - Weights are those of `rollout.dtype`, whatever type the arithmetic uses: a value that arrives is representable in
      that type, so that the receipt can be computed from the parameters themselves, after loading.
    - `load` changes parameters in place; `finish` tells which tensors never arrived. Between the two the model is
      a mixture of versions and must not serve.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.checkpoint_engine.checksum import combine, tensor_digest
from rlflow.utils.attention_needs import AttentionCalls
from rlflow.utils.errors import ConfigError, WeightSyncError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.moe_weights import expert_parts, splits_experts
from rlflow.workers.rollout.hf.kv_cache import (
    ATTENTION_NAME,
    KVShape,
    check_attention_support,
    register_attention,
)

logger = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def parse_dtype(name: str, key: str) -> torch.dtype:
    """`bfloat16`/`bf16` or `float32`/`fp32`; anything else is a `ConfigError` that names `key`."""
    try:
        return _DTYPES[str(name)]
    except KeyError:
        raise ConfigError(f"{key}={name} is not served by the hf engine. Try bfloat16 or float32") from None


def arithmetic_dtype(weights: torch.dtype, wish: str | None, device: torch.device) -> torch.dtype:
    """Type of activations and cache.

    `wish` (`rollout.engine_kwargs.hf.compute_dtype`) decides when it is set. Otherwise bfloat16 weights are computed
    with in bfloat16 only where that is the fast way: a CPU without bfloat16 matrix units multiplies fp32 about 1.6
    times faster (and more exactly), at twice the memory.
    """
    if wish not in (None, "auto"):
        return parse_dtype(str(wish), "rollout.engine_kwargs.hf.compute_dtype")
    if weights == torch.bfloat16 and device.type == "cpu" and not _has_bf16_matrix_units():
        return torch.float32
    return weights


def _has_bf16_matrix_units() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: assume the common case of recent hardware
        return True


class ServedModel:
    """A causal LM in evaluation mode whose attention runs over the slot cache."""

    def __init__(self, model: Any, *, weights_dtype: torch.dtype, eos_token_ids: frozenset[int]) -> None:
        check_attention_support(model.config)
        if not getattr(model, "_supports_attention_backend", False):
            raise ConfigError(
                f"{type(model).__name__} does not route its attention through transformers' attention interface, "
                "which the hf rollout engine needs. Serve it with another engine (rollout.name)."
            )
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        self.module = model.eval().requires_grad_(False)
        self.weights_dtype = weights_dtype
        self.eos_token_ids = eos_token_ids
        self.kv_shape = KVShape.from_config(model.config)
        self._attention_calls = AttentionCalls.needed_by(model.config)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        # Tied weights appear under all of their names; each name leads to the same tensor.
        self._targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._parts = self._expert_parts()
        self._arrived: set[str] = set()

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self.module.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.module.device

    def prefill(self, input_ids: Tensor, position_ids: Tensor, step: Any) -> None:
        """Fill the cache; no logits are computed. input_ids, position_ids int64 [1, tokens]."""
        self.module.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, kv_step=step)
        self._attention_calls.require(step.calls, type(self.module).__name__)

    def decode(self, input_ids: Tensor, position_ids: Tensor, step: Any) -> Tensor:
        """Logits [n, vocab] of the next token of each slot. input_ids, position_ids int64 [n, 1]."""
        out = self.module(input_ids=input_ids, position_ids=position_ids, use_cache=False, kv_step=step)
        self._attention_calls.require(step.calls, type(self.module).__name__)
        return out.logits[:, -1]

    def load(self, name: str, tensor: Tensor) -> None:
        """Put one tensor (values of `weights_dtype`) into the parameter of that name.

        Raises:
            WeightSyncError: an unknown name, or another shape than the served model has.
        """
        target = self._targets.get(name)
        if target is None:
            raise WeightSyncError(
                f"The trainer sent {name!r}, which the served {type(self.module).__name__} does not have. Actor and "
                "rollout must be built from the same config (actor_rollout_ref.model)."
            )
        if target.shape != tensor.shape:
            raise WeightSyncError(
                f"The trainer sent {name!r} with shape {tuple(tensor.shape)}; the served model has "
                f"{tuple(target.shape)}. Actor and rollout must be built from the same config."
            )
        target.data.copy_(tensor)
        self._arrived.add(name)

    def finish(self) -> tuple[int, int]:
        """End an update: (tensors loaded, checksum of what the parameters now hold).

        Raises:
            WeightSyncError: parameters that no tensor arrived for, by name.
        """
        arrived, self._arrived = self._arrived, set()
        whole = arrived - {part for parts in self._parts.values() for part in parts}
        covered = {self._targets[name].data_ptr() for name in whole}
        lost = [
            name
            for name, p in self.module.named_parameters()
            if p.data_ptr() not in covered and not (name in self._parts and self._parts[name] <= arrived)
        ]
        if lost:
            shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
            raise WeightSyncError(f"{len(lost)} parameters of the served model got no weights in this sync: {shown}")
        return len(arrived), self.checksum(arrived)

    def _expert_parts(self) -> dict[str, set[str]]:
        """Packed weight -> names of its parts, which become targets: checkpoints hold one matrix an expert."""
        if not splits_experts(self.module.config):
            return {}
        parts = {name: expert_parts(name, target.detach()) for name, target in self._targets.items()}
        parts = {name: views for name, views in parts.items() if name not in views}
        for views in parts.values():
            self._targets |= views
        return {name: set(views) for name, views in parts.items()}

    def forget_arrivals(self) -> None:
        """Drop the record of tensors loaded so far: the next update starts from nothing."""
        self._arrived = set()

    def checksum(self, names: set[str]) -> int:
        """Checksum over the named parameters, as the sender computes it from what it sends."""
        return combine([tensor_digest(name, self._on_wire(self._targets[name])) for name in names])

    def _on_wire(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = tensor.to(self.weights_dtype)
        return tensor.cpu().contiguous()


def load_model(model_config: Any, rollout_config: Any, device: torch.device) -> ServedModel:
    """Build the model that `actor_rollout_ref.model` names, for `rollout.load_format`.

    `dummy` takes the config only: weights that wait for the first sync. `auto` and `safetensors` read the
    weights of the model folder.

    Raises:
        ConfigError: another load format, an unsupported type or an unsupported kind of attention.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    import_external_libs(model_config.get("external_lib"))
    options = (rollout_config.get("engine_kwargs") or {}).get("hf") or {}
    weights_dtype = parse_dtype(rollout_config.dtype, "rollout.dtype")
    dtype = arithmetic_dtype(weights_dtype, options.get("compute_dtype"), device)
    path = str(Path(str(model_config.path)).expanduser())
    trust = bool(model_config.get("trust_remote_code", False))
    source = str(Path(str(model_config.get("hf_config_path") or path)).expanduser())
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust)
    _override(config, model_config.get("override_config") or {})
    check_attention_support(config)
    model: Any
    if rollout_config.load_format == "dummy":
        # Uninitialised memory: the engine refuses to serve before the first sync filled every parameter.
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust, dtype=dtype)
        model.tie_weights()
    elif rollout_config.load_format in ("auto", "safetensors"):
        # Two steps: the values must be those of the weights' type, whatever type computes with them.
        model = AutoModelForCausalLM.from_pretrained(path, config=config, trust_remote_code=trust, dtype=weights_dtype)
        model = model.to(dtype)
    else:
        raise ConfigError(
            f"rollout.load_format={rollout_config.load_format} is not known to the hf engine. Try dummy (weights come "
            "with the first sync), auto or safetensors"
        )
    eos = eos_token_ids(path, config, str(model_config.get("tokenizer_path") or path), trust)
    logger.info("serving %s: weights %s, arithmetic %s on %s", path, weights_dtype, dtype, device)
    return ServedModel(model.to(device), weights_dtype=weights_dtype, eos_token_ids=eos)


def eos_token_ids(path: str, config: Any, tokenizer_path: str, trust_remote_code: bool = False) -> frozenset[int]:
    """Tokens that end a sequence: those of the generation config, of the model config and of the tokenizer."""
    from transformers import AutoTokenizer, GenerationConfig

    found: list[Any] = [getattr(config, "eos_token_id", None)]
    try:
        found.append(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:
        logger.debug("%s has no generation config", path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(Path(tokenizer_path).expanduser()), trust_remote_code=trust_remote_code
        )
        found.append(tokenizer.eos_token_id)
    except (OSError, ValueError):
        logger.debug("%s has no tokenizer", tokenizer_path)
    ids: set[int] = set()
    for entry in found:
        ids.update(entry if isinstance(entry, (list, tuple)) else [entry])
    return frozenset(int(i) for i in ids if i is not None)


def _override(config: Any, override: Any) -> None:
    """Apply `model.override_config` (or its `model_config` part) to a Hugging Face config, nested dicts included."""
    for key, value in (override.get("model_config") or override).items():
        if key == "attn_implementation":
            continue  # the trainer's; the engine brings its own attention
        current = getattr(config, key, None)
        if hasattr(value, "items") and current is not None and not isinstance(current, dict):
            _override(current, value)
        else:
            setattr(config, key, value)
