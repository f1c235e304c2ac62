"""An update whose gradient is not finite, as the run tells of it: journal, terminal, and the error that ends it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.observe.feed import notice
from rlflow.single_controller.errors import WorkerError
from rlflow.trainer.ppo.utils import run_folder
from rlflow.utils.errors import NonFiniteGradientError

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

FOLDER = "nonfinite"


@contextmanager
def watched(trainer: PPOTrainer, role: str, metrics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Around an update of `role`; yields the options that say where the mini-batch goes.

    The block merges the update's metrics into `metrics`.

    Raises:
        NonFiniteGradientError: the workers stopped for one.
    """
    folder = run_folder(trainer.config) / FOLDER / f"step_{trainer.global_steps}_{role}"
    for old in _dumps(folder):  # of a run that died, whose step is done again
        shutil.rmtree(old, ignore_errors=True)
    try:
        yield {"nonfinite_dump_folder": str(folder), "global_steps": trainer.global_steps}
    except WorkerError as error:
        if isinstance(error.__cause__, NonFiniteGradientError):
            _note(trainer, role, folder, None)
            # Ray's copy of the error carries the traceback of the worker; its first line is the message.
            cause = getattr(error.__cause__, "cause", error.__cause__)
            raise NonFiniteGradientError(f"{role}, step {trainer.global_steps}: {cause}") from error
        raise
    skipped = metrics.get(f"{role}/skipped_steps")
    count = 0 if skipped is None else int(skipped.aggregate())
    if count:
        _note(trainer, role, folder, count)


def _note(trainer: PPOTrainer, role: str, folder: Path, skipped: int | None) -> None:
    dumps = [str(dump) for dump in _dumps(folder)]
    text = f"step {trainer.global_steps}: the gradient of the {role} is not finite"
    text += "" if skipped is None else f", {skipped} optimizer steps left out"
    text += f"; `rlflow replay {dumps[0]}` says where it comes from" if dumps else ""
    trainer.recorder.event(
        "fault", trainer.global_steps, what="nonfinite_gradient", role=role, skipped=skipped, dumps=dumps, text=text
    )
    notice(text)


def _dumps(folder: Path) -> list[Path]:
    """The complete dumps of one step and role, which have numbers behind the name."""
    return sorted(path.parent for path in folder.parent.glob(f"{folder.name}_*/dump.json"))
