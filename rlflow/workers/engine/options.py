"""What a call asks of an engine: options that travel in the batch, read into typed records at its edge.

`OPTIONS` is the one table of their names. A batch may say them as `NonTensorData`, under the names that the reference's
workers read; a name that is not in the table belongs to the caller (a loss function may read it) and is left alone.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError


class Read(enum.Enum):
    """Who reads an option."""

    BATCH = "BatchOptions"
    UPDATE = "UpdateOptions"
    CALL = "CallOptions"
    FOUND = "nobody: the engine finds the value itself"
    NEUTRAL = "nobody: only the value that changes nothing is accepted"


# Name -> who reads it.
OPTIONS: dict[str, Read] = {
    "temperature": Read.BATCH,
    "calculate_entropy": Read.BATCH,
    "calculate_sum_pi_squared": Read.BATCH,
    "use_remove_padding": Read.BATCH,
    "share_prompts": Read.BATCH,
    "use_dynamic_bsz": Read.BATCH,
    "max_token_len_per_gpu": Read.BATCH,
    "micro_batch_size_per_gpu": Read.BATCH,
    "mini_batch_size": Read.UPDATE,
    "num_mini_batch": Read.UPDATE,
    "epochs": Read.UPDATE,
    "seed": Read.UPDATE,
    "dataloader_kwargs": Read.UPDATE,
    "return_model_output": Read.UPDATE,
    "nonfinite_dump_folder": Read.UPDATE,
    "global_steps": Read.UPDATE,
    "compute_loss": Read.CALL,
    "no_lora_adapter": Read.CALL,
    "disable_auto_offload": Read.CALL,
    "update_lr_scheduler": Read.CALL,
    # The nominal number of rows would count padding rows; rows with tokens are counted instead.
    "global_batch_size": Read.FOUND,
    "batch_num_tokens": Read.FOUND,
    "global_token_num": Read.FOUND,
    "dp_size": Read.FOUND,
    "sp_size": Read.FOUND,
    # Widths and fill values: no result depends on what stands behind a row.
    "max_response_len": Read.FOUND,
    "pad_token_id": Read.FOUND,
    # A property of the engine: model.use_fused_kernels.
    "use_fused_kernels": Read.FOUND,
    "pad_mode": Read.NEUTRAL,
    "force_group_size": Read.NEUTRAL,
    "images_seqlens": Read.NEUTRAL,
    "distillation_use_topk": Read.NEUTRAL,
    "distillation_only": Read.NEUTRAL,
    "enable_routing_replay": Read.NEUTRAL,
}
# Names of the reference's earlier workers -> those of today.
OLD_NAMES = {
    "micro_batch_size": "micro_batch_size_per_gpu",
    "max_token_len": "max_token_len_per_gpu",
    "is_lora": "no_lora_adapter",
}
# Values of NEUTRAL options that ask for nothing, beside None; and what to do about the others.
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "pad_mode": (("no_padding",), "rows are jagged; pad them in the forward with use_remove_padding=False"),
    "force_group_size": ((1,), "rows of one prompt are kept together by share_prompts=True"),
    "images_seqlens": (([],), "this engine trains text models"),
    "distillation_use_topk": ((False,), "this engine has no distillation outputs"),
    "distillation_only": ((False,), "this engine has no distillation outputs"),
    "enable_routing_replay": ((False,), "this engine does not replay routing decisions"),
}


def read_names(data: TensorDict) -> TensorDict:
    """A copy of a batch under the names of `OPTIONS`, without those that nobody reads.

    Raises:
        ContractError: an option asks for something that is not there, or stands under its old and its new name.
    """
    data = data.copy()
    for old, name in OLD_NAMES.items():
        if (value := tu.pop(data, old)) is None:
            continue
        if name in data.keys():
            raise ContractError(f"the batch has {old} and {name}, two names of one option; leave the first out")
        tu.assign_non_tensor_whole(data, {name: value})
    for name, reader in OPTIONS.items():
        if reader is Read.NEUTRAL:
            _check_neutral(name, tu.pop(data, name))
        elif reader is Read.FOUND:
            tu.pop(data, name)
    return data


def _check_neutral(name: str, value: Any) -> None:
    neutral, advice = _NEUTRAL[name]
    if isinstance(value, enum.Enum):
        value = value.value
    if value is not None and value not in neutral:
        raise ContractError(f"{name}={value!r} is not implemented by this engine: {advice}")


@dataclass(frozen=True)
class BatchOptions:
    """What one forward asks of the engine. Entries of the batch win over the engine's defaults.

    Attributes:
        temperature: T of softmax(logits / T): one number, or [rows].
        calculate_entropy: also return entropies.
        calculate_sum_pi_squared: also return the sum of squared probabilities of each token's distribution.
        use_remove_padding: pack rows instead of padding them.
        share_prompts: run a prompt that several rows of a micro-batch share once.
        use_dynamic_bsz: cut by `max_token_len_per_gpu` tokens instead of `micro_batch_size_per_gpu` rows.
    """

    temperature: float | Tensor = 1.0
    calculate_entropy: bool = False
    calculate_sum_pi_squared: bool = False
    use_remove_padding: bool = True
    share_prompts: bool = False
    use_dynamic_bsz: bool = True
    max_token_len_per_gpu: int | None = None
    micro_batch_size_per_gpu: int | None = None

    @classmethod
    def from_batch(cls, data: TensorDict, defaults: Mapping[str, Any]) -> BatchOptions:
        """Read the options of a batch.

        Raises:
            ContractError: a temperature <= 0 (greedy rollouts have no distribution to train on), a missing size, or an
                option of the reference that this engine does not have.
        """
        for name, reader in OPTIONS.items():
            if reader is Read.NEUTRAL:
                _check_neutral(name, tu.get(data, name))
        values = {f.name: defaults[f.name] for f in fields(cls) if defaults.get(f.name) is not None}
        for f in fields(cls):
            given = tu.get(data, f.name)
            if given is not None:
                values[f.name] = given
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        lowest = float(self.temperature.min()) if isinstance(self.temperature, Tensor) else self.temperature
        if not lowest > 0:
            raise ContractError(
                f"temperature={lowest} has no distribution to take log-probs of; sample training rollouts with "
                "actor_rollout_ref.rollout.temperature > 0"
            )
        size = self.max_token_len_per_gpu if self.use_dynamic_bsz else self.micro_batch_size_per_gpu
        if size is None or size < 1:
            key = "max_token_len_per_gpu" if self.use_dynamic_bsz else "micro_batch_size_per_gpu"
            raise ContractError(
                f"use_dynamic_bsz={self.use_dynamic_bsz} needs {key}, got {size}; set the actor's "
                "ppo_max_token_len_per_gpu or ppo_micro_batch_size_per_gpu (log_prob_* for inference)"
            )


def batch_defaults(engine_config: Any, device_type: str, forward_only: bool) -> dict[str, Any]:
    """`BatchOptions` that a batch does not bring itself, from the `FSDPEngineConfig`."""
    tokens, rows = engine_config.max_token_len_per_gpu, engine_config.micro_batch_size_per_gpu
    if forward_only:
        tokens = engine_config.infer_max_token_len_per_gpu or tokens
        rows = engine_config.infer_micro_batch_size_per_gpu or rows
    # On a CPU matrix products are everything, and a group of n responses repeats its prompt n times; on a GPU long rows
    # are better served by a variable-length attention kernel, which knows no shared prompts.
    share = engine_config.share_prompts
    return {
        "share_prompts": device_type == "cpu" if share is None else bool(share),
        "use_remove_padding": engine_config.use_remove_padding,
        "use_dynamic_bsz": engine_config.use_dynamic_bsz,
        "max_token_len_per_gpu": tokens,
        "micro_batch_size_per_gpu": rows,
    }


@dataclass(frozen=True)
class CallOptions:
    """How one call of a worker runs.

    Attributes:
        compute_loss: evaluate the loss in an inference; None: when there is a loss function.
        no_lora_adapter: run without the adapter.
        disable_auto_offload: leave weights and optimizer state where they are.
        update_lr_scheduler: advance the schedule after the call; None: as the call does by itself.
    """

    compute_loss: bool | None = None
    no_lora_adapter: bool = False
    disable_auto_offload: bool = False
    update_lr_scheduler: bool | None = None

    @classmethod
    def pop_from(cls, data: TensorDict) -> CallOptions:
        """Take the options out of a batch."""
        return cls(**_popped(cls, data))


@dataclass(frozen=True)
class UpdateOptions:
    """How `train_mini_batch` goes over its rows; sizes count rows on all ranks together.

    `nonfinite_dump_folder`: where the mini-batch of a gradient that is not finite is written (None: nowhere), with the
    number of the event behind the name; `global_steps`: the step that it belongs to.
    """

    mini_batch_size: int | None = None
    num_mini_batch: int | None = None
    epochs: int = 1
    seed: int = 42
    dataloader_kwargs: dict[str, Any] = field(default_factory=dict)
    return_model_output: bool = False
    nonfinite_dump_folder: str | None = None
    global_steps: int | None = None

    @classmethod
    def pop_from(cls, data: TensorDict) -> UpdateOptions:
        """Take the options out of a batch."""
        return cls(**_popped(cls, data))

    def rows_per_rank(self, rows: int, dp_size: int) -> int:
        """Rows of a mini-batch on one rank that holds `rows`.

        Raises:
            ContractError: neither size is given, or it does not divide.
        """
        if self.mini_batch_size is not None:
            size, rest = divmod(self.mini_batch_size, dp_size)
            if rest or size < 1 or rows % size:
                raise ContractError(
                    f"mini_batch_size={self.mini_batch_size} rows over {dp_size} ranks does not divide {rows} rows a "
                    "rank; ppo_mini_batch_size x rollout.n must be a multiple of the ranks and divide the batch"
                )
            return size
        if self.num_mini_batch is None:
            raise ContractError("train_mini_batch needs mini_batch_size or num_mini_batch")
        size, rest = divmod(rows, self.num_mini_batch)
        if rest or size < 1:
            raise ContractError(f"{rows} rows a rank do not split into num_mini_batch={self.num_mini_batch}")
        return size


def _popped(cls: Any, data: TensorDict) -> dict[str, Any]:
    found = {f.name: tu.pop(data, f.name) for f in fields(cls)}
    return {name: value for name, value in found.items() if value is not None}
