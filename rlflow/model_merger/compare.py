"""The weights of a Hugging Face folder against the shards of a checkpoint: names, shapes, types, values."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlflow.checkpoint.hf_weights import INDEX_FILE, SINGLE_FILE
from rlflow.checkpoint.shards import ShardReader, read_json
from rlflow.model_merger.adapters import open_shards
from rlflow.model_merger.merge import BLOCK_BYTES, MergeOptions
from rlflow.model_merger.model import check_names, model_kind
from rlflow.model_merger.source import open_source
from rlflow.utils.errors import CheckpointError, ConfigError

TOLERANCE = 1e-6


class HfWeights:
    """Row ranges of the tensors in the safetensors files of a folder.

    Raises:
        ConfigError: the folder has no such files.
        CheckpointError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        for file in self._files():
            handle = self._open(file)
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _files(self) -> list[str]:
        if (self.folder / INDEX_FILE).is_file():
            return sorted(set(read_json(self.folder / INDEX_FILE)["weight_map"].values()))
        if (self.folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        raise ConfigError(f"{self.folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; is it a model folder?")

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read: {error}") from error

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def rows(self, name: str, start: int, length: int) -> torch.Tensor:
        """Rows [start, start + length) of a tensor, a scalar as it is."""
        if not self.shape(name):
            return self._handles[name].get_tensor(name)
        return self._handles[name].get_slice(name)[start : start + length]


def compare(
    folder: Path | str, hf_folder: Path | str, options: MergeOptions | None = None, tolerance: float = TOLERANCE
) -> list[str]:
    """Differences between a checkpoint's role folder and a model folder, one line each; empty means equal.

    Values are compared in the type that the model folder has, so that rounding to it is no difference.

    Raises:
        ConfigError: `hf_folder` is no model folder.
        CheckpointError: the checkpoint is damaged.
    """
    options = options or MergeOptions()
    hf_folder = Path(hf_folder).expanduser()
    if not (hf_folder / "config.json").is_file():
        raise ConfigError(f"{hf_folder} has no config.json; is it a model folder?")
    config = read_json(hf_folder / "config.json")
    source = open_source(folder)
    tie = options.tie_word_embedding
    kind = model_kind(
        source,
        value_model=options.value_model,
        tie_word_embedding=tie,
        trust_remote_code=options.trust_remote_code,
    )
    with open_shards(source) as shards, HfWeights(hf_folder) as weights:
        wanted = check_names(kind, shards, tie_word_embedding=tie)
        saved_as = {name: name for name in wanted}
        if kind.config.get_text_config().tie_word_embeddings:
            saved_as.setdefault("lm_head.weight", kind.embedding)  # some writers store the tied copy too
        problems = [f"{name}: missing" for name in wanted if name not in weights.names]
        problems += [f"{name}: not in the checkpoint" for name in sorted(weights.names - set(saved_as))]
        declared = config.get("dtype") or config.get("torch_dtype")
        for name, saved in saved_as.items():
            if name in weights.names:
                problems += _compare_tensor(name, saved, shards, weights, declared, tolerance)
    return problems


def _compare_tensor(
    name: str, saved: str, shards: ShardReader, weights: HfWeights, declared: str | None, tolerance: float
) -> list[str]:
    if weights.shape(name) != shards.shape(saved):
        return [f"{name}: shape {list(weights.shape(name))}, in the checkpoint {list(shards.shape(saved))}"]
    worst, start, dtype = 0.0, 0, None
    for block in shards.blocks(saved, BLOCK_BYTES):
        rows = block.shape[0] if block.dim() else 1
        other = weights.rows(name, start, rows)
        start, dtype = start + rows, other.dtype
        difference = (block.to(dtype).double() - other.double()).abs()
        if difference.isnan().any() and not torch.equal(block.isnan(), other.isnan()):
            return [f"{name}: NaN on one side only"]
        if difference.numel():
            worst = max(worst, float(difference.nan_to_num(0.0).max()))
    problems = []
    if dtype is not None and dtype.is_floating_point and declared and str(dtype) != f"torch.{declared}":
        problems.append(f"{name}: type {str(dtype).removeprefix('torch.')}, the config says {declared}")
    if worst > tolerance:
        problems.append(f"{name}: values differ by up to {worst:.3g} (tolerance {tolerance:g})")
    return problems
