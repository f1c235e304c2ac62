"""What the preprocess scripts share: the row schema, writing parquet whole or not at all, one-line errors."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Something the user can fix; shown as one line."""


def make_row(
    data_source: str, prompt: str, ability: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, Any]:
    """A row of one user message with a rule-based reward."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def add_output_arguments(parser: argparse.ArgumentParser, default_dir: str) -> None:
    parser.add_argument("--local_save_dir", default=None, help=f"folder for the parquet files (default {default_dir})")
    parser.add_argument("--local_dir", default=None, help="old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", default=None, help="also copy the files there, with the `hdfs` command")
    parser.set_defaults(default_dir=default_dir)


def write_splits(splits: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> Path:
    """Write `{split}.parquet` for each split; the folder they are in."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if args.local_dir is not None:
        print("--local_dir is the old name of --local_save_dir", file=sys.stderr)
    folder = Path(args.local_save_dir or args.local_dir or args.default_dir).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        part = folder / f".{name}.parquet.part-{os.getpid()}"
        try:
            pq.write_table(pa.Table.from_pylist(rows), part)
            part.replace(folder / f"{name}.parquet")
        finally:
            part.unlink(missing_ok=True)
    if args.hdfs_dir:
        copy_to_hdfs([folder / f"{name}.parquet" for name in splits], args.hdfs_dir)
    return folder


def copy_to_hdfs(files: list[Path], target: str) -> None:
    hdfs = shutil.which("hdfs")
    if hdfs is None:
        raise UserError("--hdfs_dir needs the `hdfs` command on PATH; leave it out to write local files only")
    for command in (["-mkdir", "-p", target], ["-put", "-f", *map(str, files), target]):
        done = subprocess.run([hdfs, "dfs", *command], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UserError(
                f"hdfs dfs {' '.join(command)} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
            )


def run(name: str, body: Callable[[], None]) -> int:
    """Exit code of a script: 0, or 1 with one line on stderr."""
    try:
        body()
    except (UserError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0
