"""JSONL dumps of trajectories: one file a step, one object a row.

Invariant: a dump never holds up training (one writer thread), and a failed write is raised at the next dump or at the
end, never lost. Rows are sorted by (uid, session, index).
"""

from __future__ import annotations

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.batching import partition_of, real_rows
from rlflow.trainer.ppo.replay_buffer import session_of
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import RlflowError


class DumpWriter:
    """Writes `{folder}/{step}.jsonl`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dumps")
        self._pending: list[Future[None]] = []

    def write_training(self, folder: str, step: int, batch: KVBatchMeta) -> None:
        """Dump the trained trajectories of a step (without padding rows)."""
        keys = [batch.keys[row] for row in real_rows(batch)]
        tags = [batch.tags[row] for row in real_rows(batch)]
        names = ["prompts", "responses", "rm_scores", "reward_model", "extra_fields"]
        data = tq.kv_batch_get(keys, partition_of(batch), names, missing_ok=("reward_model",))
        self.write(folder, step, decode_rows(self.tokenizer, keys, tags, data, step))

    def write(self, folder: str, step: int, rows: list[dict[str, Any]]) -> None:
        """Queue one file; raises what an earlier write raised."""
        self._raise_failures(wait=False)
        rows = sorted(rows, key=lambda row: session_of(row["uid"]))
        self._pending.append(self._pool.submit(_write_jsonl, Path(folder).expanduser() / f"{step}.jsonl", rows))

    def flush(self) -> None:
        """Wait for all writes; raises what failed."""
        self._raise_failures(wait=True)

    def _raise_failures(self, wait: bool) -> None:
        remaining = []
        for future in self._pending:
            if not wait and not future.done():
                remaining.append(future)
                continue
            try:
                future.result(timeout=60)
            except OSError as error:
                raise RlflowError(
                    f"writing trajectories failed: {error}. Check the disk of the dump folder."
                ) from error
        self._pending = remaining


def decode_rows(
    tokenizer: Any, keys: list[str], tags: list[dict[str, Any]], data: Any, step: int
) -> list[dict[str, Any]]:
    """Readable rows: input, output, gts (ground truth), score (None when invalid), step, uid (the full key), reward
    extras.
    """
    prompts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in data["prompts"].unbind()]
    outputs = [tokenizer.decode(ids, skip_special_tokens=True) for ids in data["responses"].unbind()]
    truths = tu.get(data, "reward_model") or [{}] * len(keys)
    extras = tu.get(data, "extra_fields") or [{}] * len(keys)
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
        if invalid:
            row["invalid"] = invalid
        extra = (extras[position] or {}).get("reward_extra_info") or {}
        rows.append({**extra, **row})
    return rows


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lone surrogates in model text cannot be encoded; they are escaped, not lost.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(_plain(row), ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null; unknown objects become their text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return value.tolist() if hasattr(value, "tolist") else str(value)
