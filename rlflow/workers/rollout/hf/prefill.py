"""Prompts of new requests into the cache: one forward for each distinct prompt, copies for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rlflow.workers.rollout.hf.admission import Admission
from rlflow.workers.rollout.hf.batch import Batch, Request
from rlflow.workers.rollout.hf.kv_cache import PrefillStep, SlotKVCache
from rlflow.workers.rollout.hf.model import ServedModel

# A new request, and one that holds (or is about to hold) the same prompt in the cache, if there is one.
Admitted = tuple[Request, Request | None]


def admit(batch: Batch, waiting: Admission) -> list[Admitted]:
    """Move requests from the queue to free slots."""
    admitted: list[Admitted] = []
    while len(batch) < batch.slots and waiting.ready(len(batch)):
        request = waiting.next()
        admitted.append((request, batch.holder(request.prefix_key)))
        batch.add(request)
    return admitted


def prefill(
    model: ServedModel, cache: SlotKVCache, admitted: Sequence[Admitted], tokens_at_once: int
) -> tuple[int, int]:
    """Fill the slots of new requests. Returns the tokens that were computed and those that were copied."""
    admitted = [(request, holder) for request, holder in admitted if request.prefix_length > 0]
    computed = copied = 0
    for chunk in _chunks([request for request, holder in admitted if holder is None], tokens_at_once):
        step = PrefillStep(cache, [r.slot for r in chunk], [r.prefix_length for r in chunk])
        ids = np.concatenate([np.asarray(r.prompt_ids[:-1], dtype=np.int64) for r in chunk])
        model.prefill(
            torch.from_numpy(ids)[None].to(model.device), torch.from_numpy(step.positions)[None].to(model.device), step
        )
        computed += len(ids)
    by_source: dict[int, tuple[int, list[int]]] = {}
    for request, holder in admitted:
        if holder is not None:
            by_source.setdefault(holder.slot, (holder.prefix_length, []))[1].append(request.slot)
            copied += request.prefix_length
    for slot, (length, targets) in by_source.items():
        cache.copy(slot, targets, length)
    return computed, copied


def _chunks(requests: Sequence[Request], tokens_at_once: int) -> Iterator[list[Request]]:
    """By length, so that equal lengths meet; at least one prompt each."""
    chunk: list[Request] = []
    tokens = 0
    for request in sorted(requests, key=lambda r: r.prefix_length):
        if chunk and tokens + request.prefix_length > tokens_at_once:
            yield chunk
            chunk, tokens = [], 0
        chunk.append(request)
        tokens += request.prefix_length
    if chunk:
        yield chunk
