"""`python -m rlflow.trainer.main_generation_server`: answering a file of prompts. not in this version."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlflow.trainer.not_built import refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Say so. Returns the exit code."""
    return refuse(
        "answering a file of prompts",
        "generation",
        "rlflow.trainer.main_ppo with trainer.val_only=true and trainer.validation_data_dir=FOLDER",
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
