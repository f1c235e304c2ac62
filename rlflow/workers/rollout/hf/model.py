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

from rlflow.checkpoint_engine.checksum import combine, copy_with_digest, tensor_digest
from rlflow.checkpoint_engine.receipt import some
from rlflow.checkpoint_engine.wire import WireTypes
from rlflow.utils.attention_needs import AttentionCalls
from rlflow.utils.errors import ConfigError, WeightSyncError
from rlflow.utils.import_utils import import_external_libs
from rlflow.utils.moe_weights import expert_parts, splits_experts
from rlflow.workers.rollout.hf.kv_cache import (
    ATTENTION_NAME,
    KVShape,
    PrefillStep,
    SlotKVCache,
    check_attention_support,
    register_attention,
)
from rlflow.workers.rollout.hf.lora import ServedAdapter

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
    """A causal LM in evaluation mode whose attention runs over the slot cache.

    Attributes:
        loaded: names of the tensors that the last update brought.
        lora_modules: layers that compute with an adapter; None where the last update brought none.
    """

    def __init__(
        self,
        model: Any,
        *,
        weights_dtype: torch.dtype,
        eos_token_ids: frozenset[int],
        keep_fp32: tuple[str, ...] = (),
    ) -> None:
        check_attention_support(model.config)
        if not getattr(model, "_supports_attention_backend", False):
            raise ConfigError(
                f"{type(model).__name__} does not route its attention through transformers' attention interface, "
                "which the hf rollout engine needs. Serve it with another engine (rollout.name)."
            )
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        self.module = model.eval().requires_grad_(False)
        self._wire = WireTypes(weights_dtype, keep_fp32)
        self.eos_token_ids = eos_token_ids
        self.kv_shape = KVShape.from_config(model.config)
        self._attention_calls = AttentionCalls.needed_by(model.config)
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        # Tied weights appear under all of their names; each name leads to the same tensor.
        self._targets: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._parts = self._expert_parts()
        self._arrived: dict[str, int | None] = {}  # name -> digest of what was sent
        self._held: dict[str, int] = {}  # name -> digest of what the parameter holds
        self._writer: dict[int, str] = {}  # address of a parameter -> the name that was loaded into it
        self._adapter: ServedAdapter | None = None
        self.loaded: tuple[str, ...] = ()
        self.lora_modules: tuple[str, ...] | None = None

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

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probs of every token but the first, temperature 1, by one forward over a cache of its own."""
        ids = torch.tensor([token_ids], device=self.device)
        cache = SlotKVCache(self.kv_shape, 1, len(token_ids), self.dtype, self.device)
        step = PrefillStep(cache, [0], [len(token_ids)])
        positions = torch.from_numpy(step.positions)[None].to(self.device)
        out = self.module(input_ids=ids, position_ids=positions, use_cache=False, kv_step=step)
        self._attention_calls.require(step.calls, type(self.module).__name__)
        table = torch.log_softmax(out.logits[0, :-1].float(), dim=-1)
        return table.gather(1, ids[0, 1:, None])[:, 0].tolist()

    # ---- weights -------------------------------------------------------------------------------------------------

    def begin(self, lora: dict[str, Any] | None = None) -> None:
        """Start an update: forget what an unfinished one brought.

        Args:
            lora: PEFT's config when an adapter comes; without it the base weights come, and an adapter ends.
        """
        self._arrived, self._held, self._writer = {}, {}, {}
        if self._adapter is not None:
            self._adapter.unbind()
        self._adapter = None if lora is None else ServedAdapter(self.module, lora)
        self.lora_modules = None

    def load(self, name: str, tensor: Tensor, digest: int | None = None) -> None:
        """Put one tensor (values of its type on the wire) into the parameter of that name, and read it back.

        The parameter's digest is taken block by block while the block is in a cache.

        Args:
            digest: `tensor_digest` of what was sent, to be compared by `finish`.

        Raises:
            WeightSyncError: an unknown name, or another shape than the served model has.
        """
        target = self._target(name, tensor)
        if target is None:
            raise WeightSyncError(
                f"The trainer sent {name!r}, which the served {type(self.module).__name__} does not have. Actor and "
                "rollout must be built from the same config (actor_rollout_ref.model).",
                tensors=(name,),
            )
        if target.shape != tensor.shape:
            raise WeightSyncError(
                f"The trainer sent {name!r} with shape {tuple(tensor.shape)}; the served model has "
                f"{tuple(target.shape)}. Actor and rollout must be built from the same config.",
                tensors=(name,),
            )
        # Tied weights may come under both names: what the first one left may be gone.
        self._held.pop(self._writer.get(target.data_ptr(), name), None)
        self._writer[target.data_ptr()] = name
        self._arrived[name] = digest
        self._held[name] = copy_with_digest(name, tensor, target.data, self._wire.of(name, target.dtype))

    def finish(self) -> tuple[int, int]:
        """End an update: (tensors loaded, checksum of what the parameters now hold).

        Raises:
            WeightSyncError: parameters that no tensor arrived for, or that hold something else than was sent, by name.
        """
        arrived, held = self._arrived, self._held
        self._arrived, self._held, self._writer = {}, {}, {}
        self.loaded = tuple(sorted(arrived))
        if self._adapter is None:
            self._require_all(set(arrived))
        else:
            self.lora_modules = self._adapter.bind()
        digests = {name: held[name] if name in held else self._digest(name) for name in arrived}
        wrong = [name for name, sent in arrived.items() if sent is not None and sent != digests[name]]
        if wrong:
            raise WeightSyncError(
                f"{len(wrong)} parameters hold other values than were sent: {some(wrong)}", tensors=tuple(wrong)
            )
        return len(arrived), combine(list(digests.values()))

    def _target(self, name: str, tensor: Tensor) -> Tensor | None:
        return self._targets.get(name) if self._adapter is None else self._adapter.target(name, tensor)

    def _require_all(self, arrived: set[str]) -> None:
        whole = arrived - {part for parts in self._parts.values() for part in parts}
        covered = {self._targets[name].data_ptr() for name in whole}
        lost = [
            name
            for name, p in self.module.named_parameters()
            if p.data_ptr() not in covered and not (name in self._parts and self._parts[name] <= arrived)
        ]
        if lost:
            raise WeightSyncError(
                f"{len(lost)} parameters of the served model got no weights in this sync: {some(lost)}",
                tensors=tuple(lost),
            )

    def _digest(self, name: str) -> int:
        """Of what the parameter holds, in the type in which it travelled."""
        held = self._targets[name] if self._adapter is None else self._adapter.get(name)
        return tensor_digest(name, held, self._wire.of(name, held.dtype))

    def _expert_parts(self) -> dict[str, set[str]]:
        """Packed weight -> names of its parts, which become targets: checkpoints hold one matrix an expert."""
        if not splits_experts(self.module.config):
            return {}
        parts = {name: expert_parts(name, target.detach()) for name, target in self._targets.items()}
        parts = {name: views for name, views in parts.items() if name not in views}
        for views in parts.values():
            self._targets |= views
        return {name: set(views) for name, views in parts.items()}


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
    keep_fp32 = WireTypes.from_config(rollout_config).keep_fp32
    if keep_fp32 and dtype != torch.float32:
        raise ConfigError(
            f"rollout.checkpoint_engine.keep_fp32={list(keep_fp32)} cannot be honoured by the hf engine while it "
            f"computes in {dtype}: its layers have one type. Set rollout.engine_kwargs.hf.compute_dtype=float32, or "
            "empty the list"
        )
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
    return ServedModel(model.to(device), weights_dtype=weights_dtype, eos_token_ids=eos, keep_fp32=keep_fp32)


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
