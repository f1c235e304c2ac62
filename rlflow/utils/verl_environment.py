"""Environment variables of verl: they become ours, or are named as without effect."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

# Variables that something here reads, without their prefix.
READ = frozenset(
    {
        "AUTO_PADDING",
        "ENGINE_DEVICE",
        "ENGINE_VENDOR",
        "FILE_LOGGER_PATH",
        "FILE_LOGGER_ROOT",
        "FORCE_DEVICE",
        "FULL_DETERMINISM",
        "LOGGING_LEVEL",
        "USE_EXTERNAL_MODULES",
    }
)
INSTEAD = {
    "DATAPROTO_SERIALIZATION_METHOD": "a DataProto has one format, of raw buffers",
    "PLATFORM": "trainer.device says it",
    "REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": "a stall report says what is waited for (trainer.stall_timeout_s)",
    "SEED": "rollout.seed, data.seed and fsdp_config.seed are the seeds",
    "SFT_LOGGING_LEVEL": "RLFLOW_LOGGING_LEVEL is the level of all jobs",
    "USE_EXTERNAL_PLUGINS": "model.external_lib names modules to import",
    "USE_MODELSCOPE": "model.path takes a folder or a hub id of Hugging Face; download the model first",
}


def adopt_verl_variables(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set RLFLOW_X where only VERL_X is set and something reads it. Returns a notice for each VERL_X."""
    notices = []
    for name in sorted(name for name in environ if name.startswith("VERL_")):
        short = name.removeprefix("VERL_")
        ours = f"RLFLOW_{short}"
        if short not in READ:
            why = INSTEAD.get(short, "nothing reads it")
            notices.append(f"{name} has no effect: {why}")
        elif ours not in environ:
            environ[ours] = environ[name]
            notices.append(f"{name} counts as {ours}")
    return notices


def add_external_modules(config: Any, environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Let every process of a run import the modules that RLFLOW_USE_EXTERNAL_MODULES names, as those of external_lib.

    Args:
        config: the composed `DictConfig`, changed in place.
        environ: the environment.

    Returns:
        A notice; None when it names none.
    """
    text = environ.get("RLFLOW_USE_EXTERNAL_MODULES") or ""
    modules = [name.strip() for name in text.split(",") if name.strip()]
    if not modules:
        return None
    model = config.actor_rollout_ref.model
    there = model.external_lib
    model.external_lib = [*([there] if isinstance(there, str) else there or []), *modules]
    return f"RLFLOW_USE_EXTERNAL_MODULES: {', '.join(modules)} joined actor_rollout_ref.model.external_lib"
