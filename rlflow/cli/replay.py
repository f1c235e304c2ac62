"""`rlflow replay DUMP`: where a gradient that was not finite came from."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.workers.nonfinite.dump import DumpInfo
    from rlflow.workers.nonfinite.replay import Finding


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="where a gradient that was not finite came from",
        description="Computes the gradient of a dumped mini-batch again, in this process, and names the rows, the "
        "first module and the first parameter with values that are not finite. The weights are those of the newest "
        "whole checkpoint before the step, else the model's. Replay only dumps of your own runs: the model code that "
        "they name is loaded.",
        epilog="example: rlflow replay checkpoints/my_project/my_run/nonfinite/step_12_actor",
    )
    parser.add_argument("dump", metavar="DUMP", type=Path, help="a folder with dump.json")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="a global_step_N folder with the weights to use")
    parser.add_argument("--model", metavar="DIR", help="the model's folder, if it moved")
    parser.add_argument("--json", action="store_true", help="everything as one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Replay. Returns 0 when the gradient is not finite here either, else 1.

    Raises:
        CheckpointError: no complete dump, or no checkpoint at the given place.
        ConfigError: the dump cannot be replayed.
    """
    from rlflow.workers.nonfinite.dump import read_dump
    from rlflow.workers.nonfinite.replay import build_engine, replay

    info, data, places = read_dump(args.dump)
    weights = find_weights(args.dump, info, args.checkpoint)
    engine = build_engine(info, model=args.model, checkpoint=weights)
    finding = replay(engine, info, data, places)
    source = str(weights or args.model or info.model["path"])
    if args.json:
        facts = dataclasses.asdict(finding) | {"weights": source, "reproduced": finding.reproduced}
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(describe(info, finding, source)) + "\n")
    return 0 if finding.reproduced else 1


def find_weights(dump: Path, info: DumpInfo, checkpoint: Path | None) -> Path | None:
    """The role's folder in the given checkpoint, else in the newest whole one before the dump's step; None without one.

    Raises:
        CheckpointError: the given folder holds no part of this role.
    """
    from rlflow.checkpoint import checkpoint_step, list_checkpoints, verify_manifest
    from rlflow.utils.errors import CheckpointError

    role = "critic" if info.model_type == "value_model" else "actor"
    if checkpoint is not None:
        folder = checkpoint if (checkpoint / "meta.json").is_file() else checkpoint / role
        if not (folder / "meta.json").is_file():
            raise CheckpointError(f"--checkpoint {checkpoint} holds no {role} of a run")
        return folder
    for folder in list_checkpoints(dump.resolve().parent.parent):
        before = info.global_step is None or checkpoint_step(folder) < info.global_step
        if before and (folder / role / "model").is_dir() and not verify_manifest(folder):
            return folder / role
    return None


def describe(info: DumpInfo, finding: Finding, source: str) -> list[str]:
    """The report, line by line."""
    same = "the same as the dump's" if finding.same_weights else f"NOT the dump's ({info.weights_norm:.6g})"
    lines = [
        f"gradient norm    {finding.grad_norm} here, {info.grad_norm} in the run",
        f"weights          {source}; norm {finding.weights_norm:.6g}, {same}",
    ]
    if finding.nonfinite_weights:
        lines.append(f"bad weights      {_some(finding.nonfinite_weights)}")
    for name, places in finding.fields.items():
        lines.append(f"bad field        {name}: {_some([_place(place) for place in places])}")
    if not finding.reproduced:
        lines.append("not reproduced   with these weights the gradient is finite; try the checkpoint of another step")
        return lines
    for rows in finding.rows:
        together = " (only together)" if len(rows) > 1 else ""
        lines.append(f"rows             {_some([_place(place) for place in rows])}{together}")
    if finding.module is not None:
        lines.append(f"first module     {finding.module}: its output is not finite")
    elif not finding.loss_finite:
        lines.append("first module     none: the model's outputs are finite, the loss of them is not")
    else:
        lines.append("first module     none: outputs and loss are finite, the backward is not")
    bad, total = finding.parameters
    lines.append(f"first parameter  {finding.parameter} ({bad} of {total} have a gradient that is not finite)")
    return lines


def _place(place: tuple[int, int]) -> str:
    return f"row {place[1]} of rank {place[0]}"


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
