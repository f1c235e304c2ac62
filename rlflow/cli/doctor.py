"""`rlflow doctor`: whether this machine can run, and one line to repair what it cannot."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

_SIGNS = {"ok": "ok   ", "note": "note ", "bad": "BAD  "}


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="whether this machine can run",
        description="Looks at everything a run needs on this machine. Exit code 0: a run can start; 1: it cannot, and "
        "each line that begins with BAD says what to do. docs/doctor.md explains the checks.",
        epilog="example: rlflow doctor --engines vllm",
    )
    parser.add_argument("--json", action="store_true", help="all findings as one JSON object on stdout")
    parser.add_argument("--folder", metavar="DIR", default=".", help="where runs will be written (default: here)")
    parser.add_argument(
        "--engines",
        metavar="NAMES",
        default="",
        help="rollout engines that must work, with commas, such as vllm (others are only looked for)",
    )
    parser.add_argument("--timeout", type=float, metavar="S", default=60.0, help="seconds for an import (default: 60)")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 1 when one of them stops a run."""
    from rlflow.observe.doctor import examine
    from rlflow.utils.redact import redact

    wanted = tuple(name.strip() for name in args.engines.split(",") if name.strip())
    findings = examine(args.folder, wanted, args.timeout)
    can_start = not any(finding.state == "bad" for finding in findings)
    if args.json:
        plain = {"can_start": can_start, "findings": [dataclasses.asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(redact(plain), indent=2) + "\n")
        return 0 if can_start else 1
    area = ""
    for finding in findings:
        if finding.area != area:
            area = finding.area
            sys.stdout.write(f"{area}\n")
        sys.stdout.write(redact(f"  {_SIGNS[finding.state]} {finding.what}\n"))
        if finding.fix:
            sys.stdout.write(redact(f"        do: {finding.fix}\n"))
    sys.stdout.write("a run can start\n" if can_start else "a run cannot start\n")
    return 0 if can_start else 1
