"""Validation: every held-out prompt once (or `val_kwargs.n` times), scored, averaged by data source.

Invariants
    - Nothing is dropped: a last partial batch counts, and sessions that failed are counted in
      `validation/rollout_failure/*`.
    - A sample without a valid reward is left out of the means and counted in `val-aux/num_invalid`.
    - Of a session with several outputs only the last is scored and shown; the dump has all of them, each with the
      session's final ground truth, score and extras.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import rlflow.transfer_queue as tq
from rlflow.trainer.ppo.dumps import column, decode_rows, reward_extras, with_extras
from rlflow.trainer.ppo.replay_buffer import final_outputs, session_of
from rlflow.trainer.ppo.trajectories import ValidationTrajectories
from rlflow.trainer.ppo.validation_metrics import name_validation_metrics, process_validation_metrics

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

FIELDS = ("prompts", "responses", "rm_scores", "num_turns", "data_source", "reward_model", "extra_fields")
OPTIONAL_FIELDS = ("data_source", "reward_model", "extra_fields", "num_turns")
Row = dict[str, Any]


class _Collected:
    """What the batches of one validation left: every output's row, and of the final ones what is averaged."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: list[Row] = []
        self.extras: list[Row] = []
        self.finals: list[int] = []
        self.sources: list[str] = []
        self.turns: list[float] = []
        self.samples_of: dict[str, int] = {}
        self.failures: dict[str, float] = {}

    def add(self, tokenizer: Any, keys: list[str], tags: list[Row], data: Any) -> None:
        """Add the outputs of a batch."""
        rows = decode_rows(tokenizer, keys, tags, data, self.step)
        extras = reward_extras(data, tags)
        finals = final_outputs(keys)
        final_of = {session_of(keys[position])[:2]: position for position in finals}
        offset = len(self.rows)
        for position, row in enumerate(rows):
            final = final_of[session_of(keys[position])[:2]]
            shared: Row = {name: rows[final][name] for name in ("gts", "score", "invalid") if name in rows[final]}
            own = {name: value for name, value in row.items() if name != "invalid"}
            self.rows.append({**own, **shared})
            self.extras.append({**extras[final], "reward": rows[final]["score"]})
        self.finals += [offset + position for position in finals]
        sources, turns = column(data, "data_source", len(keys)), column(data, "num_turns", len(keys))
        self.sources += [str(sources[position] or "unknown") for position in finals]
        self.turns += [float(turns[position]) for position in finals if turns[position] is not None]

    def count(self, sampling: dict[str, Any]) -> None:
        """Add up what the sampler counted: failed groups and sessions."""
        for name, value in sampling.items():
            if isinstance(value, (int, float)):
                self.failures[name] = self.failures.get(name, 0) + value

    def metrics(self) -> dict[str, float]:
        """Means by data source of `reward` and of every number the scorer returned, and counts."""
        names = list(dict.fromkeys(["reward", *(name for row in self.finals for name in self.extras[row])]))
        infos = {name: [self.extras[row].get(name) for row in self.finals] for name in names}
        uids = [session_of(self.rows[row]["uid"])[0] for row in self.finals]
        metrics = name_validation_metrics(
            process_validation_metrics(self.sources, uids, infos, samples_of=self.samples_of)
        )
        metrics["val-aux/num_invalid"] = sum("invalid" in self.rows[row] for row in self.finals)
        if self.turns:
            metrics["val-aux/num_turns/min"] = min(self.turns)
            metrics["val-aux/num_turns/max"] = max(self.turns)
            metrics["val-aux/num_turns/mean"] = sum(self.turns) / len(self.turns)
        return {**metrics, **self.failures}


def validate(trainer: PPOTrainer) -> dict[str, float]:
    """Generate, score and average; also writes the validation dump, the trajectory records and the sample table."""
    collected = _Collected(trainer.global_steps)
    traces = ValidationTrajectories(trainer)
    for batch in trainer.feed.validation_batches(trainer.global_steps):
        uids = trainer.feed.uids(batch)
        sessions = column(batch, "__rollout_n__", len(uids))
        default = trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        collected.samples_of |= {uid: int(n or default) for uid, n in zip(uids, sessions, strict=True)}
        trainer._submit(batch)
        meta, sampling = trainer.replay_buffer.sample(trainer.global_steps, "val", len(uids))
        collected.count(sampling)
        if trainer.get_reward_handles() is None:
            trainer.runtime.checkpoint_manager.sleep_replicas()
            meta = trainer._compute_reward_colocate(meta)
            trainer.runtime.checkpoint_manager.wake_up_replicas()
        data = tq.kv_batch_get(meta.keys, "val", FIELDS, missing_ok=OPTIONAL_FIELDS)
        collected.add(trainer.runtime.tokenizer, meta.keys, meta.tags, data)
        traces.add(meta)
        tq.kv_clear(meta.keys, "val")
        trainer.prompts.forget(uids)
    folder = trainer.config.trainer.validation_data_dir
    if folder:
        rows = with_extras(collected.rows, collected.extras)
        trainer.dumps.submit(Path(folder).expanduser() / f"{trainer.global_steps}.jsonl", lambda: rows)
    traces.write()
    trainer.dumps.flush()
    _log_samples(trainer, [collected.rows[row] for row in collected.finals])
    return collected.metrics()


def _log_samples(trainer: PPOTrainer, rows: list[Row]) -> None:
    count = trainer.config.trainer.log_val_generations
    if count > 0 and trainer.logger is not None:
        samples = [(row["input"], row["output"], row["score"]) for row in rows]
        trainer.logger.log_samples(choose_samples(samples, count), step=trainer.global_steps)


def choose_samples(samples: list[tuple[str, str, Any]], count: int) -> list[tuple[str, str, Any]]:
    """The same `count` prompts each time: sorted by input text, shuffled with seed 42, the first ones."""
    ordered = sorted(samples, key=lambda sample: sample[0])
    return [ordered[i] for i in np.random.RandomState(42).permutation(len(ordered))[:count]]
