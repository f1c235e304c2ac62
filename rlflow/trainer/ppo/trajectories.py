"""Token-level records of trajectories: `{run folder}/trajectories/{step}.jsonl`, `val_{step}.jsonl` for validation.

    {"key": "e0r3a0_1_0", "uid": "e0r3a0", ..., "response_tokens": ["4", "2"], "response_mask": [1, 1],
     "rollout_log_probs": [-0.1, -2.3], "advantages": [0.7, 0.7], "reward": 1.0, "lineage": {"prompts": {...}, ...}}

A record has what is known about one output of one session when its step is over: its tokens as text, every
response-aligned field, who wrote which field when and under which weights. `rlflow.observe.records` reads them.

Invariants
    - Groups are recorded whole, so that an advantage can be read next to the rewards it comes from.
    - The controller only fetches the rows; tokens and JSON are made in the dump writer's thread.
    - A number that is not finite is null.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

import rlflow.transfer_queue as tq
from rlflow.agent_loop.rows import ROW_FIELDS
from rlflow.observe.records import SERIES, TRAJECTORIES
from rlflow.trainer.ppo.batching import partition_of, real_rows
from rlflow.trainer.ppo.dumps import column, reward_extras
from rlflow.trainer.ppo.replay_buffer import final_outputs, natural_order, session_of, uid_of
from rlflow.trainer.ppo.utils import run_folder
from rlflow.transfer_queue import KVBatchMeta
from rlflow.utils.nested import is_nested, nested_lengths, nested_values

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

TOKENS = ("prompts", "responses", "response_mask")
FACTS = ("data_source", "reward_model", "num_turns", "metrics", "extra_fields")
# float32 numbers keep their value with 9 significant digits.
DIGITS = 9


def write_trajectories(trainer: PPOTrainer, batch: KVBatchMeta) -> None:
    """Record the trained trajectories of a step, as `trainer.trace.trajectories_per_step` says; call it before the rows
    are cleared.
    """
    limit = trainer.config.trainer.trace.trajectories_per_step
    real = real_rows(batch)
    chosen = [real[i] for i in select_groups([batch.keys[row] for row in real], limit)]
    if not chosen:
        return
    keys, tags = [batch.keys[row] for row in chosen], [batch.tags[row] for row in chosen]
    data = _fetch(keys, partition_of(batch))
    step, tokenizer = trainer.global_steps, trainer.runtime.tokenizer
    stages = trainer.recorder.stages_of_step()
    trainer.dumps.submit(
        _folder(trainer) / f"{step}.jsonl",
        lambda: trajectory_records(tokenizer, keys, tags, data, step, "train", stages),
    )


class ValidationTrajectories:
    """Collects the records of one validation, which comes in batches."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer
        self._left = trainer.config.trainer.trace.trajectories_per_step
        self._batches: list[tuple[list[str], list[dict[str, Any]], Any]] = []

    def add(self, batch: KVBatchMeta) -> None:
        """Take the first groups of a batch while there is room; call it before the rows are cleared."""
        chosen = select_groups(batch.keys, self._left, at_least_one=not self._batches)
        if self._left is not None:
            # The first groups, not those that happen to fit: after one that does not, there are no more.
            self._left = max(0, self._left - len(chosen)) if len(chosen) == len(batch.keys) else 0
        if not chosen:
            return
        keys, tags = [batch.keys[row] for row in chosen], [batch.tags[row] for row in chosen]
        self._batches.append((keys, tags, _fetch(keys, partition_of(batch))))

    def write(self) -> None:
        """Queue the file."""
        if not self._batches:
            return
        step, tokenizer = self._trainer.global_steps, self._trainer.runtime.tokenizer

        def records() -> list[dict[str, Any]]:
            parts = (
                trajectory_records(tokenizer, keys, tags, data, step, "val", []) for keys, tags, data in self._batches
            )
            return [record for part in parts for record in part]

        self._trainer.dumps.submit(_folder(self._trainer) / f"val_{step}.jsonl", records)


def select_groups(keys: Sequence[str], limit: int | None, *, at_least_one: bool = True) -> list[int]:
    """Positions of the rows of the first prompt groups, in the order of their names, that fit into `limit` rows.

    Args:
        keys: trajectory keys.
        limit: None = all rows, 0 = none.
        at_least_one: take the first group even when it alone has more rows.
    """
    if limit == 0:
        return []
    groups: dict[str, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(uid_of(key), []).append(position)
    chosen: list[int] = []
    for uid in sorted(groups, key=natural_order):
        rows = groups[uid]
        if limit is not None and len(chosen) + len(rows) > limit and (chosen or not at_least_one):
            break
        chosen += sorted(rows, key=lambda row: session_of(keys[row]))
    return chosen


def remove_trajectories_after(run_folder: Path, step: int) -> list[Path]:
    """Delete the records of steps after `step`, which a run that goes on from there writes again."""
    gone = []
    for path in (run_folder / TRAJECTORIES).glob("*.jsonl"):
        match = re.fullmatch(r"(?:val_)?(\d+)\.jsonl", path.name)
        if match and int(match[1]) > step:
            path.unlink()
            gone.append(path)
    return gone


def trajectory_records(
    tokenizer: Any,
    keys: list[str],
    tags: list[dict[str, Any]],
    data: Any,
    step: int,
    partition: str,
    lineage: Sequence[Any] = (),
) -> list[dict[str, Any]]:
    """One record a row.

    Args:
        tokenizer: decodes tokens.
        keys, tags: of whole groups.
        data: TensorDict with `prompts`, `responses`, `response_mask` and what there is of `SERIES` and `FACTS`.
        step, partition: where the rows were used.
        lineage: the stages of the step so far, objects with `stage`, `writes`, `end` (unix seconds) and `version`.
    """
    count = len(keys)
    prompts, responses, masks = (_ints(data[name]) for name in TOKENS)
    series = {name: _floats(data[name]) for name in SERIES if name in data.keys()}  # noqa: SIM118 - iterates over rows
    texts = _token_texts(tokenizer, prompts, responses)
    facts = {name: column(data, name, count) for name in FACTS}
    infos = reward_extras(data, tags)
    finals = set(final_outputs(keys))
    written = _stage_lineage(lineage, present=series.keys())
    records = []
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        uid, session, index = session_of(key)
        extra = facts["extra_fields"][row] or {}
        session_facts = extra.get("session_facts") or {}
        invalid, scores = tag.get("invalid"), series.get("rm_scores")
        version = tag.get("max_global_steps")
        own = {"writer": session_facts.get("worker"), "time": session_facts.get("ended"), "version": version}
        record: dict[str, Any] = {
            "key": key,
            "uid": uid,
            "session": session,
            "index": index,
            "step": step,
            "partition": partition,
            "data_source": facts["data_source"][row],
            "ground_truth": (facts["reward_model"][row] or {}).get("ground_truth"),
            "is_final": row in finals,
            "prompt_ids": prompts[row],
            "response_ids": responses[row],
            "prompt_text": tokenizer.decode(prompts[row], skip_special_tokens=False),
            "response_text": tokenizer.decode(responses[row], skip_special_tokens=False),
            "prompt_tokens": [texts[token] for token in prompts[row]],
            "response_tokens": [texts[token] for token in responses[row]],
            "response_mask": masks[row],
            **{name: rows[row] for name, rows in series.items()},
            "reward": None if invalid or scores is None else float(sum(score or 0.0 for score in scores[row])),
            **({"invalid": invalid} if invalid else {}),
            "reward_extra_info": infos[row],
            "stop_reason": extra.get("stop_reason"),
            "num_turns": facts["num_turns"][row],
            "min_version": tag.get("min_global_steps"),
            "max_version": version,
            "worker": session_facts.get("worker"),
            "started": session_facts.get("started"),
            "ended": session_facts.get("ended"),
            "timings": _timings(facts["metrics"][row]),
            "lineage": {**{name: own for name in ROW_FIELDS if name not in SERIES or name in series}, **written},
        }
        records.append(record)
    return records


def _fetch(keys: list[str], partition: str) -> Any:
    optional = (*SERIES, *FACTS)
    return tq.kv_batch_get(keys, partition, [*TOKENS, *optional], missing_ok=optional)


def _folder(trainer: PPOTrainer) -> Path:
    return run_folder(trainer.config) / TRAJECTORIES


def _stage_lineage(stages: Iterable[Any], present: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Who wrote the fields of the stages after generation; a later writer of the same field wins."""
    there = set(present)
    return {
        name: {"writer": stage.stage, "time": stage.end, "version": stage.version}
        for stage in stages
        if stage.stage != "gen"
        for name in stage.writes
        if name not in SERIES or name in there
    }


def _timings(metrics: dict[str, Any] | None) -> dict[str, float]:
    """Seconds by part of the session; what is no time (a count) is left out."""
    return {name: seconds for name, seconds in (metrics or {}).items() if isinstance(seconds, float)}


def _token_texts(tokenizer: Any, *rows: list[list[int]]) -> dict[int, str]:
    """Token id -> its text alone. A token that is part of a character shows as the replacement character."""
    ids = sorted({token for part in rows for row in part for token in row})
    return dict(zip(ids, tokenizer.batch_decode([[token] for token in ids]), strict=True))


def _ints(field: Tensor) -> list[list[int]]:
    return _cut(_values(field).tolist(), field)


def _floats(field: Tensor) -> list[list[float | None]]:
    """Numbers as short as they can be without losing any of float32."""
    values = _values(field).double().numpy()
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
    short = np.round(np.where(finite, values, 0.0) * scale) / scale
    numbers: list[float | None] = short.tolist()
    if not finite.all():
        numbers = [number if ok else None for number, ok in zip(numbers, finite.tolist(), strict=True)]
    return _cut(numbers, field)


def _values(field: Tensor) -> Tensor:
    """The rows one after the other; rows of equal length may come as a dense tensor."""
    return nested_values(field) if is_nested(field) else field.flatten()


def _cut(flat: list[Any], like: Tensor) -> list[list[Any]]:
    lengths = nested_lengths(like).tolist() if is_nested(like) else [like.shape[1]] * like.shape[0]
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start : start + length])
        start += length
    return rows
