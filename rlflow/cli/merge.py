"""`rlflow merge RUN --out DIR`: a checkpoint as a folder that transformers loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "merge",
        help="a checkpoint as a folder that transformers loads",
        description="Joins the shards of a checkpoint, whatever number of processes wrote them, into a Hugging Face "
        "folder with config and tokenizer. The checkpoint's manifest is verified first; the folder appears whole or "
        "not at all.",
        epilog="example: rlflow merge checkpoints/my_project/my_run --step best --out my_model --verify",
    )
    parser.add_argument("path", metavar="PATH", help="a run folder, a global_step_N in it, or an actor folder in that")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder to write")
    parser.add_argument(
        "--step", metavar="STEP", default=None, help="of a run folder: a number, best or latest (the default)"
    )
    parser.add_argument("--role", choices=("actor", "critic"), default="actor", help="which model (default actor)")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (default %(default)s)"
    )
    parser.add_argument("--verify", action="store_true", help="load the result and compare its logits with the shards'")
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder that is there already")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow model code from the checkpoint")


def run(args: argparse.Namespace) -> int:
    """Merge. Returns 0; 1 when the checkpoint is damaged, the disk refuses or the verification fails.

    Raises:
        ConfigError: the path, the step or the target cannot be used.
    """
    from rlflow.model_merger.commands import merge_command
    from rlflow.model_merger.merge import MergeOptions
    from rlflow.model_merger.source import locate
    from rlflow.utils.errors import CheckpointError

    folder = locate(args.path, args.step, args.role)
    options = MergeOptions(dtype=args.dtype, overwrite=args.overwrite, trust_remote_code=args.trust_remote_code)
    try:
        return merge_command(folder, Path(args.out), options, check=args.verify)
    except CheckpointError as error:
        sys.stderr.write(f"rlflow merge: {error}\n")
        return 1
