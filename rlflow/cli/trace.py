"""`rlflow trace KEY --run DIR`: the life of one trajectory, or of a whole group."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "trace",
        help="the life of one trajectory or group of a run",
        description="Shows what happened to a trajectory: its states, who wrote its fields and who reads them next, "
        "its group, and its text token by token. Works while the run goes on.",
        epilog="example: rlflow trace e0r3a0_1_0 --run checkpoints/my_project/my_run",
    )
    parser.add_argument("key", metavar="KEY", help="{uid}_{session}_{index}, or a uid for its whole group")
    parser.add_argument("--run", metavar="DIR", default=".", dest="folder", help="the run folder (default: this one)")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object on stdout")
    parser.add_argument("--no-tokens", action="store_true", help="leave out the table of tokens")
    parser.add_argument("--width", type=int, metavar="N", help="columns to use (default: the terminal's)")


def run(args: argparse.Namespace) -> int:
    """Print the trace."""
    from rlflow.observe.records import RunFolder
    from rlflow.observe.trace import trace_key, trace_to_json

    trace = trace_key(RunFolder(args.folder), args.key)
    if args.json:
        # ASCII: lone surrogates of a model's text survive, whatever the terminal's encoding is.
        sys.stdout.write(json.dumps(trace_to_json(trace), indent=2, default=str) + "\n")
        return 0
    from rich.console import Console

    from rlflow.observe.trace_text import render_trace

    render_trace(
        trace, Console(width=args.width, highlight=False, markup=False, emoji=False), tokens=not args.no_tokens
    )
    return 0
