"""What the command lines do: `python -m rlflow.model_merger` and `rlflow merge` differ in their options only."""

from __future__ import annotations

import sys
from pathlib import Path

from rlflow.model_merger.compare import compare
from rlflow.model_merger.hub import check_token, upload
from rlflow.model_merger.merge import MergeOptions, merge
from rlflow.model_merger.verify import verify

SHOWN = 20


def merge_command(
    folder: Path,
    target: Path,
    options: MergeOptions,
    *,
    check: bool = False,
    upload_to: str | None = None,
    private: bool = False,
) -> int:
    """Merge; with `check` compare logits; with `upload_to` upload. Returns 1 when the comparison failed, else 0.

    Raises:
        RlflowError: see `merge`, `verify` and `upload`.
    """
    _quiet_transformers()
    if upload_to:
        check_token()
    result = merge(folder, target, options)
    _say(str(result))
    if check:
        verification = verify(folder, result.target, options)
        _say(str(verification))
        if not verification.passed:
            return 1
    if upload_to:
        _say(f"uploaded to {upload(result.target, upload_to, private=private)}")
    return 0


def compare_command(folder: Path, hf_folder: Path, options: MergeOptions) -> int:
    """Compare tensor by tensor and say what differs. Returns 1 when something does."""
    _quiet_transformers()
    problems = compare(folder, hf_folder, options)
    for problem in problems[:SHOWN]:
        _say(problem)
    if len(problems) > SHOWN:
        _say(f"... and {len(problems) - SHOWN} more")
    _say(f"{hf_folder} and {folder} {'differ' if problems else 'hold the same weights'}")
    return 1 if problems else 0


def _quiet_transformers() -> None:
    """No progress bars of loading between our lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
