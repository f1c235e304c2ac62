"""How the ranks of a tensor-parallel group share each weight of a model, read from the model's own plan.

transformers says for each module of a family how it splits (`config.base_model_tp_plan`, and the class's plan for the
head). What matters here is where the elements go:

    colwise (q, k, v, gate, up)    rows of the weight, and the bias alike
    rowwise (o, down)              columns of the weight; the bias stays whole
    embedding_rowwise              rows of the vocabulary
    packed gate|up, fused q|k|v    each kind split by itself, the slices laid one after the other (reordered, so that a
                                   rank's part is q_i | k_i | v_i, as inference engines keep it)
    anything else                  whole on every rank

Attention splits by heads. Fewer key/value heads than ranks are shared: neighbouring ranks hold the same head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.checkpoint_engine.resharding.boxes import Part, ranges, whole

_COLUMN = ("colwise", "colwise_rep", "colwise_gather_output")
_ROW = ("rowwise", "rowwise_rep", "rowwise_split_input")
_VOCABULARY = ("embedding_rowwise",)
_WHOLE = ("replicated_with_grad_allreduce", "sequence_parallel", "all_reduce", "moe_tp_experts")
_QKV = ("qkv_proj", "query_key_value")
_GATE_UP = ("gate_up_proj",)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class UnsplittableError(ValueError):
    """A weight cannot be shared by so many ranks, or its way to split is not known."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a dimension that is split by itself.

    Attributes:
        size: elements along the dimension.
        units: number of pieces that stay whole (heads); `size` for no such bound.
    """

    size: int
    units: int

    def span(self, slot: int, slots: int) -> tuple[int, int]:
        """(start, length) of one of `slots` ranks. With fewer units than ranks, several ranks have the same one."""
        if self.size % self.units or (self.units % slots and slots % self.units):
            raise UnsplittableError(
                f"{self.size} rows or columns in {self.units} inseparable parts cannot be shared by {slots} ranks"
            )
        unit = self.size // self.units
        count = max(1, self.units // slots)
        return (slot * self.units // slots) * unit, count * unit


@dataclass(frozen=True)
class ParamSplit:
    """How one weight splits: along `dim`, segment by segment; `dim` None: every rank holds all of it."""

    dim: int | None = None
    segments: tuple[Segment, ...] = ()

    @property
    def kind(self) -> str:
        """As the literature calls it: column, row or replicated."""
        if self.dim is None:
            return "replicated"
        return "row" if self.dim == -1 else "column"

    def part(self, shape: Sequence[int], slot: int, slots: int) -> Part:
        """The elements of rank `slot` of `slots`. `UnsplittableError`: the sizes do not allow it."""
        if self.dim is None or slots == 1:
            return whole(shape)
        spans, offset = [], 0
        for segment in self.segments:
            start, length = segment.span(slot, slots)
            spans.append((offset + start, length))
            offset += segment.size
        return ranges(shape, self.dim % len(shape), spans)


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """Module pattern -> style of the causal LM of a transformers config; empty for a family without a plan."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    plan = dict(getattr(text, "base_model_tp_plan", None) or {})
    classes = AutoModelForCausalLM._model_mapping
    if plan and type(text) in classes:
        head = getattr(classes[type(text)], "_tp_plan", None) or {}
        plan |= {name: style for name, style in dict(head).items() if name.endswith("lm_head")}
    return plan


def split_weights(
    config: Any, shapes: Mapping[str, Sequence[int]], *, keep_whole: Sequence[str] = ()
) -> dict[str, ParamSplit]:
    """How each weight of a model splits.

    Args:
        config: its transformers config.
        shapes: of the full tensors, by their Hugging Face names.
        keep_whole: endings of module names that the engine wants whole and cuts itself, for example a vocabulary.

    Raises:
        UnsplittableError: the family has no plan, or one with a style that is not known here.
    """
    plan = tensor_parallel_plan(config)
    if not plan:
        raise UnsplittableError(f"transformers has no tensor-parallel plan for model_type={config.model_type}")
    text = config.get_text_config()
    patterns = [(re.compile(r"(?:^|\.)" + re.escape(name).replace(r"\*", r"\d+") + "$"), s) for name, s in plan.items()]
    splits = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight").removesuffix(".bias")
        style = next((style for pattern, style in patterns if pattern.search(module)), None)
        if style is None or style in _WHOLE or module.endswith(tuple(keep_whole)):
            splits[name] = ParamSplit()
        else:
            splits[name] = _split(text, name, module.rpartition(".")[2], style, shape)
    return splits


def _split(config: Any, name: str, leaf: str, style: str, shape: Sequence[int]) -> ParamSplit:
    is_bias = name.endswith(".bias")
    if style in _ROW:
        if is_bias:
            return ParamSplit()
        return ParamSplit(-1, (Segment(shape[-1], _units(config, leaf, shape[-1])),))
    if style not in (*_COLUMN, *_VOCABULARY, "packed_colwise"):
        raise UnsplittableError(f"{name}: the style {style!r} of the model's tensor-parallel plan is not known here")
    # Weights of linear layers are [out, in]; packed experts [experts, out, in].
    dim = len(shape) - 2 if len(shape) > 1 else 0
    size = shape[dim]
    if leaf in _QKV:
        sizes = _qkv_sizes(config, name, size)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        return ParamSplit(dim, tuple(map(Segment, sizes, heads)))
    if leaf in _GATE_UP or style == "packed_colwise":
        return ParamSplit(dim, (Segment(size // 2, size // 2),) * 2)
    return ParamSplit(dim, (Segment(size, _units(config, leaf, size)),))


def _units(config: Any, leaf: str, size: int) -> int:
    """Heads of an attention projection; the size of any other one."""
    if leaf in ("q_proj", "o_proj"):
        return int(config.num_attention_heads)
    if leaf in ("k_proj", "v_proj"):
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return size


def _qkv_sizes(config: Any, name: str, size: int) -> tuple[int, int, int]:
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    width, rest = divmod(size, heads + 2 * shared)
    if rest:
        raise UnsplittableError(f"{name} has {size} rows, which {heads} + 2 x {shared} heads do not divide")
    return heads * width, shared * width, shared * width


def stage_of(name: str, layers: int, stages: int) -> int:
    """Pipeline stage that holds a weight: layers evenly, what comes before them first, the final norm and head last."""
    if layers % stages:
        raise UnsplittableError(f"{layers} layers cannot be shared evenly by {stages} pipeline stages")
    if match := _LAYER.search(name):
        return int(match.group(1)) * stages // layers
    return 0 if "embed" in name else stages - 1
