"""`python -m rlflow.model_merger {merge,test}`: the options that verl's merger has, for our checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlflow.utils.errors import ConfigError, RlflowError


def build_parser() -> argparse.ArgumentParser:
    """The command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="python -m rlflow.model_merger", description="Turn a worker's checkpoint into a Hugging Face folder."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser("merge", help="write a model folder")
    _common(merge)
    merge.add_argument("--target_dir", required=True, help="folder to create")
    merge.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default %(default)s")
    merge.add_argument("--overwrite", action="store_true", help="replace a model folder that is there already")
    merge.add_argument("--verify", action="store_true", help="load the result and compare logits")
    merge.add_argument("--hf_upload_path", default=None, metavar="ID", help="upload to this repository of the hub")
    merge.add_argument("--private", action="store_true", help="create that repository as a private one")
    test = commands.add_parser("test", help="compare a model folder with the checkpoint, tensor by tensor")
    _common(test)
    test.add_argument("--test_hf_dir", required=True, help="the model folder to compare with")
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="fsdp", help="engine that wrote the checkpoint: fsdp (default)")
    parser.add_argument("--local_dir", required=True, help="folder of a role: RUN/global_step_N/actor or .../critic")
    parser.add_argument(
        "--tie-word-embedding",
        action="store_true",
        help="one weight for input embedding and output head; refused when they differ",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="allow model code from the checkpoint")
    parser.add_argument(
        "--is-value-model", action="store_true", help="it is a value model (default: what the checkpoint says)"
    )
    parser.add_argument(
        "--use_cpu_initialization", action="store_true", help="accepted and without effect: no model is initialised"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done; 1 checkpoint or disk are at fault, or a comparison failed; 2 the options cannot work."""
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except ConfigError as error:
        _say(f"error: {error}")
        return 2
    except RlflowError as error:
        _say(f"error: {error}")
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.backend not in ("fsdp", "fsdp2"):
        known = "megatron" if args.backend == "megatron" else "that engine"
        raise ConfigError(
            f"--backend {args.backend}: {known} is not in this version, so there are no checkpoints of it to merge. "
            "Use --backend fsdp"
        )
    from rlflow.model_merger.commands import compare_command, merge_command
    from rlflow.model_merger.merge import MergeOptions

    options = MergeOptions(
        dtype=getattr(args, "dtype", "bfloat16"),
        overwrite=getattr(args, "overwrite", False),
        value_model=True if args.is_value_model else None,
        tie_word_embedding=args.tie_word_embedding,
        trust_remote_code=args.trust_remote_code,
    )
    folder = Path(args.local_dir)
    if not folder.is_dir():
        raise ConfigError(f"--local_dir {folder} is no folder; name the folder of a role, RUN/global_step_N/actor")
    if args.command == "test":
        return compare_command(folder, Path(args.test_hf_dir), options)
    return merge_command(
        folder,
        Path(args.target_dir),
        options,
        check=args.verify,
        upload_to=args.hf_upload_path,
        private=args.private,
    )


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
