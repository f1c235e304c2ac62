"""Trackio: local by default (`trackio show`), or the Space of $TRACKIO_SPACE_ID. A run of the same name goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import numbers


class TrackioBackend:
    """One Trackio run."""

    def __init__(self, info: RunInfo) -> None:
        import trackio

        self._trackio = trackio
        # Its own measurements of the machine would be those of the controller, which holds no model.
        self.run = trackio.init(
            info.project,
            name=info.experiment,
            config=info.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        notice(f'trackio: to look at it: trackio show --project "{info.project}"')

    def log(self, data: dict[str, Any], step: int) -> None:
        """Numbers, NaN and infinity too."""
        self.run.log(dict(numbers(data)), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A table of the samples, and each as a conversation."""
        rows = [[step, prompt, output, score] for prompt, output, score in samples]
        table = self._trackio.Table(columns=["step", "input", "output", "score"], data=rows)
        self.run.log({"val/generations": table}, step=step)
        for number, (prompt, output, score) in enumerate(samples):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
            trace = self._trackio.Trace(messages=messages, metadata={"score": score, "step": step})
            self.run.log({f"val/sample_{number + 1}": trace}, step=step)

    def finish(self, exit_code: int) -> None:
        """Write what is left."""
        self.run.finish()
