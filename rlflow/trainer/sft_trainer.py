"""`python -m rlflow.trainer.sft_trainer`: supervised fine-tuning. not in this version."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlflow.trainer.not_built import refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Say so. Returns the exit code."""
    return refuse(
        "supervised fine-tuning",
        "sft_trainer",
        "another trainer for it; its model folder goes into actor_rollout_ref.model.path",
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
