"""What a tracker is, and what it is told about the run."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlflow.utils.redact import redact

Sample = tuple[str, str, "float | None"]
MEMORY = "trackers.json"
# Trackers start side by side, each in its thread.
_memory_lock = threading.Lock()


class Backend(Protocol):
    """A tracker of one run. Its constructor takes a `RunInfo`."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Record the numbers of a step; what is no number is left out."""

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record validation samples (input, output, score); score None = no valid reward."""

    def finish(self, exit_code: int) -> None:
        """Close; called once."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker may show of a run.

    Fields:
        project, experiment: names.
        config: the resolved configuration as plain containers, secrets redacted.
        wandb_proxy: `trainer.wandb_proxy`.
        folder: the run folder, None when there is none.
        resumed_from: step of the checkpoint the run goes on from (trackers then continue their earlier run); 0 for a
            new run.
    """

    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)
    wandb_proxy: str | None = None
    folder: Path | None = None
    resumed_from: int = 0

    @classmethod
    def of(cls, project: str, experiment: str, config: Any = None, resumed_from: int = 0) -> RunInfo:
        """From a `DictConfig`, a mapping or None."""
        plain = _plain_config(config)
        found = plain.get("trainer")
        trainer: dict[str, Any] = dict(found) if isinstance(found, Mapping) else {}
        folder = trainer.get("default_local_dir")
        return cls(
            project=project,
            experiment=experiment,
            config=redact(plain),
            wandb_proxy=trainer.get("wandb_proxy"),
            folder=Path(folder).expanduser() if folder else None,
            resumed_from=resumed_from,
        )

    def remembered(self, tracker: str) -> str | None:
        """The id that this tracker gave the run before it was interrupted; None for a new run."""
        if not self.resumed_from or self.folder is None:
            return None
        return _read_memory(self.folder).get(tracker)

    def remember(self, tracker: str, run_id: str) -> None:
        """Keep the id for a resumed run, in `trackers.json` of the run folder."""
        if self.folder is None:
            return
        with _memory_lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / MEMORY
            scratch = path.with_suffix(".tmp")
            scratch.write_text(json.dumps({**_read_memory(self.folder), tracker: run_id}, indent=2))
            os.replace(scratch, path)


def _read_memory(folder: Path) -> dict[str, str]:
    try:
        memory = json.loads((folder / MEMORY).read_text())
    except (OSError, ValueError):  # not there, or torn: a resumed run then shows up as a new one
        return {}
    return memory if isinstance(memory, dict) else {}


def _plain_config(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    from omegaconf import OmegaConf

    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    return dict(config) if isinstance(config, Mapping) else {}
