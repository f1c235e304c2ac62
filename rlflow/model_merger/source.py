"""Which checkpoint is meant, and whether it is whole.

A user may name a run folder, a step of it, or the folder of one role within a step:

    RUN/                        -> RUN/global_step_{latest|best|N}/actor
    RUN/global_step_20/         -> RUN/global_step_20/actor
    RUN/global_step_20/critic   as it is
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.checkpoint import MANIFEST, checkpoint_step, list_checkpoints, read_tracker, step_folder, verify_manifest
from rlflow.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

META = "meta.json"
HF_FOLDER = "huggingface"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "lora_adapter"
ADAPTER_META = "lora_train_meta.json"
BEST = "best_checkpoint.json"


@dataclass(frozen=True)
class Source:
    """The folder of one role of a whole checkpoint: shards in `model/`, config and tokenizer in `huggingface/`."""

    folder: Path
    meta: dict[str, Any]

    @property
    def model_folder(self) -> Path:
        """Where the shards are."""
        return self.folder / MODEL_FOLDER

    @property
    def hf_folder(self) -> Path:
        """Where config and tokenizer are."""
        return self.folder / HF_FOLDER

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter was trained beside the weights."""
        return (self.folder / ADAPTER_META).is_file()


def locate(path: Path | str, step: str | None = None, role: str = "actor") -> Path:
    """The role folder that `path` (run, step or role folder) means.

    Args:
        path: what the user named.
        step: "latest", "best" or a number; only a run folder leaves a choice, and there None is the latest.
        role: "actor" or "critic"; a role folder leaves no choice.

    Raises:
        ConfigError: there is no such folder, or it is none of the three.
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder; name a run folder, a global_step_N in it, or an actor folder in that")
    is_run = bool(list_checkpoints(path))
    if step is not None and not is_run:
        raise ConfigError(f"--step {step} chooses among the checkpoints of a run folder, and {path} is none")
    if (path / META).is_file():
        return path
    if is_run:
        path = _choose_step(path, step or "latest")
    elif not path.name.startswith("global_step_"):
        raise ConfigError(
            f"{path} is no run folder (no global_step_N in it), no step (by its name) and no actor folder (no {META})"
        )
    if not (path / role).is_dir():
        roles = sorted(entry.name for entry in path.iterdir() if (entry / META).is_file())
        raise ConfigError(f"{path} has no {role}; it has {', '.join(roles) or 'no folder of a model'}")
    return path / role


def _choose_step(run: Path, step: str) -> Path:
    there = [checkpoint_step(folder) for folder in list_checkpoints(run)]
    if step == "latest":
        tracked = read_tracker(run)
        number = there[0] if tracked is None else tracked
    elif step == "best":
        number = _best_step(run)
    else:
        try:
            number = int(step)
        except ValueError:
            raise ConfigError(f"--step {step} is neither a number nor best nor latest") from None
    if number not in there:
        raise ConfigError(f"{run} has no step {number}; it has {', '.join(map(str, sorted(there)))}")
    return step_folder(run, number)


def _best_step(run: Path) -> int:
    path = run / BEST
    try:
        best = json.loads(path.read_text())
        step = None if best["path"] is None else int(best["step"])
    except FileNotFoundError:
        raise ConfigError(
            f"{run} has no {BEST}: the run did not compare its checkpoints; choose --step latest or a number"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; choose --step latest or a number") from error
    if step is None:
        raise ConfigError(f"{run} has saved none of the steps that it validated; choose --step latest or a number")
    return step


def open_source(folder: Path | str) -> Source:
    """Check that a role folder is whole and holds a model.

    The manifest of its step is verified first, for the files that a merge reads: meta data, shards, config and
    tokenizer, not the optimizer. A role folder that was copied out of its step has no manifest; this is warned of.

    Raises:
        CheckpointError: something is damaged, missing or of another format; the message names the file.
    """
    folder = Path(folder).expanduser().resolve()
    _check_integrity(folder)
    meta = _read_meta(folder)
    if MODEL_FOLDER not in meta["contents"]:
        other = f"; {folder / HF_FOLDER} has the weights already" if "hf_model" in meta["contents"] else ""
        raise CheckpointError(
            f"{folder} holds {', '.join(meta['contents'])}, but no model shards to merge "
            f"(checkpoint.save_contents){other}"
        )
    if not (folder / HF_FOLDER / "config.json").is_file():
        raise CheckpointError(f"{folder / HF_FOLDER / 'config.json'} is missing: nobody knows what model this is")
    return Source(folder, meta)


def _check_integrity(folder: Path) -> None:
    step = folder.parent
    if not (step / MANIFEST).exists() and not step.name.startswith("global_step_"):
        logger.warning("%s stands alone, without the %s of its step: damage may stay unnoticed", folder, MANIFEST)
        return
    parts = [META, f"{MODEL_FOLDER}/", f"{HF_FOLDER}/"]
    if (folder / ADAPTER_META).is_file():
        parts += [f"{ADAPTER_FOLDER}/", ADAPTER_META]
    needed = [f"{folder.name}/{part}" for part in parts]
    problems = verify_manifest(step, below=needed)
    if problems:
        more = f" and {len(problems) - 1} more problems" if len(problems) > 1 else ""
        others = [str(checkpoint_step(entry)) for entry in list_checkpoints(step.parent) if entry != step]
        advice = f" Other steps of this run: {', '.join(others)}." if others else ""
        raise CheckpointError(f"the checkpoint is damaged: {problems[0]}{more}.{advice}")


def _read_meta(folder: Path) -> dict[str, Any]:
    from rlflow.checkpoint.shards import FORMAT, read_json

    if not (folder / META).is_file():
        raise CheckpointError(f"{folder} has no {META}, so it is no checkpoint of an rlflow worker")
    meta = read_json(folder / META)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else meta
        raise CheckpointError(f"{folder / META} has format {found!r}; this version reads {FORMAT!r}")
    return meta
