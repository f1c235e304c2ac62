#!/usr/bin/env python3
"""GSM8K (grade-school word problems) as parquet files for rlflow.

    python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k.py --local_dataset_path ~/raw/gsm8k     # no network

`--local_dataset_path` is a folder that holds `train` and `test` as .jsonl (the original release) or as .parquet (a
clone of the hub's data set, its `main` configuration). Without it the hub is asked, which needs `pip install datasets`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from common import UserError, add_output_arguments, make_row, run, write_splits

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Reason step by step and finish with a line of "#### " followed by the final number.'
SPLITS = ("train", "test")


def final_answer(solution: str) -> str:
    """The number after the last `####` of a reference solution, without commas."""
    found = re.findall(r"####\s*(-?[0-9.,]+)", solution)
    if not found:
        raise UserError(f"a reference solution has no '#### <number>': {solution[-60:]!r}")
    return found[-1].replace(",", "").rstrip(".")


def to_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    missing = [key for key in ("question", "answer") if not isinstance(example.get(key), str)]
    if missing:
        raise UserError(f"{split} row {index}: no text in {', '.join(missing)}; found the keys {', '.join(example)}")
    question, answer = example["question"], example["answer"]
    extra = {"split": split, "index": index, "answer": answer, "question": question}
    return make_row(DATA_SOURCE, f"{question} {INSTRUCTION}", "math", final_answer(answer), extra)


def read_local(root: Path, split: str) -> list[dict[str, Any]]:
    """The examples of a split from a local folder."""
    if not root.is_dir():
        raise UserError(f"--local_dataset_path {root}: no such folder")
    for base in (root / "main", root):  # a hub clone also has a `socratic` configuration, which is another text
        for file in sorted(base.glob(f"{split}*.jsonl")):
            return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
        parts = sorted(base.glob(f"{split}*.parquet"))
        if parts:
            import pyarrow.parquet as pq

            return [row for part in parts for row in pq.read_table(part).to_pylist()]
    raise UserError(f"{root} has no {split}*.jsonl and no {split}*.parquet, also not in its folder main/")


def read_hub(split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(
            "package datasets is not installed; pip install datasets, or pass --local_dataset_path"
        ) from None
    try:
        return list(load_dataset(DATA_SOURCE, "main", split=split))
    except Exception as error:  # noqa: BLE001 - the hub's client raises many kinds of errors; all mean: not to be had
        first = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{DATA_SOURCE} cannot be loaded ({type(error).__name__}: {first}); pass --local_dataset_path"
        ) from None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write GSM8K as train.parquet and test.parquet.")
    parser.add_argument("--local_dataset_path", default=None, help="folder with the raw data; default: the hub")
    add_output_arguments(parser, "~/data/gsm8k")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def body() -> None:
        splits = {}
        for split in SPLITS:
            local = args.local_dataset_path
            examples = read_local(Path(local).expanduser(), split) if local else read_hub(split)
            splits[split] = [to_row(example, split, index) for index, example in enumerate(examples)]
        folder = write_splits(splits, args)
        print(f"{len(splits['train'])} train and {len(splits['test'])} test rows in {folder}")

    return run("gsm8k", body)


if __name__ == "__main__":
    sys.exit(main())
