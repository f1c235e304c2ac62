"""The module that an engine trains: a Hugging Face model that is evaluated at its predictions only, sharded.

    PackedModel      body over packed rows -> hidden states at the predictions
    PolicyModel      a causal LM: log-probs instead of logits          (`ValueModel`, a critic: value_model.py)

Invariants
    - Embedding and output head of a policy belong to the root's parameter group, so that they are gathered during the
      root's forward, where the log-probs are computed from hidden states.
    - Every rank holds the same weights after `build_module`: rank 0 reads them, the others receive their shards.
    - A forward in which some attention layer did not use the given layout, or its window or soft cap, raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from rlflow.utils.attention_needs import AttentionCalls
from rlflow.utils.device import cpu_has_slow_bf16
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.utils.import_utils import import_external_libs
from rlflow.workers.engine.fsdp.families import check_model_support, final_softcap
from rlflow.workers.engine.fsdp.inputs import ModelInputs
from rlflow.workers.engine.fsdp.log_prob import TokenStats, chunk_rows, linear_log_probs
from rlflow.workers.engine.fsdp.lora import add_adapter
from rlflow.workers.engine.fsdp.moe import RouterLoad
from rlflow.workers.engine.fsdp.packed_attention import ATTENTION_NAME, LAYOUT_KWARG, register_attention
from rlflow.workers.engine.fsdp.sharding import (
    computes_as_stored,
    mixed_precision_policy,
    offloads_by_policy,
    parse_dtype,
    shard,
)

logger = logging.getLogger(__name__)

PREFIX = "hf_model."


class PackedModel(nn.Module):
    """A transformers model whose body runs over packed rows.

    Args:
        hf_model: uses `packed_attention`.
    """

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        self.hf_model = hf_model
        self.attention_calls = AttentionCalls.needed_by(hf_model.config.get_text_config())
        self.adapter_config: Any = None  # of PEFT, in a model with adapters
        self.saves_trained_only = False
        self.routers = RouterLoad.of(hf_model)

    @property
    def exact_parts(self) -> Sequence[nn.Module]:
        """Modules that compute in fp32 whatever the precision of the rest; each must be called as a module."""
        return ()

    @property
    def head_name(self) -> str | None:
        """Name in `hf_model` of a head that no checkpoint of a causal LM has: it is trained beside adapters too."""
        return None

    def trained_parameters(self) -> list[nn.Parameter]:
        """All of them, or those of adapters and of a head beside them."""
        return [param for param in self.parameters() if param.requires_grad]

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Last hidden states [N, h] where the predictions are made."""
        inputs.layout.calls = AttentionCalls()
        counted = inputs.real if torch.is_grad_enabled() else 0
        with nullcontext() if self.routers is None else self.routers.recording(counted):
            hidden = self.hf_model.base_model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                use_cache=False,
                **{LAYOUT_KWARG: inputs.layout},
            ).last_hidden_state
        self.attention_calls.require(inputs.layout.calls, type(self.hf_model).__name__)
        return hidden.flatten(0, 1).index_select(0, inputs.predict_index)


class PolicyModel(PackedModel):
    """A causal LM whose forward ends in log-probs of given labels at given positions.

    Args:
        causal_lm: a transformers causal LM that uses `packed_attention`.
        chunk_limit: most rows of logits to hold at once.
        chunked: False: hold them all, whatever the limit.
        options: `fused`, `recompute`, `compiled` of `linear_log_probs`.
    """

    def __init__(
        self, causal_lm: Any, chunk_limit: int | None = None, *, chunked: bool = True, **options: bool
    ) -> None:
        super().__init__(causal_lm)
        self.chunk_limit = chunk_limit
        self.softcap = final_softcap(causal_lm.config)
        self.chunked = chunked
        self.options = options

    def forward(self, inputs: ModelInputs, with_entropy: bool = False, with_sum_pi_squared: bool = False) -> TokenStats:
        """Log-probs of the labels, with entropies and sums of squared probabilities when asked for."""
        hidden = self.hidden_states(inputs)
        head = self.hf_model.get_output_embeddings()
        vocab, rows = head.weight.shape[0], hidden.shape[0]
        return linear_log_probs(
            hidden,
            head.weight,
            inputs.labels,
            bias=getattr(head, "bias", None),
            temperature=inputs.temperature,
            with_entropy=with_entropy,
            with_sum_pi_squared=with_sum_pi_squared,
            chunk=chunk_rows(vocab, hidden.device, self.chunk_limit) if self.chunked else max(1, rows),
            softcap=self.softcap,
            **self.options,
        )


def load_hf_config(model_config: Any) -> Any:
    """The transformers config of `model_config` with its overrides applied.

    Raises:
        ConfigError: the folder cannot be read.
    """
    from transformers import AutoConfig

    import_external_libs(model_config.get("external_lib"))
    try:
        source = expand_path(model_config.config_source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=model_config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={model_config.path!r} (of actor_rollout_ref or critic) holds no model config: {error}"
        ) from error
    overrides = dict(model_config.override_config or {})
    if overrides.pop("attn_implementation", None) is not None:
        logger.info("model.override_config.attn_implementation does not concern the FSDP engine: it packs rows itself")
    _override(config, overrides.get("model_config", overrides))
    return config


def expand_path(source: str) -> str:
    """A folder with `~` replaced; the id of a model on the hub stays as it is."""
    return os.path.expanduser(source)


def _override(config: Any, values: dict[str, Any]) -> None:
    for key, value in values.items():
        current = getattr(config, key, None)
        if isinstance(value, dict) and current is not None and not isinstance(current, dict):
            _override(current, value)
        else:
            setattr(config, key, value)


def load_causal_lm(model_config: Any, hf_config: Any, dtype: torch.dtype, with_weights: bool) -> Any:
    """The transformers model on the CPU in `dtype`; without weights its parameters are uninitialised memory."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    register_attention()
    model_class = mapped_class(AutoModelForCausalLM, hf_config)
    if model_class is not None:  # else code that comes with the checkpoint; checked below, when its class is known
        check_model_support(hf_config, model_class)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": model_config.trust_remote_code,
    }
    if with_weights:
        model = AutoModelForCausalLM.from_pretrained(expand_path(model_config.path), config=hf_config, **options)
    else:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(hf_config, **options)
        model.tie_weights()
    return check_loaded(model)


def mapped_class(auto_class: Any, hf_config: Any) -> Any:
    """The transformers class behind an `AutoModelFor...` for this config; None when it knows none."""
    try:
        return auto_class._model_mapping[type(hf_config)]
    except KeyError:
        return None


def check_loaded(model: Any) -> Any:
    """The model, if it runs packed attention; `ConfigError` otherwise."""
    check_model_support(model.config, type(model))
    if model.config.get_text_config()._attn_implementation != ATTENTION_NAME:
        raise ConfigError(f"{type(model).__name__} did not accept the attention {ATTENTION_NAME!r}")
    return model


def build_module(
    load: Callable[[torch.dtype, bool], PackedModel],
    model_config: Any,
    engine_config: Any,
    mesh: DeviceMesh,
    device: torch.device,
) -> PackedModel:
    """Load, wrap and shard the model; a collective of all ranks of `mesh`.

    Args:
        load: (dtype, with_weights) -> the model on the CPU; without weights its parameters are uninitialised.
        model_config: `HFModelConfig`.
        engine_config: `FSDPEngineConfig`.
        mesh: 1-D ("fsdp") or 2-D ("ddp", "fsdp"), covering the default process group.
        device: where this rank computes.
    """
    dtype_name = engine_config.model_dtype or ("bf16" if engine_config.forward_only else "fp32")
    dtype = parse_dtype(dtype_name, "fsdp_config.model_dtype")
    reader = dist.get_rank() == 0
    if reader:
        warn_if_bf16_is_slow(engine_config, device)
    module = load(dtype, reader)
    if model_config.uses_lora and not engine_config.forward_only:
        module.adapter_config = add_adapter(
            module.hf_model, model_config, seed=engine_config.seed, head=module.head_name, with_weights=reader
        )
    if model_config.enable_gradient_checkpointing and not engine_config.forward_only:
        module.hf_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    full = {name: param.detach() for name, param in module.named_parameters()} if reader else {}
    one_dtype = len({param.dtype for param in module.parameters()}) == 1
    in_place = one_dtype and computes_as_stored(engine_config, dtype, module.exact_parts)
    if mesh.size() == 1 and in_place and not offloads_by_policy(engine_config, device.type):
        # Nothing to gather, reduce or cast: fully_shard would copy all weights and gradients in every step.
        module.to(device)
    else:
        shard(module, engine_config, mesh)
    if dist.get_world_size() > 1:
        _scatter_weights(module, full, device)
    if engine_config.forward_only:
        module.requires_grad_(False)
    return module


def warn_if_bf16_is_slow(engine_config: Any, device: torch.device) -> None:
    """Say so when this CPU multiplies bf16 matrices slower than fp32 ones."""
    if device.type != "cpu" or mixed_precision_policy(engine_config).param_dtype is not torch.bfloat16:
        return
    if cpu_has_slow_bf16():
        logger.warning(
            "this CPU has no AMX: its bf16 matrix products take about twice the time of fp32 ones. "
            "fsdp_config.dtype=float32 is faster here, and exact."
        )


@torch.no_grad()
def _scatter_weights(module: PackedModel, full: dict[str, Tensor], device: torch.device) -> None:
    """Give every rank its shards of rank 0's weights."""
    mine = [name for name, _ in module.named_parameters()]
    first = [mine]
    dist.broadcast_object_list(first, src=0)
    if first[0] != mine:
        odd = sorted(set(first[0]) ^ set(mine))
        raise ContractError(f"rank {dist.get_rank()} built another model than rank 0: they differ in {odd[:4]}")
    for name, param in module.named_parameters():
        assert isinstance(param, DTensor)
        source = full.pop(name).to(device) if full else torch.empty(param.shape, dtype=param.dtype, device=device)
        shard = distribute_tensor(source, param.device_mesh, param.placements, src_data_rank=0)
        param.to_local().copy_(shard.to_local())
