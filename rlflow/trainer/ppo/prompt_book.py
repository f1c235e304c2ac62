"""What became of the prompts that were handed to the agent loops: for the journal, and for those that start again.

issued ──> ended or dropped (a reason) ──> trained, or left out with the reason
   ▲            │
   └── again ───┘ its rows were lost with a storage unit
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rlflow.observe.recorder import RunRecorder
from rlflow.trainer.ppo.issued_prompts import IssuedPrompts

logger = logging.getLogger(__name__)


class PromptBook:
    """Follows the prompts of a step from their submission to their end.

    Args:
        recorder: told of each change.
    """

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder
        self._kept = IssuedPrompts()
        # Train prompts of this step -> why they are not trained on, if they are not.
        self._open: dict[str, str] = {}

    @property
    def of_this_step(self) -> list[str]:
        """Train prompts that were issued since the last `trained`."""
        return list(self._open)

    def issued(self, step: int, partition: str, batch: Any, uids: Sequence[str], sessions: int, version: int) -> None:
        """Prompts go to the agent loops, row i of `batch` is `uids[i]`; `version` is that of the weights."""
        if partition == "train":
            self._open.update(dict.fromkeys(uids, "its end was not seen"))
        self._recorder.issued(step, partition, list(uids), sessions, version)
        self._kept.add(batch, uids)

    def again(self, step: int, partition: str, uids: Sequence[str]) -> list[Any]:
        """These lost trajectories with a storage unit; returns batches of them to submit."""
        text = f"a TransferQueue storage unit died; {len(uids)} prompts start again: {', '.join(uids[:8])}"
        logger.error("%s", text)
        self._recorder.event("restart", step, what=f"prompts of {partition}", text=text)
        return self._kept.batches(uids)

    def dropped(self, uid: str, reason: str) -> None:
        """A prompt of this step will not be trained on."""
        self._open[uid] = reason

    def ended(self, step: int, partition: str, uid: str, tag: dict[str, Any]) -> None:
        """All sessions of a prompt ended; `tag` is that of its marker."""
        if partition == "train" and uid in self._open:
            self._open[uid] = str(tag.get("failed") or "its sessions left no trajectory")
        self._recorder.finished(step, partition, uid, tag)

    def trained(self, step: int, uids: Sequence[str], rows: int) -> None:
        """The step is over: these were trained on, all others that were issued in it were not."""
        self._recorder.trained(step, list(uids), rows, version=step)
        for uid in uids:
            self._open.pop(uid, None)
        for uid, reason in self._open.items():
            self._recorder.dropped(step, [uid], reason)
        self.forget([*uids, *self._open])
        self._open = {}

    def forget(self, uids: Iterable[str]) -> None:
        """These will not start again."""
        self._kept.forget(uids)
