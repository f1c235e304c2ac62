"""`rlflow plan key=value ...`: what a run would do, before anything starts."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="what a command line would do",
        description="Checks a command line of the main job and prints what follows from it, without Ray and without "
        "loading a model. `python -m rlflow.trainer.main_ppo ... --plan` prints the same. docs/reading_the_plan.md "
        "explains the numbers.",
        epilog="example: rlflow plan actor_rollout_ref.rollout.name=hf algorithm.adv_estimator=grpo",
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object on stdout")
    parser.add_argument("overrides", metavar="key=value", nargs=argparse.REMAINDER, help="as for the main job")


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 2 when the configuration cannot work."""
    from rlflow.trainer.plan.command import print_plan

    return print_plan(args.overrides, as_json=args.json)
