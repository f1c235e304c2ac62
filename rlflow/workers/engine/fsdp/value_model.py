"""A critic: the body of a causal LM with a linear head of one output, as transformers' token classification.

The value of response token t is the head's output at the position that predicts t: the state before t is chosen.

Invariants
    - The head computes in fp32, whatever the precision of the body: advantages are small differences of values.
    - A head that the checkpoint does not have depends on the engine's seed only: not on the ranks, nor on what was
      drawn before.
    - No dropout anywhere: the values of an update must be those that the advantages were computed from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlflow.utils.errors import ConfigError
from rlflow.workers.engine.fsdp.families import DROPOUTS, check_model_support
from rlflow.workers.engine.fsdp.inputs import ModelInputs
from rlflow.workers.engine.fsdp.model import PackedModel, check_loaded, expand_path, load_hf_config, mapped_class
from rlflow.workers.engine.fsdp.packed_attention import ATTENTION_NAME, register_attention

logger = logging.getLogger(__name__)

# What heads of one output are called: those of token and sequence classifiers (reward models) in transformers, and the
# value heads that TRL and others save beside a causal LM.
_HEAD_NAMES = ("score", "classifier", "v_head.summary", "v_head", "value_head")


class ValueModel(PackedModel):
    """A token classifier with one label whose forward gives values at the predictions.

    Args:
        hf_model: a transformers token classifier that uses `packed_attention`.
    """

    @property
    def head(self) -> nn.Linear:
        """The linear layer from hidden state to value."""
        return find_head(self.hf_model)[1]

    @property
    def exact_parts(self) -> Sequence[nn.Module]:
        return (self.head,)

    @property
    def head_name(self) -> str:
        return find_head(self.hf_model)[0]

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Values fp32 [N]."""
        # A copy: fully_shard hangs its backward hook on the output and warns about views.
        return self.head(self.hidden_states(inputs).float()).squeeze(-1).clone()


def find_head(hf_model: Any) -> tuple[str, nn.Linear]:
    """Name and module of the head: the one linear layer beside the body."""
    heads = [(name, part) for name, part in hf_model.named_children() if isinstance(part, nn.Linear)]
    if len(heads) != 1 or heads[0][1].out_features != 1:
        found = ", ".join(f"{name} with {part.out_features} outputs" for name, part in heads) or "none"
        raise ConfigError(f"{type(hf_model).__name__} has no linear head of one output beside its body, but {found}")
    return heads[0]


def load_value_config(model_config: Any) -> Any:
    """The transformers config of a critic: one label, no dropout."""
    config = load_hf_config(model_config)
    config.num_labels = 1
    # The head's own dropout has a default of 0.1 that no config shows.
    config.classifier_dropout = 0.0
    for part in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        for name in DROPOUTS:
            if getattr(part, name, None):
                setattr(part, name, 0.0)
    return config


def load_value_model(model_config: Any, hf_config: Any, dtype: torch.dtype, with_weights: bool, seed: int) -> Any:
    """The token classifier on the CPU in `dtype`, its head in fp32; without weights its parameters are uninitialised.

    `model_config.path` may hold a causal LM (its output head is left out, a value head added), one with a value head
    beside it (TRL), or a token or sequence classifier of one label, such as a reward model: then that head goes on.

    Raises:
        ConfigError: the weights are not those of this model, or its attention is not supported.
    """
    from transformers.initialization import no_init_weights

    register_attention()
    model_class = classifier_class(hf_config)
    check_model_support(hf_config, model_class)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    if with_weights:
        model = _read_weights(model_config, model_class, hf_config, options, seed)
    else:
        with no_init_weights():
            model = model_class._from_config(hf_config, **options)
    find_head(model)[1].float()
    return check_loaded(model)


def classifier_class(hf_config: Any) -> Any:
    """The token classifier of this architecture; built from its causal LM where transformers has none.

    Raises:
        ConfigError: transformers knows no causal LM of this architecture either.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
    from transformers.modeling_layers import GenericForTokenClassification

    known = mapped_class(AutoModelForTokenClassification, hf_config)
    if known is not None:
        return known
    causal = mapped_class(AutoModelForCausalLM, hf_config)
    if causal is None:
        raise ConfigError(
            f"a critic of model_type={hf_config.model_type!r} cannot be built: transformers has no causal LM of that "
            "type (code that comes with a checkpoint is not supported for critics). Set critic.model.path to a model "
            "such as the policy's."
        )
    base = next(cls for cls in causal.__mro__[1:] if issubclass(cls, PreTrainedModel))
    name = causal.__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "ForTokenClassification"
    fields = {"base_model_prefix": base.base_model_prefix, "__module__": __name__}
    return type(name, (GenericForTokenClassification, base), fields)


def _read_weights(model_config: Any, model_class: Any, hf_config: Any, options: dict[str, Any], seed: int) -> Any:
    path = expand_path(model_config.path)
    names = "|".join(name.replace(".", r"\.") for name in _HEAD_NAMES)
    renamed = {rf"^(?:{names})\.(weight|bias)$": rf"{_head_name(model_class, hf_config)}.\1"}
    try:
        with _quiet_load_report():
            model, info = model_class.from_pretrained(
                path, config=hf_config, output_loading_info=True, key_mapping=renamed, **options
            )
    except RuntimeError as error:  # tensors of another shape
        raise ConfigError(f"critic.model.path={model_config.path!r} does not fit a critic: {error}") from error
    name, head = find_head(model)
    missing = set(info["missing_keys"])
    foreign = sorted(key for key in missing if not key.startswith(f"{name}."))
    if foreign:
        raise ConfigError(
            f"critic.model.path={model_config.path!r} lacks weights of {model_class.__name__}: {foreign[:4]}. Set it "
            "to a causal LM or a token classifier of this architecture."
        )
    if f"{name}.weight" in missing:
        std = float(getattr(hf_config.get_text_config(), "initializer_range", None) or 0.02)
        fresh = torch.normal(0.0, std, head.weight.shape, generator=torch.Generator().manual_seed(seed))
        head.weight.data.copy_(fresh)
        logger.info("%s holds no value head: it starts from random weights (seed %d)", model_config.path, seed)
    if head.bias is not None and f"{name}.bias" in missing:
        head.bias.data.zero_()
    return model


def _head_name(model_class: Any, hf_config: Any) -> str:
    """What this class calls its head; told from a model without memory."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return find_head(model_class(hf_config))[0]


@contextmanager
def _quiet_load_report() -> Iterator[None]:
    """transformers prints a table of the head that is missing; that is the usual case here, and said in one line."""
    log = logging.getLogger("transformers.modeling_utils")

    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    log.addFilter(errors_only)
    try:
        yield
    finally:
        log.removeFilter(errors_only)
