#!/usr/bin/env python3
"""Puzzles of the package `reasoning-gym` as parquet files for rlflow; the package makes the questions, offline.

    pip install reasoning-gym
    python examples/data_preprocess/reasoning_gym.py --task chain_sum --min-terms 2 --max-terms 2 --min-digits 1 \
        --max-digits 1 --scorer last_number --train-size 100 --test-size 100 --local_save_dir ~/data/chain_sum

Train and test share no question. With several `--suffix` every question is asked in each wording, and sizes count
prompts. The same options give the same files.

`data_source` is `reasoning_gym/<task>`, which `rlflow.rewards` scores:
    --scorer score_answer   the task's own matcher on the text inside the last <answer> tag, or on all of it
    --scorer last_number    1 when the last number of the response is the answer: signal for small models from step one
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from common import UserError, add_output_arguments, make_row, run, write_splits

DEFAULT_SUFFIX = {
    "last_number": "Answer with just the number.",
    "score_answer": "Put the final answer between <answer> and </answer>.",
}
SHORTCUTS = ("min_terms", "max_terms", "min_digits", "max_digits")


def import_package() -> Any:
    """The installed `reasoning_gym`, not this file, which has its name and may be first on the path."""
    here = Path(__file__).resolve().parent
    loaded, path = sys.modules.pop("reasoning_gym", None), list(sys.path)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "/").resolve() != Path(__file__).resolve():
        sys.modules["reasoning_gym"] = loaded
        return loaded
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError:
        raise UserError("package reasoning-gym is not installed; pip install reasoning-gym") from None
    finally:
        sys.path[:] = path


def distinct_entries(task: str, options: dict[str, Any], seed: int, count: int) -> list[dict[str, Any]]:
    """The first `count` entries of the task's stream whose question did not occur before."""
    package = import_package()
    draws = max(30 * count, 3000)  # small tasks (200 one-digit sums) repeat a lot before the last one comes
    try:
        stream = package.create_dataset(task, size=draws, seed=seed, **options)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"reasoning_gym task {task!r} with {options}: {error}") from None
    found: dict[str, dict[str, Any]] = {}
    for index in range(draws):
        entry = stream[index]
        found.setdefault(entry["question"], entry)
        if len(found) == count:
            return list(found.values())
    raise UserError(
        f"{task} with these options gave only {len(found)} different questions in {draws} draws, not {count}. "
        "Ask for fewer, allow larger numbers, or ask each question in several wordings (repeat --suffix)"
    )


def to_row(entry: dict[str, Any], suffix: str, split: str, index: int, args: argparse.Namespace) -> dict[str, Any]:
    question, answer = entry["question"], str(entry["answer"])
    if args.scorer == "last_number":
        try:
            Decimal(answer.replace(",", ""))
        except InvalidOperation:
            raise UserError(
                f"--scorer last_number: the answer {answer!r} of task {args.task} is not a number"
            ) from None
    extra = {
        "split": split,
        "index": index,
        "question": question,
        "scorer": args.scorer,
        # As text: metadata differs from row to row, and a parquet column has one type.
        "entry": json.dumps({"question": question, "answer": answer, "metadata": entry["metadata"]}, default=str),
    }
    return make_row(f"reasoning_gym/{args.task}", f"{question}\n{suffix}", "reasoning", answer, extra)


def make_splits(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    suffixes: Sequence[str] = args.suffix or [DEFAULT_SUFFIX[args.scorer]]
    options = {name: getattr(args, name) for name in SHORTCUTS if getattr(args, name) is not None} | dict(args.set)
    sizes = {"test": args.test_size, "train": args.train_size}
    questions = {split: math.ceil(size / len(suffixes)) for split, size in sizes.items()}
    entries = distinct_entries(args.task, options, args.seed, sum(questions.values()))
    splits = {}
    # Test first: its questions stay the same whatever the train size.
    for split, part in (("test", entries[: questions["test"]]), ("train", entries[questions["test"] :])):
        pairs = [(entry, suffix) for entry in part for suffix in suffixes][: sizes[split]]
        splits[split] = [to_row(entry, suffix, split, index, args) for index, (entry, suffix) in enumerate(pairs)]
    return splits


def key_value(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Write a reasoning-gym task as train.parquet and test.parquet.")
    parser.add_argument("--task", default="chain_sum", help="name of the task (default %(default)s)")
    parser.add_argument(
        "--train-size", "--train_size", type=positive, default=1000, help="prompts (default %(default)s)"
    )
    parser.add_argument("--test-size", "--test_size", type=positive, default=200, help="prompts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    for name in SHORTCUTS:
        parser.add_argument(f"--{name.replace('_', '-')}", f"--{name}", dest=name, type=positive, default=None)
    parser.add_argument(
        "--set", type=key_value, action="append", default=[], metavar="KEY=VALUE", help="any task option"
    )
    parser.add_argument("--suffix", action="append", default=None, help="line after the question; may be repeated")
    parser.add_argument("--scorer", choices=sorted(DEFAULT_SUFFIX), default="score_answer")
    add_output_arguments(parser, "~/data/reasoning_gym")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)

    def body() -> None:
        splits = make_splits(args)
        folder = write_splits(splits, args)
        print(f"{len(splits['train'])} train and {len(splits['test'])} test rows in {folder}")

    return run("reasoning_gym", body)


if __name__ == "__main__":
    sys.exit(main())
