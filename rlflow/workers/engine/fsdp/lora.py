"""LoRA (Hu et al. 2021, arXiv:2106.09685) by PEFT: small trained matrices beside frozen weights.

    y = W x + s B A x       W [out, in] frozen, A [r, in], B [out, r] trained, s = alpha / r

PEFT's layers are put into the transformers model in place, so that everything else of the engine (packed rows,
sharding, checkpoints) sees the same model with some layers exchanged.

Invariants
    - Only adapters have gradients, and the head of a critic. Adapters are stored in fp32 whatever the weights are.
    - What leaves the engine under the name of a weight is W + s B A, added up in fp32.
    - A start of adapters depends on the engine's seed only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlflow.checkpoint.shards import write_tensors
from rlflow.utils.errors import ConfigError
from rlflow.workers.engine.fsdp.moe import find_routers

logger = logging.getLogger(__name__)

ADAPTER = "default"
ADAPTER_FOLDER = "lora_adapter"
META_FILE = "lora_train_meta.json"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"\.lora_[AB]\.")
# What parts of experts and routers are called in checkpoints. With transformers 5 PEFT takes these names of linear
# layers for the packed experts, also when it reads an adapter.
_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class Adapted:
    """The trained matrices beside one weight, as this rank stores them, and their factor."""

    a: Tensor
    b: Tensor
    scaling: float

    def merged(self, weight: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """W + s B A in fp32 from the whole W [out, in]; *collective* where `gather` is."""
        delta = gather(self.b.detach()).float() @ gather(self.a.detach()).float()
        return torch.add(weight.float(), delta, alpha=self.scaling)


def require_peft() -> None:
    """`ConfigError` where the package is missing."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "model.lora_rank > 0 (or lora_adapter_path) needs the package peft: pip install 'rlflow[lora]'"
        ) from error


def add_adapter(
    hf_model: Any, model_config: Any, *, seed: int, head: str | None = None, with_weights: bool = True
) -> Any:
    """Put adapters into a loaded model and freeze everything else; returns the PEFT config.

    Args:
        hf_model: a transformers model.
        model_config: `HFModelConfig` with `lora_rank` or `lora_adapter_path`.
        seed: of the random start of A; B starts at zero, so that the model is unchanged at first.
        head: name of a module that is trained itself (a critic's head); it gets no adapter.
        with_weights: read those of `lora_adapter_path`.

    Raises:
        ConfigError: peft is missing, no module is meant, or one that cannot have an adapter here.
    """
    require_peft()
    from peft import inject_adapter_in_model

    config = _adapter_config(hf_model, model_config, head)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, hf_model, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"model.target_modules={model_config.target_modules!r}: {error}") from error
    _check_layers(hf_model, model_config)
    for name, param in hf_model.named_parameters():
        param.requires_grad_(is_trained(name, head))
        if is_adapter(name):
            param.data = param.data.float()
    if model_config.lora_adapter_path and with_weights:
        _read_adapter(hf_model, Path(model_config.lora_adapter_path).expanduser(), head)
    return config


def _adapter_config(hf_model: Any, model_config: Any, head: str | None) -> Any:
    from peft import LoraConfig, PeftConfig

    if not model_config.lora_adapter_path:
        exclude = model_config.exclude_modules
        if head is not None:
            exclude = f"({exclude})|{head}" if isinstance(exclude, str) else [*(exclude or ()), head]
        return LoraConfig(
            task_type="CAUSAL_LM" if head is None else "TOKEN_CLS",
            r=model_config.lora_rank,
            lora_alpha=model_config.lora_alpha,
            target_modules=_targets(hf_model, model_config.target_modules),
            exclude_modules=_plain(exclude),
            modules_to_save=None,
            bias="none",
        )
    folder = Path(model_config.lora_adapter_path).expanduser()
    key = f"model.lora_adapter_path={model_config.lora_adapter_path}"
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise ConfigError(f"{key} holds no adapter; a PEFT folder has {CONFIG_FILE} and {WEIGHTS_FILE}")
    config: Any = PeftConfig.from_pretrained(str(folder))
    if config.peft_type != "LORA":
        raise ConfigError(f"{key} is an adapter of type {config.peft_type}; this version trains LORA")
    if model_config.lora_rank not in (0, config.r):
        raise ConfigError(f"{key} has rank {config.r}, model.lora_rank says {model_config.lora_rank}; set it to 0")
    unsupported = ("use_dora", "trainable_token_indices", "layer_replication", "target_parameters", "lora_bias")
    odd = [name for name in unsupported if getattr(config, name, None)]
    if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        odd.append(f"init_lora_weights={config.init_lora_weights}")  # others change the base weights
    odd += ["modules_to_save"] if set(config.modules_to_save or ()) - {head} else []
    if odd or config.bias != "none":
        raise ConfigError(f"{key} uses {', '.join(odd) or 'bias'}, which the FSDP engine does not train")
    if config.lora_dropout:
        logger.warning("%s: its dropout of %g is off: an update must see what was sampled", key, config.lora_dropout)
    config.inference_mode, config.lora_dropout, config.modules_to_save = False, 0.0, None
    return config


def _targets(hf_model: Any, names: Any) -> Any:
    """`target_modules` for PEFT, which by "all-linear" also means the packed experts of a mixture: they get none."""
    if names != "all-linear" or not find_routers(hf_model):
        return _plain(names)
    head = hf_model.get_output_embeddings()
    linear = {name for name, layer in hf_model.named_modules() if type(layer) is nn.Linear and layer is not head}
    return sorted({name.rpartition(".")[2] for name in linear} - _EXPERT_NAMES)


def _plain(names: Any) -> Any:
    return names if names is None or isinstance(names, str) else list(names)


def _check_layers(hf_model: Any, model_config: Any) -> None:
    """Adapters sit on plain linear layers, and not on the embeddings: a policy computes with those weights directly."""
    from peft.tuners.lora import LoraLayer

    embeddings = {id(hf_model.get_input_embeddings()), id(hf_model.get_output_embeddings())}
    for name, layer in hf_model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        plain = type(layer.get_base_layer()) is nn.Linear and not getattr(layer, "lora_variant", None)
        if not plain or id(layer) in embeddings:
            raise ConfigError(
                f"model.target_modules={model_config.target_modules!r} puts an adapter on {name} "
                f"({type(layer.get_base_layer()).__name__}); only linear layers other than the output head can have "
                "one here. Leave it out of model.target_modules, or name it in model.exclude_modules."
            )


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return _ADAPTER.search(name) is not None


def is_trained(name: str, head: str | None = None) -> bool:
    """Whether the parameter of this name is trained in a model with adapters."""
    return is_adapter(name) or (head is not None and name.startswith(f"{head}."))


def plain_name(name: str) -> str:
    """The name that a weight has without PEFT's layers, and an adapter in PEFT's files (without their prefix)."""
    name = name.replace(".base_layer.", ".")
    return name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else name


def adapted_weights(hf_model: Any) -> dict[str, Adapted]:
    """Name of a weight without PEFT's layers -> what is trained beside it; empty for a model without adapters."""
    if not getattr(hf_model, "peft_config", None):
        return {}
    from peft.tuners.lora import LoraLayer

    found: dict[str, Adapted] = {}
    for name, layer in hf_model.named_modules():
        if isinstance(layer, LoraLayer):
            a, b = (getattr(layer, f"lora_{side}")[ADAPTER].weight for side in "AB")
            found[f"{name}.weight"] = Adapted(a, b, float(layer.scaling[ADAPTER]))
    return found


@contextmanager
def adapters_off(hf_model: Any) -> Iterator[None]:
    """Compute without the adapters inside the block.

    PEFT's own switch also freezes and thaws parameters, which is not for those that fully_shard manages; hence the flag
    that its layers read.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [layer for layer in hf_model.modules() if isinstance(layer, BaseTunerLayer)]
    before = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, disabled in zip(layers, before, strict=True):
            layer._disable_adapters = disabled


# ---- files -----------------------------------------------------------------------------------------------------------


def trained_tensors(hf_model: Any, head: str | None = None) -> dict[str, Tensor]:
    """Name in PEFT's files -> trained parameter as this rank stores it."""
    params = hf_model.named_parameters()
    return {_PEFT_PREFIX + plain_name(name): p.detach() for name, p in params if is_trained(name, head)}


def write_adapter(
    folder: Path,
    config: Any,
    tensors: dict[str, Tensor],
    base: str,
    scaling: dict[str, float],
    head: str | None = None,
) -> None:
    """A folder that `PeftModel.from_pretrained` loads, and `lora_adapter_path` starts from.

    Args:
        folder: to write; beside it comes a file of what a merge needs to know.
        config: of PEFT.
        tensors: of `trained_tensors`, whole.
        base: path or id of the model that the adapter belongs to.
        scaling: name of an adapted weight -> factor of its product.
        head: as in `add_adapter`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = config.to_dict() | {"base_model_name_or_path": base, "inference_mode": True}
    values["modules_to_save"] = None if head is None else [head]
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, default=str, sort_keys=True) + "\n")
    write_tensors({name: value.cpu().contiguous() for name, value in tensors.items()}, folder / WEIGHTS_FILE)
    meta = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": values["task_type"], "scaling": scaling}
    (folder.parent / META_FILE).write_text(json.dumps(meta) + "\n")


@torch.no_grad()
def _read_adapter(hf_model: Any, folder: Path, head: str | None) -> None:
    """Fill the adapters from a PEFT folder. `ConfigError` names what is missing, superfluous or of another shape."""
    wanted = trained_tensors(hf_model, head)
    with safe_open(str(folder / WEIGHTS_FILE), framework="pt") as file:
        there = set(file.keys())
        optional = {name for name in wanted if not is_adapter(name)}
        missing, extra = sorted(set(wanted) - there - optional), sorted(there - set(wanted))
        if missing or extra:
            raise ConfigError(
                f"model.lora_adapter_path={folder} is no adapter of this model: it lacks {missing[:4]} and has "
                f"{extra[:4]} besides"
            )
        for name, param in wanted.items():
            if name not in there:
                continue
            value = file.get_tensor(name)
            if value.shape != param.shape:
                raise ConfigError(
                    f"model.lora_adapter_path={folder}: {name} has shape {list(value.shape)}, the model needs "
                    f"{list(param.shape)}"
                )
            param.copy_(value)
