"""Checkpoints of a run, and going on from one.

    {default_local_dir}/
        latest_checkpointed_iteration.txt      the newest whole step; replaced atomically, last
        global_step_{k}/
            actor/, critic/                    the worker groups' parts, one file set for any world size
            data.pt                            the data cursor: the trained frontier
            trainer_state.json                 step, KL coefficient
            manifest.json                      sizes and hashes of all files; without it the folder is not a checkpoint

A step folder appears under its name only when it is complete, and when the numbers of its step are on the disk.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.checkpoint import (
    PendingDirectory,
    find_latest_checkpoint,
    list_checkpoints,
    prune,
    read_tracker,
    remove_leftovers,
    step_folder,
    verify_manifest,
    write_tracker,
)
from rlflow.observe.feed import notice
from rlflow.observe.journal import METRICS, read_lines
from rlflow.single_controller.errors import WorkerError
from rlflow.trainer.ppo.background_save import PreparedCheckpoint
from rlflow.trainer.ppo.best import best_steps, forget_best_after, mark_best, mark_saved
from rlflow.trainer.ppo.trajectories import remove_trajectories_after
from rlflow.trainer.ppo.utils import run_folder
from rlflow.utils.errors import CheckpointError, RlflowError

if TYPE_CHECKING:
    from rlflow.trainer.ppo.trainer_base import PPOTrainer

logger = logging.getLogger(__name__)

SIGNALLED = 128
AFTER_SIGNAL_S = 3.0
AFTER_ERROR_S = 60.0


def prepare_checkpoint(trainer: PPOTrainer) -> PreparedCheckpoint:
    """Write the run's state after the current step, whole and on the disk, under a name that does not count yet.

    A save before it that goes on in the background is waited for, and counts from then on. With `checkpoint.async_save`
    the worker groups copy their state to memory; the disk follows.
    """
    import torch

    finish_saving(trainer, wait=True)
    step = trainer.global_steps
    pending = PendingDirectory(step_folder(run_folder(trainer.config), step))
    marks: list[Path] = []
    with pending.explained():
        for name, group in _saved_groups(trainer):
            marks += _save_group(group, pending.work / name, step)
        torch.save(trainer.feed.loader.state_dict(), pending.work / "data.pt")
        state: dict[str, Any] = {"global_step": step, "kl_controller": None}
        if trainer.kl_controller is not None:
            state["kl_controller"] = trainer.kl_controller.state_dict()
        (pending.work / "trainer_state.json").write_text(json.dumps(state, indent=2))
    return PreparedCheckpoint(pending, step, marks, float(trainer.config.trainer.call_timeout_s))


def _save_group(group: Any, folder: Path, step: int) -> list[Path]:
    """Let a worker group write its part; returns the files that tell the end of what goes on in the background.

    What one of its processes could not write is an error of this process too.

    Raises:
        OSError, CheckpointError: names the rank.
    """
    try:
        return [Path(mark) for mark in group.save_checkpoint(str(folder), None, step, None) if mark is not None]
    except WorkerError as error:
        cause = getattr(error.__cause__, "cause", error.__cause__)
        told = str(error).splitlines()[0]
        if isinstance(cause, OSError):
            raise OSError(cause.errno, told) from error
        if isinstance(cause, CheckpointError):
            raise CheckpointError(told) from error
        raise


def commit_checkpoint(trainer: PPOTrainer, prepared: PreparedCheckpoint, metrics: dict[str, Any]) -> None:
    """Make a prepared checkpoint the latest, and let old ones go; one that is still being written later.

    What the step reported is brought to the disk first. The tracker file comes last: a run that dies before it goes on
    from the checkpoint before this one and does the step again.
    """
    try:
        trainer.dumps.flush()
        trainer.recorder.sync()
    finally:
        try:
            # What the step was worth is noted now; that it was saved, once it is.
            mark_best(run_folder(trainer.config), prepared.step, metrics, saved=False, config=trainer.config)
        finally:
            trainer.saving = prepared
            finish_saving(trainer, wait=not prepared.in_background)


def finish_saving(trainer: PPOTrainer, *, wait: bool, timeout_s: float | None = None) -> None:
    """Give a save that is completely on the disk its name; with `wait` until it is.

    Args:
        trainer: whose `saving` it is; None: nothing is being saved.
        wait: else a save that goes on is left alone.
        timeout_s: the longest wait; a save that is not done by then is given up. None: as long as a call may take.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    saving = trainer.saving
    if saving is None or not (wait or saving.done()):
        return
    try:
        complete = saving.result(timeout_s)
    finally:
        trainer.saving = None
    if not saving.claim():
        return
    if not complete:
        notice(f"the checkpoint of step {saving.step} was not completely on the disk when the run ended; it is lost")
        return
    root, config = saving.pending.final.parent, trainer.config.trainer
    saving.pending.commit()
    best = mark_saved(root, saving.step, trainer.config)
    trainer.recorder.saved(saving.step, saving.pending.final, best=best)
    write_tracker(root, saving.step)
    keep = to_keep(config)
    if keep:
        prune(root, keep, protect=best_steps(root, trainer.config))


def finish_at_end(trainer: PPOTrainer, exit_code: int) -> None:
    """A save that is under way when the run ends gets some time: little after a signal, whose clean-up has a bound."""
    try:
        finish_saving(trainer, wait=True, timeout_s=AFTER_SIGNAL_S if exit_code > SIGNALLED else AFTER_ERROR_S)
    except RlflowError as error:
        logger.warning("the save that was under way at the end of the run failed: %s", error)


def to_keep(config: Any) -> int | None:
    """How many checkpoints stay: a step holds both models, so the larger number counts; None: all."""
    limits = (config.max_actor_ckpt_to_keep, config.max_critic_ckpt_to_keep)
    return max((int(limit) for limit in limits if limit), default=None)


def _saved_groups(trainer: PPOTrainer) -> list[tuple[str, Any]]:
    """Folder name and worker group of every trained model."""
    runtime = trainer.runtime
    critic = [] if runtime.critic_wg is None else [("critic", runtime.critic_wg)]
    return [("actor", runtime.actor_wg), *critic]


def load_trainer_checkpoint(trainer: PPOTrainer) -> int:
    """Restore workers, data cursor and controller state; returns the step (0 = from scratch).

    What the run folder has of later steps is removed, unless this run only validates.
    """
    folder = _checkpoint_to_load(trainer.config)
    step = 0 if folder is None else _restore(trainer, folder)
    if not trainer.config.trainer.val_only:
        go_back(run_folder(trainer.config), step, trainer.config)
    return step


def go_back(root: Path, step: int, config: Any) -> None:
    """Take marks and records in a run folder back to `step`; journal and numbers are the recorder's part."""
    forget_best_after(root, step, config)
    remove_trajectories_after(root, step)
    if step and read_tracker(root) is None and (root / METRICS).exists():
        # The first checkpoint counts by its name; a run that died right after it was given has not marked it yet.
        numbers = [line["data"] for line in read_lines(root / METRICS) if line["step"] == step]
        if numbers:
            mark_best(root, step, numbers[-1], saved=step_folder(root, step).is_dir(), config=config)


def _restore(trainer: PPOTrainer, folder: Path) -> int:
    import torch

    state = json.loads((folder / "trainer_state.json").read_text())
    for name, group in _saved_groups(trainer):
        group.load_checkpoint(str(folder / name))
    # weights_only: the cursor is plain numbers, and nothing else is unpickled.
    trainer.feed.loader.load_state_dict(torch.load(folder / "data.pt", weights_only=True))
    if trainer.kl_controller is not None and state["kl_controller"]:
        trainer.kl_controller.load_state_dict(state["kl_controller"])
    notice(f"resumed from {folder} (step {state['global_step']})")
    return int(state["global_step"])


def _checkpoint_to_load(config: Any) -> Path | None:
    mode = config.trainer.resume_mode
    if mode == "disable":
        return None
    if mode == "auto":
        root = run_folder(config)
        remove_leftovers(root)
        found = find_latest_checkpoint(root)
        if found is None and list_checkpoints(root):
            raise CheckpointError(
                f"{root} has checkpoints ({', '.join(path.name for path in list_checkpoints(root)[-3:])}), but none is "
                "whole; training from step 0 would overwrite them. Repair or move them away, or set "
                "trainer.resume_mode=disable to start over."
            )
        return found
    folder = Path(config.trainer.resume_from_path).expanduser().resolve()
    problems = verify_manifest(folder)
    if problems:
        raise CheckpointError(
            f"trainer.resume_from_path={folder} is damaged: {'; '.join(problems[:3])}. Choose another step, or "
            "trainer.resume_mode=auto to take the newest whole one."
        )
    return folder
