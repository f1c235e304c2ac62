"""What a run leaves behind in its folder while it goes: journal, numbers, configuration.

    {trainer.default_local_dir}/
        config.yaml         the resolved configuration, secrets redacted
        plan.txt, plan.json what followed from it (`rlflow.trainer.plan`)
        events.jsonl        the journal (see `rlflow.observe.journal`)
        metrics.jsonl       {"step", "data"}, one line a log call, whatever the trackers are
        run.lock            held while a run writes here

Invariants
    - At any time, for training prompts: issued = running + finished + trained + dropped.
    - After going on from the checkpoint of step k the files hold what they held when it was saved.
    - One run writes to a folder at a time.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlflow.observe.journal import JOURNAL, METRICS, Journal, JsonLines, roll_back
from rlflow.utils.errors import ConfigError

LOCK = "run.lock"
# What the lock file says about its holder.
LOCK_OWNER = re.compile(r"process (?P<pid>\d+) on (?P<node>\S+)")


@dataclass
class StageRecord:
    """One stage of a step: when it ran, over which fields, under which weights.

    Fields:
        start, end: unix seconds.
        rows: rows of the batch, padding included.
        version: step whose update made the weights that the stage used.
    """

    stage: str
    start: float
    end: float
    rows: int | None = None
    version: int | None = None
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)


class RunRecorder:
    """Writes the record of one run.

    Args:
        folder: the run folder; made when it is missing.

    Raises:
        ConfigError: another run writes there, or the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(folder)
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={folder} cannot be written to: {error}. Choose another folder."
            ) from error
        self._journal: Journal | None = None
        self._metrics: JsonLines | None = None
        self._stages: list[StageRecord] = []
        self._ended: set[str] = set()

    # ----- life -----------------------------------------------------------------------------------------------------

    def open(self, step: int, config_yaml: str, *, fresh: bool, **facts: Any) -> None:
        """Start recording a run that stands at `step`.

        Args:
            step: the step of the checkpoint it goes on from, 0 without one.
            config_yaml: for config.yaml.
            fresh: whether lines after `step` are moved away (the run will write those steps again).
            facts: go into the `run_started` line.
        """
        dropped = self._roll_back(step) if fresh else 0
        self._journal = Journal(self.folder)
        self._metrics = JsonLines(self.folder / METRICS)
        (self.folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        if step or dropped:
            self._write("resumed", step, from_step=step, dropped_lines=dropped)
        self._write("run_started", step, run_id=self.run_id, resumed_from=step or None, **facts)

    def end(self, step: int, exit_code: int, reason: str | None = None) -> None:
        """The run is over; later calls do nothing."""
        if self._journal is not None:
            self._write("run_ended", step, durable=True, exit_code=exit_code, reason=reason or "done")
            self._journal.close()
            self._journal = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._lock.close()

    def _roll_back(self, step: int) -> int:
        def before_later_steps(lines: list[dict[str, Any]]) -> int:
            return next((i for i, line in enumerate(lines) if line.get("step", 0) > step or step == 0), len(lines))

        def until_saved(lines: list[dict[str, Any]]) -> int:
            saved = [i for i, line in enumerate(lines) if line.get("event") == "saved" and line.get("step") == step]
            later = before_later_steps(lines)
            # A save in the background is told after lines of steps that will be done again.
            return saved[-1] + 1 if saved and saved[-1] < later else later

        roll_back(self.folder / METRICS, before_later_steps)
        return roll_back(self.folder / JOURNAL, until_saved)

    def _write(self, event: str, step: int, *, durable: bool = False, **facts: Any) -> None:
        if self._journal is not None:
            self._journal.write(event, step, durable=durable, **facts)

    # ----- prompts --------------------------------------------------------------------------------------------------

    def issued(self, step: int, partition: str, uids: Sequence[str], sessions: int, version: int) -> None:
        """Prompts were handed to the agent loops; `sessions` each, under weights `version`."""
        self._ended.difference_update(uids)
        self._write("issued", step, partition=partition, uids=list(uids), sessions=sessions, version=version)

    def finished(self, step: int, partition: str, uid: str, tag: Mapping[str, Any]) -> None:
        """All sessions of a prompt ended; said once a prompt."""
        if uid in self._ended:
            return
        self._ended.add(uid)
        self._write(
            "finished",
            step,
            partition=partition,
            uid=uid,
            status=tag.get("status", "finished"),
            sessions_failed=int(tag.get("failed_sessions", 0)),
            reason=tag.get("failed"),
        )

    def trained(self, step: int, uids: Iterable[str], rows: int, version: int) -> None:
        """The rows of these prompts went into the weights `version`."""
        uids = list(uids)
        for uid in uids:  # a sampler of the user's own reports no ends
            self.finished(step, "train", uid, {})
        self._ended.difference_update(uids)
        self._write("trained", step, durable=True, uids=uids, rows=rows, version=version)

    def dropped(self, step: int, uids: Iterable[str], reason: str) -> None:
        """These prompts will not be trained on."""
        uids = list(uids)
        self._ended.difference_update(uids)
        self._write("dropped", step, uids=uids, reason=reason)

    # ----- the step -------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget the stages of the step before."""
        self._stages = []

    def stage(self, step: int, record: StageRecord) -> None:
        """A stage ended."""
        self._stages.append(record)
        facts = {name: value for name, value in vars(record).items() if value not in (None, [])}
        self._write("stage", step, **facts)

    def stages_of_step(self) -> list[StageRecord]:
        """The stages of this step so far, in order."""
        return list(self._stages)

    def weights(self, step: int, receipt: Mapping[str, float]) -> None:
        """The rollout servers hold weights `version` now; `receipt` as `CheckpointEngineManager.update_weights`."""
        self._write(
            "weights",
            step,
            version=int(receipt.get("version", step)),
            tensors=int(receipt.get("tensor_count", 0)),
            bytes=int(receipt.get("bytes", 0)),
            seconds=receipt.get("seconds"),
            replicas=int(receipt.get("replicas", 0)),
        )

    def log(self, step: int, numbers: Mapping[str, Any]) -> None:
        """The numbers of a step (or of a validation)."""
        if self._metrics is not None:
            self._metrics.append({"step": step, "data": dict(numbers)})

    def saved(self, step: int, path: Path, best: bool) -> None:
        """The checkpoint of `step` counts from now on."""
        self._write("saved", step, durable=True, path=str(path), best=best)

    def sync(self) -> None:
        """Bring the step's lines to the disk, so that its checkpoint may count."""
        if self._metrics is not None:
            self._metrics.sync()

    def event(self, name: str, step: int, **facts: Any) -> None:
        """Any other event: `validated`, `fault`, `restart`."""
        self._write(name, step, **facts)


def _lock(folder: Path) -> IO[str]:
    """Hold the folder's lock until the returned file is closed; the system frees it when the process dies."""
    stream = (folder / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.seek(0)
        owner = stream.read().strip() or "another process"
        stream.close()
        raise ConfigError(
            f"trainer.default_local_dir={folder} is being written to by another run ({owner}). Wait for it, stop "
            "it, or give this run a folder of its own."
        ) from error
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    stream.flush()
    return stream
