"""What the shards of a checkpoint are weights of: a transformers config and class, and the names that class expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlflow.checkpoint.shards import ShardReader, read_json
from rlflow.utils.errors import CheckpointError

if TYPE_CHECKING:
    from rlflow.model_merger.source import Source

VALUE_SUFFIX = "ForTokenClassification"


@dataclass(frozen=True)
class ModelKind:
    """Config and class of the model.

    Attributes:
        config: transformers config.
        value_model: a token classifier with one label instead of a causal LM.
        trust_remote_code: build it from code that lies beside the config.
        class_name: of the transformers class.
        shapes: name -> shape of every tensor that the class reads from a checkpoint; a tied weight comes once.
        embedding: name of the input embedding.
    """

    config: Any
    value_model: bool
    trust_remote_code: bool
    class_name: str
    shapes: dict[str, tuple[int, ...]]
    embedding: str

    def auto_class(self) -> Any:
        """The `AutoModel...` class that loads it."""
        return auto_class(self.value_model)


def auto_class(value_model: bool) -> Any:
    """`AutoModelForTokenClassification` for a value model, else `AutoModelForCausalLM`."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForTokenClassification if value_model else AutoModelForCausalLM


def is_value_model(source: Source) -> bool:
    """Whether the checkpoint says that it is a value model, by the architecture in its config."""
    config = read_json(source.hf_folder / "config.json")
    return any(str(name).endswith(VALUE_SUFFIX) for name in config.get("architectures") or [])


def model_kind(
    source: Source,
    *,
    value_model: bool | None = None,
    tie_word_embedding: bool = False,
    trust_remote_code: bool = False,
) -> ModelKind:
    """Read the config and build the class without memory, to learn what it expects.

    Args:
        source: the checkpoint.
        value_model: None asks the checkpoint.
        tie_word_embedding: make one weight of input embedding and output head, whatever the config says.
        trust_remote_code: allow code that comes with the checkpoint.

    Raises:
        CheckpointError: transformers cannot read the config, or has no such class for it.
    """
    from transformers import AutoConfig

    value = is_value_model(source) if value_model is None else value_model
    try:
        config = AutoConfig.from_pretrained(str(source.hf_folder), trust_remote_code=trust_remote_code)
        if value:
            config.num_labels = 1
        if tie_word_embedding:
            config.tie_word_embeddings = True
        with torch.device("meta"):
            model = auto_class(value).from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(
            f"transformers builds no {'token classifier' if value else 'causal LM'} from {source.hf_folder}: {error}"
        ) from error
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    saved = model.state_dict()
    shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in saved}
    table = model.get_input_embeddings().weight
    embedding = next(name for name, param in model.named_parameters() if param is table)
    return ModelKind(config, value, trust_remote_code, type(model).__name__, shapes, embedding)


def check_names(kind: ModelKind, reader: ShardReader, *, tie_word_embedding: bool = False) -> list[str]:
    """Names of the shards' tensors in the model's order, when they are those that the class expects.

    Raises:
        CheckpointError: names or shapes differ. With `tie_word_embedding` an output head is left out, provided that it
            equals the input embedding.
    """
    there = {name: reader.shape(name) for name in reader.tensors}
    if tie_word_embedding:
        for name in sorted(set(there) - set(kind.shapes)):
            _check_equal_to_embedding(kind, reader, name)
            del there[name]
    missing, extra = sorted(set(kind.shapes) - set(there)), sorted(set(there) - set(kind.shapes))
    if missing or extra:
        raise CheckpointError(
            f"{reader.folder} does not fit {kind.class_name}: it lacks {missing[:4]} and has {extra[:4]} besides"
            + _advice(kind, missing, extra)
        )
    for name, shape in kind.shapes.items():
        if there[name] != shape:
            raise CheckpointError(
                f"{reader.folder}: {name} has shape {list(there[name])}, {kind.class_name} needs {list(shape)}"
            )
    return list(kind.shapes)


def _advice(kind: ModelKind, missing: list[str], extra: list[str]) -> str:
    if not kind.value_model and any(name.startswith("score.") for name in extra):
        return ". It has the head of a value model: add --is-value-model"
    if kind.value_model and "lm_head.weight" in extra:
        return ". It has the head of a language model: leave --is-value-model out"
    if extra == ["lm_head.weight"] and not missing:
        return ". The config ties the embeddings and the checkpoint does not: one of them was changed"
    return ""


def _check_equal_to_embedding(kind: ModelKind, reader: ShardReader, name: str) -> None:
    block = 1 << 26
    if kind.embedding in reader.tensors and reader.shape(kind.embedding) == reader.shape(name):
        pairs = zip(reader.blocks(name, block), reader.blocks(kind.embedding, block), strict=True)
        if all(torch.equal(a, b) for a, b in pairs):
            return
    raise CheckpointError(
        f"--tie-word-embedding would drop {name}, which differs from the input embedding: the model would change. "
        "Leave it out"
    )


@torch.no_grad()
def fill(source: Source, tensors: dict[str, Tensor]) -> None:
    """Copy the shards into `tensors` (of the names in the index), one whole file after another.

    Does not use `ShardReader`, so that a fault of the one does not hide in the other.

    Raises:
        CheckpointError: the pieces of a tensor do not cover it.
    """
    from safetensors.torch import load_file

    index = read_json(source.model_folder / "index.json")["tensors"]
    wanted = {name: index[name] for name in tensors}
    left = {name: (entry["shape"] or [1])[0] for name, entry in wanted.items()}
    for file in sorted({piece["file"] for entry in wanted.values() for piece in entry["pieces"]}):
        saved = load_file(source.model_folder / file)
        for name, entry in wanted.items():
            for piece in (piece for piece in entry["pieces"] if piece["file"] == file):
                into = tensors[name].narrow(0, piece["start"], piece["length"]) if entry["shape"] else tensors[name]
                into.copy_(saved[name])
                left[name] -= piece["length"]
    uncovered = sorted(name for name, rows in left.items() if rows)
    if uncovered:
        raise CheckpointError(f"{source.model_folder}: the pieces of {uncovered[:4]} do not cover them")
