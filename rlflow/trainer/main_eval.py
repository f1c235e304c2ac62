"""`python -m rlflow.trainer.main_eval`: scoring a file of answers. not in this version."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlflow.trainer.not_built import refuse


def main(arguments: Sequence[str] | None = None) -> int:
    """Say so. Returns the exit code."""
    return refuse(
        "scoring a file of answers",
        "evaluation",
        "rlflow.trainer.main_ppo with trainer.val_only=true samples and scores data.val_files",
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())
