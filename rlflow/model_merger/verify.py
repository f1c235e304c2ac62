"""Logits of a merged folder against those of a model built from the checkpoint's shards.

The two ways share no code but the model class: one fills an empty model with the shards, file by file; the other lets
transformers load the folder. Both compute in fp32 on the CPU, on the same fixed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.model_merger.merge import DTYPES, MergeOptions
from rlflow.model_merger.model import ModelKind, fill, model_kind
from rlflow.model_merger.source import ADAPTER_FOLDER, Source, open_source
from rlflow.utils.errors import CheckpointError

TOLERANCE = 1e-4
ROWS, TOKENS = 2, 24


@dataclass(frozen=True)
class Verification:
    """What the comparison found.

    Attributes:
        difference: largest absolute difference of logits to the shards, rounded to the folder's dtype.
        rounding: the same to the shards as they are: what the dtype costs.
        tolerance: of `difference`.
    """

    difference: float
    rounding: float
    tolerance: float
    dtype: str

    @property
    def passed(self) -> bool:
        """Whether the folder holds the checkpoint's model."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        lines = (
            f"logits: max difference {self.difference:.3g} to a model built from the shards "
            f"({'within' if self.passed else 'ABOVE'} the tolerance {self.tolerance:g})"
        )
        if self.dtype != "float32":
            lines += f"\n        rounding the weights to {self.dtype} changes them by up to {self.rounding:.3g}"
        return lines


def verify(
    folder: Path | str, target: Path | str, options: MergeOptions | None = None, tolerance: float = TOLERANCE
) -> Verification:
    """Compare the model in `target` with the checkpoint's role folder `folder`.

    Raises:
        CheckpointError: transformers does not load the target, or finds weights missing in it.
    """
    options = options or MergeOptions()
    source = open_source(folder)
    kind = model_kind(
        source,
        value_model=options.value_model,
        tie_word_embedding=options.tie_word_embedding,
        trust_remote_code=options.trust_remote_code,
    )
    tokens = fixed_tokens(kind.config.get_text_config().vocab_size)
    exact, rounded = _logits_of_shards(kind, source, tokens, DTYPES[options.dtype])
    merged = _logits_of_folder(kind, Path(target), tokens)
    return Verification(_difference(merged, rounded), _difference(merged, exact), tolerance, options.dtype)


def fixed_tokens(vocab_size: int) -> Tensor:
    """[2, 24] token ids spread over the vocabulary, the same in every run."""
    return (torch.arange(ROWS * TOKENS) * 7919 + 11).remainder(vocab_size).reshape(ROWS, TOKENS)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    worst = float((a - b).abs().max())
    return worst if worst == worst else float("inf")  # NaN logits prove nothing


@torch.no_grad()
def _logits_of_shards(kind: ModelKind, source: Source, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits with the weights as they are, and with the weights rounded to `dtype`."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = kind.auto_class().from_config(
            kind.config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=kind.trust_remote_code,
        )
    model.tie_weights()
    fill(source, _weights(model, kind))
    if source.has_adapter:
        model = _merged_by_peft(model, source)
    weights = _weights(model, kind)
    model.eval()
    exact = model(input_ids=tokens).logits
    for weight in weights.values():
        if weight.is_floating_point():
            weight.copy_(weight.to(dtype))
    return exact, model(input_ids=tokens).logits


def _weights(model: Any, kind: ModelKind) -> dict[str, Tensor]:
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: named[name].detach() for name in kind.shapes}


def _merged_by_peft(model: Any, source: Source) -> Any:
    """PEFT's own merge of the adapter beside the shards, so that a fault of ours does not hide in itself."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise CheckpointError("comparing a merged adapter needs peft: pip install 'rlflow[lora]'") from error
    return PeftModel.from_pretrained(model, str(source.folder / ADAPTER_FOLDER)).merge_and_unload()


@torch.no_grad()
def _logits_of_folder(kind: ModelKind, target: Path, tokens: Tensor) -> Tensor:
    options: dict[str, Any] = {"trust_remote_code": kind.trust_remote_code, "output_loading_info": True}
    try:
        model, info = kind.auto_class().from_pretrained(
            str(target), dtype=torch.float32, attn_implementation="eager", **options
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"transformers does not load {target}: {error}") from error
    wrong = {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    wrong = {key: names[:4] for key, names in wrong.items() if names}
    if wrong:
        raise CheckpointError(f"transformers loads {target}, but: {wrong}")
    return model.eval()(input_ids=tokens).logits
