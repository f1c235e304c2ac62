"""The optimizer step of a dump once more, in one process, until it is known where NaN or infinity comes from.

    info, data, places = read_dump(folder)
    finding = replay(info, data, places, checkpoint=...)

The engine is built from the configurations in the dump, the weights come from a checkpoint or the model's folder. The
rows are found by halving: a half whose gradient is not finite is halved again. Rows that are bad only together are
named together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from rlflow.config import (
    CheckpointConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    omega_conf_to_dataclass,
)
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ConfigError
from rlflow.workers import losses
from rlflow.workers.engine.base import BaseEngine, LossFunction
from rlflow.workers.engine.fsdp.optim import grad_norm
from rlflow.workers.engine.fsdp.shards import local_part
from rlflow.workers.engine.registry import EngineRegistry
from rlflow.workers.nonfinite.dump import DumpInfo, nonfinite_rows, weights_state

# The losses of this package and the configuration that each takes: a dump names one, and nothing else is imported.
LOSSES: dict[str, tuple[Callable[..., Any], type]] = {
    "rlflow.workers.losses.ppo_loss": (losses.ppo_loss, FSDPActorConfig),
    "rlflow.workers.losses.value_loss": (losses.value_loss, FSDPCriticConfig),
}
# Over how many processes the work was spread, which a replay in one does not do.
_SPREAD = {"fsdp_size": -1, "ulysses_sequence_parallel_size": 1}
# Options that count tokens of one of the ranks that share a row.
_TOKENS_OF_A_RANK = ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")
SAME_NORM = 1e-6
MAX_RUNS = 200


@dataclasses.dataclass
class Finding:
    """What a replay found.

    Fields:
        grad_norm: of all rows; the gradient was reproduced when it is not finite.
        weights_norm, same_weights: of the weights used, and whether it is that of the dump.
        nonfinite_weights: weights with values that are not finite.
        fields: field of the batch -> (rank, row) with such values.
        rows: the smallest sets of (rank, row) whose gradient alone is not finite.
        module: the first module, in the order of the forward, whose output is not finite; None: all are finite.
        loss_finite: whether the loss of all micro-batches is.
        parameter: the first parameter, in the order of the backward, whose gradient is not finite.
        parameters: how many of them have one, of how many.
    """

    grad_norm: float
    weights_norm: float
    same_weights: bool
    nonfinite_weights: list[str]
    fields: dict[str, list[tuple[int, int]]]
    rows: list[list[tuple[int, int]]]
    module: str | None
    loss_finite: bool
    parameter: str | None
    parameters: tuple[int, int]

    @property
    def reproduced(self) -> bool:
        """Whether the gradient is not finite here either."""
        return not math.isfinite(self.grad_norm)


def build_engine(info: DumpInfo, *, model: str | None = None, checkpoint: Path | None = None) -> BaseEngine:
    """The engine of a dump, alone in this process.

    Args:
        info: of the dump.
        model: a folder to read the model from instead of the dump's.
        checkpoint: the `actor` or `critic` folder of a checkpoint with the weights; None: those of the model's folder.
    """
    engine_options = _budgets_alone(info.engine, info) | _SPREAD
    model_options = info.model | ({"path": model} if model else {})
    engine = EngineRegistry.new(
        info.model_type,
        backend=info.engine["strategy"],
        model_config=omega_conf_to_dataclass(model_options, HFModelConfig),
        engine_config=omega_conf_to_dataclass(engine_options, FSDPEngineConfig),
        optimizer_config=omega_conf_to_dataclass(info.optimizer, FSDPOptimizerConfig),
        checkpoint_config=CheckpointConfig(load_contents=["model"]),
    )
    engine.initialize()
    if checkpoint is not None:
        engine.load_checkpoint(str(checkpoint))
    return engine


def _budgets_alone(options: dict[str, Any], info: DumpInfo) -> dict[str, Any]:
    """Options with the token budgets that ranks of a sequence had together: this process computes whole rows."""
    ranks = info.engine["ulysses_sequence_parallel_size"]
    return options | {key: options[key] * ranks for key in _TOKENS_OF_A_RANK if options.get(key)}


def loss_of(info: DumpInfo) -> LossFunction:
    """The loss of a dump; `ConfigError` for one that is not of this package."""
    if info.loss_function not in LOSSES:
        raise ConfigError(
            f"the dump was made with the loss {info.loss_function}, which is not one of {', '.join(LOSSES)}; its rows "
            "can be read with rlflow.workers.nonfinite.dump.read_dump, but not replayed"
        )
    function, config_class = LOSSES[info.loss_function]
    return partial(function, config=omega_conf_to_dataclass(info.loss, config_class))


def replay(engine: BaseEngine, info: DumpInfo, data: TensorDict, places: list[tuple[int, int]]) -> Finding:
    """Compute the gradient of the dump's rows and find out where it stops being finite."""
    loss_fn = loss_of(info)
    data = tu.assign_non_tensor_whole(data.copy(), _budgets_alone(info.options, info))
    norm, bad_weights = weights_state(engine)
    watch = _Watch(engine.module)  # type: ignore[attr-defined]
    with engine.train_mode():
        with watch:
            outputs = _gradient(engine, data, loss_fn)
        total = _grad_norm(engine)
        rows: list[list[int]] = []
        if not math.isfinite(total):
            rows = smallest_sets(list(range(data.batch_size[0])), partial(_is_bad, engine, data, loss_fn))
    return Finding(
        grad_norm=total,
        weights_norm=norm,
        same_weights=math.isclose(norm, info.weights_norm, rel_tol=SAME_NORM)
        or (math.isnan(norm) and math.isnan(info.weights_norm)),
        nonfinite_weights=bad_weights,
        fields={name: [places[i] for i in bad] for name, bad in nonfinite_rows(data).items()},
        rows=[[places[i] for i in found] for found in rows],
        module=watch.module,
        loss_finite=all(math.isfinite(loss) for loss in outputs["loss"]),
        parameter=watch.parameter,
        parameters=(watch.bad_parameters, watch.all_parameters),
    )


def smallest_sets(
    rows: list[int], is_bad: Callable[[list[int]], bool], runs: list[int] | None = None
) -> list[list[int]]:
    """Split a bad set until its parts are bad no more or hold one row; after `MAX_RUNS` tries sets stay as they are."""
    runs = [0] if runs is None else runs
    if len(rows) == 1 or runs[0] >= MAX_RUNS:
        return [rows]
    found = []
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        runs[0] += 1
        if is_bad(half):
            found += smallest_sets(half, is_bad, runs)
    return found or [rows]


def _is_bad(engine: BaseEngine, data: TensorDict, loss_fn: LossFunction, rows: list[int]) -> bool:
    _gradient(engine, tu.index_select_tensor_dict(data, rows), loss_fn)
    return not math.isfinite(_grad_norm(engine))


def _gradient(engine: BaseEngine, data: TensorDict, loss_fn: LossFunction) -> dict[str, Any]:
    engine.optimizer_zero_grad()
    return engine.forward_backward_batch(data.copy(), loss_fn)


def _grad_norm(engine: BaseEngine) -> float:
    params = engine.module.parameters()  # type: ignore[attr-defined]
    return grad_norm(param.grad for param in params if param.grad is not None)


class _Watch:
    """Notes the first module and the first parameter with values that are not finite."""

    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self._handles: list[Any] = []
        self.module: str | None = None
        self.parameter: str | None = None
        self.bad_parameters = 0
        self.all_parameters = 0

    def __enter__(self) -> _Watch:
        for name, part in self._root.named_modules():
            self._handles.append(part.register_forward_hook(partial(self._after_forward, name)))
        for name, param in self._root.named_parameters():
            if param.requires_grad:
                self.all_parameters += 1
                self._handles.append(param.register_post_accumulate_grad_hook(partial(self._after_backward, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        bad = [p for p in self._root.parameters() if p.grad is not None and not _is_finite(p.grad)]
        self.bad_parameters = len(bad)

    def _after_forward(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if self.module is None and not all(_is_finite(value) for value in _tensors(output)):
            self.module = _shown(name)

    def _after_backward(self, name: str, param: Tensor) -> None:
        if self.parameter is None and param.grad is not None and not _is_finite(param.grad):
            self.parameter = _shown(name)


def _shown(name: str) -> str:
    return name.removeprefix("hf_model.") or "the whole model"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


def _is_finite(tensor: Tensor) -> bool:
    # Detached: a recomputed forward must save the same tensors for its backward as the first one.
    return bool(torch.isfinite(local_part(tensor).detach()).all())
