"""Switches of the libraries that make equal calls give equal bits (`rollout.full_determinism`).

Two parts: environment variables, which a process must find when it starts, and torch's own switches. Importing this
module imports no torch.
"""

from __future__ import annotations

import os
import random

DETERMINISM_ENV = "RLFLOW_FULL_DETERMINISM"


def determinism_environment(seed: int) -> dict[str, str]:
    """Environment of every process of a deterministic run; thread counts are `device.thread_environment`'s part."""
    return {
        DETERMINISM_ENV: "1",
        "VLLM_BATCH_INVARIANT": "1",
        "PYTHONHASHSEED": str(seed % 2**32),
        # One code path of MKL whatever the alignment of its arguments, and no thread count chosen by load.
        "MKL_CBWR": "AUTO",
        "MKL_DYNAMIC": "FALSE",
        "OMP_DYNAMIC": "FALSE",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "FLASH_ATTENTION_DETERMINISTIC": "1",
    }


def is_full_determinism() -> bool:
    """Whether this process belongs to a deterministic run."""
    value = os.environ.get(DETERMINISM_ENV) or os.environ.get("VERL_FULL_DETERMINISM") or "0"
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def determinism_seed() -> int:
    """The seed of a deterministic run: that of Python's hashes in its processes."""
    value = os.environ.get("PYTHONHASHSEED", "")
    return int(value) if value.isdigit() else 0


def enable_full_determinism(seed: int) -> None:
    """Seed the generators of this process and let torch choose deterministic algorithms where it has them.

    An operation without one warns and runs. The environment is completed for libraries that read it late; for MKL and
    Python's hashes it must have been set before the process started.
    """
    import numpy as np
    import torch

    from rlflow.utils.device import manual_seed_all

    for name, value in determinism_environment(seed).items():
        os.environ.setdefault(name, value)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    manual_seed_all(seed)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # It would write all memory that torch allocates, and nothing of ours reads memory it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
