"""Validation: every held-out prompt once (or `val_kwargs.n` times), scored, averaged by data source.

Invariants: nothing is dropped (a last partial batch counts), a sample without a valid reward is left out of the means
and counted in `val-aux/num_invalid`, and only the last output of a session is scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.dumps import decode_rows
from rlflow.trainer.ppo.replay_buffer import final_outputs, session_of
from rlflow.trainer.ppo.validation_metrics import name_validation_metrics, process_validation_metrics
from rlflow.utils import tensordict_utils as tu

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

FIELDS = ["prompts", "responses", "rm_scores", "num_turns", "data_source", "reward_model", "extra_fields"]


def validate(trainer: PPOTrainer) -> dict[str, float]:
    """Generate, score and average; also writes the validation dump and the sample table."""
    rows: list[dict[str, Any]] = []
    turns: list[float] = []
    for batch in trainer.feed.validation_batches(trainer.global_steps):
        trainer._submit(batch)
        meta, _ = trainer.replay_buffer.sample(trainer.global_steps, "val", len(trainer.feed.uids(batch)))
        data = tq.kv_batch_get(meta.keys, "val", FIELDS, missing_ok=("data_source", "reward_model"))
        sources = tu.get(data, "data_source") or ["unknown"] * len(meta.keys)
        decoded = decode_rows(trainer.runtime.tokenizer, meta.keys, meta.tags, data, trainer.global_steps)
        finals = set(final_outputs(meta.keys))
        for position, row in enumerate(decoded):
            rows.append({**row, "data_source": sources[position] or "unknown", "final": position in finals})
        turns.extend(float(turn) for turn in tu.get(data, "num_turns"))
        tq.kv_clear(meta.keys, "val")
    folder = trainer.config.trainer.validation_data_dir
    if folder:
        shown = [{key: value for key, value in row.items() if key != "final"} for row in rows]
        trainer.dumps.write(folder, trainer.global_steps, shown)
        trainer.dumps.flush()
    finals_only = [row for row in rows if row["final"]]
    _log_samples(trainer, finals_only)
    return {
        **_metrics(finals_only),
        "val-aux/num_turns/min": min(turns),
        "val-aux/num_turns/max": max(turns),
        "val-aux/num_turns/mean": sum(turns) / len(turns),
    }


def _metrics(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means by data source of `reward` and of every variable the scorer returned."""
    reserved = {"input", "output", "gts", "score", "step", "uid", "data_source", "final", "invalid"}
    names = sorted({name for row in rows for name in row if name not in reserved})
    infos: dict[str, list[Any]] = {"reward": [row["score"] for row in rows]}
    infos |= {name: [None if "invalid" in row else row.get(name) for row in rows] for name in names}
    metrics = name_validation_metrics(
        process_validation_metrics(
            [row["data_source"] for row in rows], [session_of(row["uid"])[0] for row in rows], infos
        )
    )
    metrics["val-aux/num_invalid"] = sum("invalid" in row for row in rows)
    return metrics


def _log_samples(trainer: PPOTrainer, rows: list[dict[str, Any]]) -> None:
    count = trainer.config.trainer.log_val_generations
    if count > 0 and trainer.logger is not None:
        import numpy as np

        ordered = sorted(rows, key=lambda row: (row["input"], row["uid"]))
        chosen = np.random.RandomState(42).permutation(len(ordered))[:count]
        samples = [(ordered[i]["input"], ordered[i]["output"], ordered[i]["score"]) for i in chosen]
        trainer.logger.log_samples(samples, step=trainer.global_steps)
