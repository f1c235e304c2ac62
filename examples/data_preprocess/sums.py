#!/usr/bin/env python3
"""All sums of two one-digit numbers as parquet files for rlflow: the data of the tiny recipes. Needs nothing else.

    python examples/data_preprocess/sums.py --local_save_dir ~/data/sums

100 questions, in an order drawn from --seed; the first --test-size of them are the test set, the rest is for training.
The same options give the same files. `data_source` is "sums", which has no built-in scorer: the recipes use
examples/custom_reward/sums.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from common import UserError, add_output_arguments, make_row, run, write_splits

DATA_SOURCE = "sums"


def make_splits(test_size: int, seed: int) -> dict[str, list[dict[str, Any]]]:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    if not 1 <= test_size < len(pairs):
        raise UserError(f"--test-size {test_size}: there are {len(pairs)} sums, and both splits need one")
    parts = {"test": pairs[:test_size], "train": pairs[test_size:]}
    return {
        split: [
            make_row(DATA_SOURCE, f"{a} + {b} =", "math", str(a + b), {"split": split, "index": index})
            for index, (a, b) in enumerate(part)
        ]
        for split, part in parts.items()
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write sums of one-digit numbers as train.parquet and test.parquet.")
    parser.add_argument("--test-size", type=int, default=20, help="of 100 questions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default %(default)s)")
    add_output_arguments(parser, "~/data/sums")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def body() -> None:
        splits = make_splits(args.test_size, args.seed)
        folder = write_splits(splits, args)
        print(f"{len(splits['train'])} train and {len(splits['test'])} test rows in {folder}")

    return run("sums", body)


if __name__ == "__main__":
    sys.exit(main())
