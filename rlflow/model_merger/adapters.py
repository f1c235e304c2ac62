"""Shards of a model with adapters, read as those of the plain model that it computes like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlflow.checkpoint.shards import ShardReader, read_json
from rlflow.model_merger.source import ADAPTER_FOLDER, ADAPTER_META, Source
from rlflow.utils.errors import CheckpointError

_MARK = ".lora_"


def open_shards(source: Source) -> ShardReader:
    """The reader of a checkpoint's weights; adapters are merged in.

    Raises:
        CheckpointError: adapters without the weights that they belong to.
    """
    if not source.has_adapter:
        return ShardReader(source.model_folder)
    reader = MergingReader(source, read_json(source.folder / ADAPTER_META)["scaling"])
    if not set(reader.scaling) <= set(reader.tensors):
        raise CheckpointError(
            f"{source.folder} holds an adapter without the weights it belongs to (checkpoint.save_lora_only): "
            f"{source.folder / ADAPTER_FOLDER} has it for peft (PeftModel.from_pretrained, then merge_and_unload), and "
            f"with hf_model in checkpoint.save_contents {source.hf_folder} has the merged weights"
        )
    return reader


class MergingReader(ShardReader):
    """Names are those of the plain model, and rows of an adapted weight come as W + s B A, in fp32.

    Args:
        source: a checkpoint that holds frozen weights and adapters.
        scaling: name of an adapted weight -> s.
    """

    def __init__(self, source: Source, scaling: dict[str, float]) -> None:
        super().__init__(source.model_folder)
        self.scaling = scaling
        self._adapters = self._stack.enter_context(ShardReader(source.model_folder))
        self.tensors = {name: entry for name, entry in self.tensors.items() if _MARK not in name}

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is read in."""
        return torch.float32 if name in self.scaling else super().dtype(name)

    def blocks(self, name: str, max_bytes: int) -> Iterator[Tensor]:
        """As of the base class; blocks of an adapted weight are fp32."""
        if name not in self.scaling:
            yield from super().blocks(name, max_bytes)
            return
        stem = name.removesuffix(".weight")
        rank = self._adapters.shape(f"{stem}.lora_A.weight")[0]
        a = self._adapters.read(f"{stem}.lora_A.weight", 0, rank).float()
        rows, columns = self.shape(name)
        step = max(1, max_bytes // (4 * columns))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            b = self._adapters.read(f"{stem}.lora_B.weight", start, count).float()
            yield torch.add(self.read(name, start, count).float(), b @ a, alpha=self.scaling[name])
