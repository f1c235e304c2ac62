"""Weights & Biases. Without a key it records offline (`wandb sync` sends it later); WANDB_MODE decides otherwise.

A server that cannot be reached when the run starts means offline too. A resumed run goes on under its old id; steps
it repeats are not drawn twice, because wandb takes a step only once.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from rlflow.observe.feed import notice
from rlflow.observe.tracking.backend import RunInfo, Sample
from rlflow.observe.tracking.values import numbers


class WandbBackend:
    """One wandb run."""

    def __init__(self, info: RunInfo) -> None:
        import wandb

        self._wandb: Any = wandb
        self._columns: list[str] = []
        self._rows: list[list[Any]] = []
        mode = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        try:
            self.run = self._init(info, mode)
        except wandb.Error as error:
            if mode != "online":
                raise
            notice(f"wandb cannot be reached ({str(error).splitlines()[0]}); recording offline")
            mode, self.run = "offline", self._init(info, "offline")
        info.remember("wandb", self.run.id)
        if mode == "offline":
            folder = Path(self.run.dir).parent
            notice(f"wandb records offline in {folder} (no key, or WANDB_MODE); to send it: wandb sync {folder}")
        elif self.run.url:
            notice(f"wandb: {self.run.url}")

    def _init(self, info: RunInfo, mode: str) -> Any:
        settings: dict[str, Any] = {"console": os.environ.get("WANDB_CONSOLE", "off"), "silent": True}
        if info.wandb_proxy:
            settings["https_proxy"] = info.wandb_proxy
        run_id = os.environ.get("WANDB_RUN_ID") or info.remembered("wandb")
        return self._wandb.init(
            project=info.project,
            name=info.experiment,
            entity=os.environ.get("WANDB_ENTITY"),
            config=info.config,
            mode=mode,
            id=run_id,
            # Offline there is nobody to ask whether the run exists; `wandb sync --append` joins the parts.
            resume="allow" if run_id and mode == "online" else None,
            settings=self._wandb.Settings(**settings),
        )

    def log(self, data: dict[str, Any], step: int) -> None:
        """Numbers (NaN and infinity too), and wandb's own objects such as tables."""
        own = {name: value for name, value in data.items() if type(value).__module__.split(".")[0] == "wandb"}
        self.run.log({**numbers(data), **own}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """One table that grows by a row each time: step, then input, output and score of each sample."""
        if not self._columns:
            parts = [[f"input_{i}", f"output_{i}", f"score_{i}"] for i in range(1, len(samples) + 1)]
            self._columns = ["step", *(name for part in parts for name in part)]
        row: list[Any] = [step, *(cell for sample in samples for cell in sample)]
        width = len(self._columns)
        self._rows.append((row + [None] * width)[:width])
        # wandb sends a table once; a longer one is a new object.
        table = self._wandb.Table(columns=self._columns, data=self._rows, allow_mixed_types=True)
        self.run.log({"val/generations": table}, step=step)

    def finish(self, exit_code: int) -> None:
        """Send what is left."""
        self.run.finish(exit_code=exit_code)


def has_key() -> bool:
    """Whether wandb could log in without asking: a key in the environment, or one that `wandb login` left."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]:
        try:
            if netrc.netrc(str(path.expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
