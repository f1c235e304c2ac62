"""The mini-batch of an optimizer step whose gradient was not finite, on disk; no pickle.

    <run folder>/nonfinite/step_12_actor/
        dump.json                  what `DumpInfo` holds; written last: without it the dump is not complete
        rows_00000.safetensors     the rows of the first data-parallel rank: values and lengths of every jagged field
        rows_00000.json            the kind of each field, and which rows were left out for their size

Invariants
    - What cannot be written is a warning: a full disk does not end the run that a skipped step did not end.
    - A dump holds at most `max_bytes` of rows over all ranks; rows with values that are not finite come first.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from rlflow.checkpoint.shards import read_json, write_json, write_tensors
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import CheckpointError
from rlflow.workers.engine.base import BaseEngine

logger = logging.getLogger(__name__)

FORMAT = "rlflow-nonfinite-1"
INFO = "dump.json"
_LENGTHS = "/lengths"
_MODEL_FOLDERS = ("path", "hf_config_path", "tokenizer_path", "lora_adapter_path")


@dataclasses.dataclass
class DumpInfo:
    """What a dump says besides the rows.

    Fields:
        grad_norm: as text, "nan" or "inf".
        global_step: of the run; None outside one.
        ranks: data-parallel ranks, one file of rows each.
        model_type: "language_model" or "value_model".
        model, engine, optimizer, loss: the configurations as plain values.
        loss_function: its name in `rlflow.workers.losses`.
        options: what the batch said besides its rows.
        weights_norm, nonfinite_weights: the weights that the gradient belongs to.
    """

    grad_norm: str
    global_step: int | None
    ranks: int
    model_type: str
    model: dict[str, Any]
    engine: dict[str, Any]
    optimizer: dict[str, Any]
    loss: dict[str, Any]
    loss_function: str
    options: dict[str, Any]
    weights_norm: float
    nonfinite_weights: list[str]
    format: str = FORMAT


@dataclasses.dataclass(frozen=True)
class DumpRequest:
    """Where a worker's dump goes and how large it may become."""

    folder: Path
    global_step: int | None
    max_bytes: float


def write_dump(
    request: DumpRequest, engine: BaseEngine, config: Any, data: TensorDict, loss_fn: Any, grad_norm: float
) -> Path | None:
    """Write the mini-batch; the folder, or None when the disk refused. *Collective.*

    Args:
        request: where to.
        engine: whose gradient it was.
        config: the `TrainingWorkerConfig` that the engine was built from.
        data: this rank's rows, with the options of the batch.
        loss_fn: the loss; a `functools.partial` of a function of `rlflow.workers.losses` can be replayed.
        grad_norm: what is not finite.
    """
    norm, bad = weights_state(engine)
    error = None
    try:
        request.folder.mkdir(parents=True, exist_ok=True)
        (request.folder / INFO).unlink(missing_ok=True)  # of an earlier try of this step
        if engine.is_mp_src_rank_with_outputs():
            budget = request.max_bytes / engine.get_data_parallel_size()
            write_rows(request.folder, engine.get_data_parallel_rank(), data, budget)
    except (OSError, CheckpointError) as caught:
        error = f"rank {dist.get_rank()}: {caught}"
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    try:
        if dist.get_rank() == 0 and not any(errors):
            info = _describe(request, engine, config, data, loss_fn, grad_norm)
            info.weights_norm, info.nonfinite_weights = norm, bad
            write_json(request.folder / INFO, dataclasses.asdict(info))
    except OSError as caught:
        errors.append(str(caught))
    failed = [text for text in errors if text]
    if failed:
        logger.warning("the mini-batch of the non-finite gradient was not written to %s: %s", request.folder, failed[0])
    return None if failed else request.folder


def weights_state(engine: BaseEngine) -> tuple[float, list[str]]:
    """(2-norm of all weights, names of those with values that are not finite). *Collective.*"""
    squares, bad = 0.0, []
    for name, tensor in engine.get_per_tensor_param()[0]:
        # In float64 no finite weights of a narrower type have a norm that is not finite.
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        squares += norm**2
        if not math.isfinite(norm):
            bad.append(name)
    return math.sqrt(squares), bad


def _describe(
    request: DumpRequest, engine: BaseEngine, config: Any, data: TensorDict, loss_fn: Any, grad_norm: float
) -> DumpInfo:
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    loss = loss_fn.keywords.get("config") if isinstance(loss_fn, partial) else None
    model = _plain(config.model_config)
    for key in _MODEL_FOLDERS:  # a replay may be started elsewhere
        local = os.path.expanduser(str(model.get(key) or ""))
        if os.path.isdir(local):
            model[key] = os.path.abspath(local)
    options = {key: value for key, value in tu.non_tensor_dict(data).items() if _is_json(value)}
    return DumpInfo(
        grad_norm=str(grad_norm),
        global_step=request.global_step,
        ranks=engine.get_data_parallel_size(),
        model_type=config.model_type or "language_model",
        model=model,
        engine=_plain(config.engine_config),
        optimizer=_plain(config.optimizer_config),
        loss=_plain(loss),
        loss_function=f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}",
        options=options,
        weights_norm=0.0,
        nonfinite_weights=[],
    )


def _plain(config: Any) -> dict[str, Any]:
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) and not isinstance(config, type) else {}


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


# ----- rows -----------------------------------------------------------------------------------------------------------


def nonfinite_rows(data: TensorDict) -> dict[str, list[int]]:
    """Field -> rows in which it holds NaN or infinity."""
    found = {}
    for name, field in _fields(data).items():
        bad = [i for i, row in enumerate(field.unbind()) if row.is_floating_point() and not torch.isfinite(row).all()]
        if bad:
            found[name] = bad
    return found


def write_rows(folder: Path, rank: int, data: TensorDict, max_bytes: float) -> None:
    """Write as many of a rank's rows as fit."""
    fields = _fields(data)
    suspects = sorted({row for rows in nonfinite_rows(data).values() for row in rows})
    order = suspects + [row for row in range(data.batch_size[0]) if row not in set(suspects)]
    sizes = [0] * len(order)
    for field in fields.values():
        for row, value in enumerate(field.unbind()):
            sizes[row] += value.numel() * value.element_size()
    kept: list[int] = []
    for row in order:
        max_bytes -= sizes[row]
        if max_bytes >= 0 or not kept:
            kept.append(row)
    kept.sort()
    chosen = tu.index_select_tensor_dict(data, kept) if len(kept) < len(order) else data
    tensors, kinds = {}, {}
    for name, field in _fields(chosen).items():
        jagged = tu.is_nested(field)
        kinds[name] = "jagged" if jagged else "dense"
        tensors[name] = (tu.nested_values(field) if jagged else field).detach().cpu().contiguous()
        if jagged:
            tensors[name + _LENGTHS] = tu.nested_lengths(field).to("cpu", torch.int64)
    write_tensors(tensors, folder / f"rows_{rank:05d}.safetensors")
    left = sorted(set(order) - set(kept))
    write_json(folder / f"rows_{rank:05d}.json", {"fields": kinds, "rows": kept, "left_out": left})


def _fields(data: TensorDict) -> dict[str, Tensor]:
    return {str(name): value for name, value in data.items() if isinstance(value, Tensor)}


def read_dump(folder: Path) -> tuple[DumpInfo, TensorDict, list[tuple[int, int]]]:
    """(what it says, the rows of all ranks, the (rank, row) that each of them was).

    Raises:
        CheckpointError: the folder holds no complete dump, or one of another version.
    """
    if not (folder / INFO).is_file():
        raise CheckpointError(f"{folder} holds no {INFO}, so it is no complete dump of a non-finite gradient")
    values = read_json(folder / INFO)
    if values.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {values.get('format')!r}; this version reads {FORMAT!r}")
    try:
        info = DumpInfo(**values)
        parts = [_read_rows(folder, rank) for rank in range(info.ranks)]
    except (TypeError, KeyError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is damaged: {error}") from error
    places = [(rank, row) for rank, (_, rows) in enumerate(parts) for row in rows]
    data = tu.concat_tensordict([part for part, _ in parts])
    return info, tu.assign_non_tensor_whole(data, info.options), places


def _read_rows(folder: Path, rank: int) -> tuple[TensorDict, list[int]]:
    about = read_json(folder / f"rows_{rank:05d}.json")
    tensors = load_file(folder / f"rows_{rank:05d}.safetensors")
    fields = {
        name: tu.nested_from_values(tensors[name], tensors[name + _LENGTHS]) if kind == "jagged" else tensors[name]
        for name, kind in about["fields"].items()
    }
    return tu.get_tensordict(fields), [int(row) for row in about["rows"]]
