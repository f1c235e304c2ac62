"""Shards of any number of ranks -> one folder that `from_pretrained` loads.

Invariants
    - The checkpoint is only read, and its manifest is verified before anything of it is used.
    - The target appears whole under its name, or not at all.
    - At most `BLOCK_BYTES` of weights are in memory at a time, whatever the size of the model.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rlflow.checkpoint import PendingDirectory, fsync_tree
from rlflow.checkpoint.hf_weights import MAX_FILE_BYTES, TensorSpec, write_weights
from rlflow.checkpoint.shards import ShardReader, read_json
from rlflow.model_merger.adapters import open_shards
from rlflow.model_merger.model import ModelKind, check_names, model_kind
from rlflow.model_merger.source import Source, open_source
from rlflow.utils.errors import CheckpointError, ConfigError

BLOCK_BYTES = 64 * 2**20
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


@dataclass(frozen=True)
class MergeOptions:
    """How to merge.

    Attributes:
        dtype: of floating-point weights in the target: "bfloat16" or "float32".
        overwrite: replace a target that is a model folder already.
        value_model: True or False overrules what the checkpoint says of itself.
        tie_word_embedding: write one weight for input embedding and output head; refused when they differ.
        trust_remote_code: allow model code that comes with the checkpoint.
        max_file_bytes: start a new weight file at this size.
    """

    dtype: str = "bfloat16"
    overwrite: bool = False
    value_model: bool | None = None
    tie_word_embedding: bool = False
    trust_remote_code: bool = False
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True)
class MergeResult:
    """What was written."""

    target: Path
    class_name: str
    tensors: int
    nbytes: int
    files: int
    dtype: str
    seconds: float

    def __str__(self) -> str:
        many = "1 file" if self.files == 1 else f"{self.files} files"
        size = f"{self.nbytes / 1e6:.1f} MB" if self.nbytes < 1e9 else f"{self.nbytes / 1e9:.2f} GB"
        return (
            f"{self.target}: {self.class_name}, {self.tensors} tensors in {many}, {size} ({self.dtype}), "
            f"{self.seconds:.1f} s"
        )


def merge(folder: Path | str, target: Path | str, options: MergeOptions | None = None) -> MergeResult:
    """Merge the role folder of a checkpoint (`.../global_step_N/actor`) into the new folder `target`.

    Raises:
        ConfigError: the target is not empty, lies within the checkpoint, or an option is unknown.
        CheckpointError: the checkpoint is damaged or does not fit its model class, or the disk refuses.
    """
    options = options or MergeOptions()
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype {options.dtype!r} is not written here; choose one of {', '.join(DTYPES)}")
    target = Path(os.path.abspath(Path(target).expanduser()))
    check_target(target, Path(folder).expanduser().resolve(), overwrite=options.overwrite)
    start = time.monotonic()
    source = open_source(folder)
    kind = model_kind(
        source,
        value_model=options.value_model,
        tie_word_embedding=options.tie_word_embedding,
        trust_remote_code=options.trust_remote_code,
    )
    with open_shards(source) as reader:
        specs = _specs(kind, reader, options)
        pending = PendingDirectory(target)
        try:
            _copy_files(source, pending.work)
            _write_config(source, kind, pending.work, options.dtype)
            files = write_weights(
                pending.work, specs, lambda name: reader.blocks(name, BLOCK_BYTES), max_bytes=options.max_file_bytes
            )
            fsync_tree(pending.work)
            pending.commit()
        except OSError as error:
            raise CheckpointError(f"{target} was not written: {error}") from error
        finally:
            pending.discard()
    total = sum(spec.nbytes for spec in specs)
    seconds = time.monotonic() - start
    return MergeResult(target, kind.class_name, len(specs), total, len(files), options.dtype, seconds)


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """Refuse a target that would destroy something.

    Raises:
        ConfigError: see the message.
    """
    real = target.resolve()
    # A step's manifest describes its folder: nothing may be added to it, nor may a target take the place of it.
    kept = source.parent if source.parent.name.startswith("global_step_") else source
    if real == kept or kept in real.parents or real in kept.parents:
        raise ConfigError(f"the target {target} and the checkpoint {kept} lie within each other; choose another target")
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"the target {target} is a file; choose a folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"the target {target} is not empty; choose another one, or add --overwrite")
    if not (target / "config.json").is_file():
        raise ConfigError(
            f"--overwrite replaces model folders only, and {target} has no config.json; remove it by hand"
        )


def _specs(kind: ModelKind, reader: ShardReader, options: MergeOptions) -> list[TensorSpec]:
    def spec(name: str) -> TensorSpec:
        dtype = reader.dtype(name)
        return TensorSpec(name, DTYPES[options.dtype] if dtype.is_floating_point else dtype, reader.shape(name))

    return [spec(name) for name in check_names(kind, reader, tie_word_embedding=options.tie_word_embedding)]


def _copy_files(source: Source, work: Path) -> None:
    """Tokenizer, generation config and whatever else lies beside the config, but no weights."""
    for path in sorted(source.hf_folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, work / path.name)


def _write_config(source: Source, kind: ModelKind, work: Path, dtype: str) -> None:
    """The checkpoint's config, changed where the target differs; edited as JSON, so that all else stays as it was."""
    config = read_json(source.hf_folder / "config.json")
    config.pop("torch_dtype", None)  # the older name of the same
    config |= {"dtype": dtype, "architectures": [kind.class_name]}
    if kind.value_model:
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if kind.config.get_text_config().tie_word_embeddings:
        config["tie_word_embeddings"] = True
    (work / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
