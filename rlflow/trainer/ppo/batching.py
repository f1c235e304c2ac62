"""Pad a batch to the row count the workers need, and order it so that every rank has equal work.

Invariant: padding rows weigh nothing: their response mask is 0, they have a group of their own, and they are left out
of data metrics (tag `is_padding`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.replay_buffer import uid_of
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.utils.seqlen_balancing import (
    LINEAR_WORK_PER_TOKEN,
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    partition_keeping_groups,
)


def required_multiple(dp_size: int, *mini_batch_rows: int) -> int:
    """Rows must split over the ranks and into whole mini-batches of every model that is updated."""
    return math.lcm(dp_size, *mini_batch_rows)


def padding_row(eos_token_id: int, uid: str, number: int) -> dict[str, Any]:
    """One row of 1 prompt token and 1 response token that no stage counts."""
    zero = torch.zeros(1, dtype=torch.int64)
    token = torch.full((1,), eos_token_id, dtype=torch.int64)
    return {
        "prompts": token,
        "responses": token,
        "input_ids": torch.cat([token, token]),
        "position_ids": torch.arange(2),
        "response_mask": zero,
        "loss_mask": zero,
        "rollout_log_probs": torch.zeros(1),
        "rm_scores": torch.zeros(1),
        "uid": uid,
        "session_id": number,
        "num_turns": 0,
    }


def partition_of(batch: KVBatchMeta) -> str:
    """The partition of a batch; a batch of the trainer always has one."""
    if batch.partition_id is None:
        raise ContractError(f"a batch of {len(batch)} rows names no partition")
    return batch.partition_id


def pad_batch(batch: KVBatchMeta, multiple: int, eos_token_id: int, step: int) -> KVBatchMeta:
    """Append padding rows until the row count is a multiple; they are written to the batch's partition."""
    missing = -len(batch) % multiple
    if missing == 0:
        return batch
    uid = f"pad{step}"
    keys = [f"{uid}_{number}_0" for number in range(missing)]
    tag = {**batch.tags[0], "is_padding": True, "prompt_len": 1, "response_len": 1, "seq_len": 2}
    rows = [padding_row(eos_token_id, uid, number) for number in range(missing)]
    tq.kv_batch_put(keys, partition_of(batch), fields=tu.list_of_dict_to_tensordict(rows), tags=[tag] * missing)
    return KVBatchMeta(
        keys=[*batch.keys, *keys],
        tags=[*batch.tags, *[tag] * missing],
        partition_id=batch.partition_id,
        fields=batch.fields,
        extra_info=batch.extra_info,
    )


def order_rows(
    batch: KVBatchMeta, trainer: Any, dp_size: int, metrics: dict[str, Any], *, linear_work: int = LINEAR_WORK_PER_TOKEN
) -> KVBatchMeta:
    """The batch as the ranks get it, by `trainer.balance_batch` (false: as it came) and `balance_keep_groups`."""
    if not trainer.balance_batch:
        return batch
    return balance(batch, dp_size, metrics, linear_work=linear_work, keep_groups=trainer.balance_keep_groups)


def balance(
    batch: KVBatchMeta,
    dp_size: int,
    metrics: dict[str, Any],
    *,
    linear_work: int = LINEAR_WORK_PER_TOKEN,
    keep_groups: bool = False,
) -> KVBatchMeta:
    """Reorder rows so that the contiguous block of each rank has the same number of rows and equal work.

    Args:
        batch: its row count is a multiple of `dp_size`; tags hold `seq_len`.
        dp_size: ranks.
        metrics: gets `global_seqlen/*`.
        linear_work: work of a token in units of one attention pair.
        keep_groups: rows of one prompt go to one rank, as far as equal row counts allow it.
    """
    lengths = [int(tag["seq_len"]) for tag in batch.tags]
    workload = calculate_workload(torch.tensor(lengths, dtype=torch.int64), linear_work).tolist()
    if keep_groups:
        # Padding rows have nothing in common: each may fill a gap of its own.
        padding = [bool(tag.get("is_padding")) for tag in batch.tags]
        uids = [key if pad else uid_of(key) for key, pad in zip(batch.keys, padding, strict=True)]
        partitions = partition_keeping_groups(workload, uids, dp_size)
    else:
        partitions = get_seqlen_balanced_partitions(workload, dp_size, equal_size=True)
    metrics.update(log_seqlen_unbalance(lengths, partitions, "global_seqlen"))
    batch.reorder([index for part in partitions for index in part])
    return batch


def real_rows(batch: KVBatchMeta) -> list[int]:
    """Positions of the rows that are not padding."""
    return [position for position, tag in enumerate(batch.tags) if not tag.get("is_padding")]
