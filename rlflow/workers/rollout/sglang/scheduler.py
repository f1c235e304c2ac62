"""SGLang's scheduler process on a CPU, with one addition: a request's seed decides its tokens.

SGLang reads a request's `sampling_seed` only in its deterministic mode, which needs GPU kernels. Its PyTorch sampler
uses seeds in every mode once a batch has them, so that is what is added, with the hash its sampler makes noise of. The
noise of a token is a function of seed, position and token id, hence of nothing that runs beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_LIBRARY: list[torch.library.Library] = []  # a torch library forgets its operators when it is collected


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What `sglang.Engine` starts instead of its own scheduler's entry point."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    give_batches_seeds()
    provide_hash()
    return run_scheduler_process(*args, **kwargs)


def give_batches_seeds() -> None:
    """Let every new sampling batch carry the seeds of its requests."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    build = SamplingBatchInfo.from_schedule_batch.__func__

    def with_seeds(cls: Any, batch: Any, vocab_size: int, *args: Any, **kwargs: Any) -> Any:
        info = build(cls, batch, vocab_size, *args, **kwargs)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)


def provide_hash() -> None:
    """Define the one operator of `sgl_kernel` that the seeded sampler calls on a CPU, unless a real build has it."""
    if _LIBRARY or hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    _LIBRARY.append(library)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bits, A. Appleby) of (seed, position, column); seed [n] 64 bits, positions [n], columns [m].

    Returns uint32 [n, m].
    """
    seeds = seed.view(torch.int64).numpy().view(np.uint64)
    state = np.zeros(len(seeds), dtype=np.uint32)
    for block in (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32), positions.numpy()):
        state = _mix(state, block.astype(np.uint32))
    table = _mix(state[:, None], columns.numpy().astype(np.uint32)[None, :])
    table ^= np.uint32(16)  # bytes hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        table ^= table >> np.uint32(shift)
        table *= np.uint32(factor)
    table ^= table >> np.uint32(16)
    return torch.from_numpy(table)


def _mix(state: np.ndarray, block: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = _rotate(block * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate(state ^ mixed, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotate(value: np.ndarray, bits: int) -> np.ndarray:
    rotated: np.ndarray = (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))
    return rotated
