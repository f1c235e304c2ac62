"""TensorBoard event files in $TENSORBOARD_DIR, or tensorboard_log/{project}/{experiment}."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import numbers


class TensorboardBackend:
    """Writes scalars and validation samples as text."""

    def __init__(self, info: RunInfo) -> None:
        default = Path("tensorboard_log") / info.project / info.experiment
        self.folder = Path(os.environ.get("TENSORBOARD_DIR") or default).expanduser()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Steps that the interrupted run wrote after its checkpoint are hidden: they are written again.
        self._purge = info.resumed_from + 1 if info.resumed_from else None
        self._writer: Any = None

    def log(self, data: dict[str, Any], step: int) -> None:
        """One scalar a number; NaN and infinity are drawn as such."""
        writer = self._open()
        for name, value in numbers(data).items():
            writer.add_scalar(name, value, global_step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """A Markdown text of the samples under `val/generations`."""
        blocks = [
            f"**score {'invalid' if score is None else f'{score:g}'}**\n\n{_code(prompt)}\n\n{_code(output)}"
            for prompt, output, score in samples
        ]
        self._open().add_text("val/generations", "\n\n---\n\n".join(blocks), global_step=step)

    def finish(self, exit_code: int) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=self._purge)
        return self._writer


def _code(text: str) -> str:
    """An indented block: the text cannot end it, whatever it holds."""
    return "\n".join(f"    {line}" for line in text.splitlines())
