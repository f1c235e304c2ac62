"""SGLang's scheduler process on a CPU, with one addition: a request's seed decides its tokens.

SGLang reads a request's `sampling_seed` only in its deterministic mode, which needs GPU kernels. Its PyTorch sampler
uses seeds in every mode once a batch has them, so that is all that is added. The noise of a token is a function of
the seed and the position, hence of nothing that runs beside it.
"""

from __future__ import annotations

from typing import Any

import torch


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    """What `sglang.Engine` starts instead of its own scheduler's entry point."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    give_batches_seeds()
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
