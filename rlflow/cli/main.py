"""Entry of the console script `rlflow`.

A subcommand is a module with `add_parser(subparsers)` and `run(args) -> int`. Only the module that the command line
names is imported, so that one tool's dependencies cost the others nothing.

Exit codes: 0 done, 1 the work failed, 2 the input cannot be used (one line on stderr says why).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from rlflow.utils.errors import RlflowError

# name -> (module, one line for `rlflow --help`), in the order of the help.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("rlflow.cli.plan", "what a command line would do"),
    "doctor": ("rlflow.cli.doctor", "whether this machine can run"),
    "config": ("rlflow.cli.config", "explain a key, show the resolved tree"),
    "trace": ("rlflow.cli.trace", "the life of one trajectory or group of a run"),
    "view": ("rlflow.cli.view", "a run as static web pages that open from disk"),
    "merge": ("rlflow.cli.merge", "a checkpoint as a folder that transformers loads"),
    "replay": ("rlflow.cli.replay", "where a gradient that was not finite came from"),
}
BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(next((text for text in arguments if not text.startswith("-")), None))
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help()
        return BAD_INPUT
    try:
        return int(args.run(args))
    except RlflowError as error:
        sys.stderr.write(f"rlflow {args.command}: {error}\n")
        return BAD_INPUT
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser; only the subcommand `command` has its options, the others are names for the help."""
    parser = _Parser(prog="rlflow", description="Tools around runs of rlflow.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, summary) in available().items():
        if name == command:
            loaded = importlib.import_module(module)
            loaded.add_parser(subparsers)
            subparsers.choices[name].set_defaults(run=loaded.run)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


def available() -> dict[str, tuple[str, str]]:
    """The subcommands whose modules this installation has."""
    return {name: entry for name, entry in COMMANDS.items() if importlib.util.find_spec(entry[0]) is not None}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        import rlflow

        parser.exit(message=f"rlflow {rlflow.__version__}\n")


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with what was probably meant."""

    def error(self, message: str) -> None:  # type: ignore[override]
        if self.prog == "rlflow" and "invalid choice" in message:
            wrong = message.split("'")[1] if "'" in message else ""
            near = difflib.get_close_matches(wrong, list(COMMANDS), n=1)
            names = ", ".join(available())
            message = f"no command {wrong!r}; " + (f"did you mean {near[0]}?" if near else f"there is {names}")
        self.exit(BAD_INPUT, f"{self.prog}: {message} ({self.prog} --help)\n")
