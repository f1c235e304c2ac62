"""JSONL dumps of trajectories: one file a step, one object a row.

Invariants
    - A dump never holds up training: one writer thread decodes, encodes and writes.
    - A failed write is raised at the next dump or at the end, never lost.
    - A file appears under its name only when it is complete.
    - Rows are sorted by (uid, session, index), and all rows of a file have the same columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rlflow.transfer_queue as tq
from rlflow.observe.journal import plain
from rlflow.trainer.ppo.batching import partition_of, real_rows
from rlflow.trainer.ppo.replay_buffer import session_of
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import RlflowError

Rows = list[dict[str, Any]]
FLUSH_TIMEOUT_S = 120.0
_LINE_ENDS = ("\u0085", "\u2028", "\u2029")


class DumpWriter:
    """Writes `{folder}/{step}.jsonl` in a thread of its own."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dumps")
        self._pending: list[Future[None]] = []

    def write_training(self, folder: str, step: int, batch: KVBatchMeta) -> None:
        """Dump the trained trajectories of a step, without padding rows: see `decode_rows`, plus the reward extras."""
        keys = [batch.keys[row] for row in real_rows(batch)]
        tags = [batch.tags[row] for row in real_rows(batch)]
        names = ["prompts", "responses", "rm_scores", "reward_model", "extra_fields"]
        data = tq.kv_batch_get(keys, partition_of(batch), names, missing_ok=("reward_model", "extra_fields"))

        def rows() -> Rows:
            extras = reward_extras(data, tags)
            return with_extras(decode_rows(self.tokenizer, keys, tags, data, step), extras)

        self.submit(Path(folder).expanduser() / f"{step}.jsonl", rows)

    def write(self, folder: str, step: int, rows: Rows) -> None:
        """Queue `{folder}/{step}.jsonl`; raises what an earlier write raised."""
        self.submit(Path(folder).expanduser() / f"{step}.jsonl", lambda: rows)

    def submit(self, path: Path, make_rows: Callable[[], Rows]) -> None:
        """Queue a file whose rows are made in the writer thread; each row has its key under `uid` or `key`.

        Raises what an earlier write raised.
        """
        self._raise_failures(wait=False)
        self._pending.append(self._pool.submit(_write_jsonl, path, make_rows))

    def flush(self) -> None:
        """Wait for all writes; raises what failed."""
        self._raise_failures(wait=True)

    def _raise_failures(self, wait: bool) -> None:
        finished = [future for future in self._pending if wait or future.done()]
        self._pending = [future for future in self._pending if future not in finished]
        for future in finished:
            try:
                future.result(timeout=FLUSH_TIMEOUT_S)
            except OSError as error:
                raise RlflowError(
                    f"writing trajectories failed: {error}. Check the disk of the dump folder."
                ) from error


def decode_rows(tokenizer: Any, keys: list[str], tags: list[dict[str, Any]], data: Any, step: int) -> Rows:
    """Readable rows: input, output, gts (ground truth), score (None when invalid), step, uid (the full key), and
    `invalid` (why) where the reward is.
    """
    prompts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in data["prompts"].unbind()]
    outputs = [tokenizer.decode(ids, skip_special_tokens=True) for ids in data["responses"].unbind()]
    truths = column(data, "reward_model", len(keys))
    rows = []
    for position, (key, tag, scores) in enumerate(zip(keys, tags, data["rm_scores"].unbind(), strict=True)):
        invalid = tag.get("invalid")
        row = {
            "input": prompts[position],
            "output": outputs[position],
            "gts": (truths[position] or {}).get("ground_truth"),
            "score": None if invalid else float(scores.sum()),
            "step": step,
            "uid": key,
        }
        rows.append({**row, "invalid": invalid} if invalid else row)
    return rows


def reward_extras(data: Any, tags: list[dict[str, Any]]) -> Rows:
    """What the reward function returned beside the score, one dict a row; {} for an invalid reward."""
    fields = column(data, "extra_fields", len(tags))
    infos = [(extra or {}).get("reward_extra_info") or {} for extra in fields]
    return [{} if tag.get("invalid") else dict(info) for info, tag in zip(infos, tags, strict=True)]


def with_extras(rows: Rows, extras: Rows) -> Rows:
    """Rows with their extras as columns, the same ones in every row (None where a row has none). The row's own columns
    win.
    """
    names = list(dict.fromkeys(name for info in extras for name in info))
    return [{**{name: info.get(name) for name in names}, **row} for row, info in zip(rows, extras, strict=True)]


def column(data: Any, name: str, count: int) -> list[Any]:
    """A column of objects as a list of `count`; Nones when the batch has no such column."""
    values: Any = tu.get(data, name)
    if hasattr(values, "tolist"):
        values = values.tolist()
    # A TensorDict of one row may fold a column into its object.
    return values if isinstance(values, list) and len(values) == count else [values] * count


def _write_jsonl(path: Path, make_rows: Callable[[], Rows]) -> None:
    rows = sorted(make_rows(), key=lambda row: session_of(row.get("key") or row["uid"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.tmp")
    # Lone surrogates in model text cannot be encoded; they are escaped, not lost.
    with scratch.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(_lines(rows))
    os.replace(scratch, path)


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    for row in rows:
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):  # JSON has no NaN, and no objects of numpy or the user's own
            text = json.dumps(plain(row), ensure_ascii=False)
        # Line ends to Python's splitlines() and to some editors, though not to JSON.
        for end in _LINE_ENDS:
            text = text.replace(end, f"\\u{ord(end):04x}")
        yield text + "\n"
