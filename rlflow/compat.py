"""Public module paths of the reference's layout, for users' code that imports them.

One table, old path -> ours. Importing an old path gives the very module it stands for (not a copy), so that
registries and classes are the same objects. Where two layouts differ the house's own path is the one to use in new
code.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

ALIASES: dict[str, str] = {
    "rlflow.base_config": "rlflow.config.base",
    "rlflow.experimental.agent_loop": "rlflow.agent_loop",
    "rlflow.experimental.agent_loop.agent_loop": "rlflow.agent_loop",
    "rlflow.experimental.reward_loop": "rlflow.reward_loop",
    "rlflow.experimental.reward_loop.reward_manager": "rlflow.reward_loop.reward_manager",
    "rlflow.trainer.config": "rlflow.config",
    "rlflow.trainer.config.algorithm": "rlflow.config.algorithm",
    "rlflow.trainer.ppo.v1": "rlflow.trainer.ppo",
    "rlflow.trainer.ppo.v1.replay_buffer": "rlflow.trainer.ppo.replay_buffer",
    "rlflow.trainer.ppo.v1.trainer_base": "rlflow.trainer.ppo.trainer_base",
    "rlflow.trainer.ppo.v1.trainer_sync": "rlflow.trainer.ppo.trainer_sync",
    "rlflow.trainer.ppo.v1.utils": "rlflow.trainer.ppo.metrics_aggregator",
    "rlflow.utils.config": "rlflow.config.base",
    "rlflow.utils.dataset.rl_dataset": "rlflow.data",
    "rlflow.utils.reward_score": "rlflow.rewards",
    "rlflow.utils.tracking": "rlflow.observe.tracking",
    "rlflow.utils.transferqueue_utils": "rlflow.single_controller.bridge",
    "rlflow.workers.config": "rlflow.config",
    "rlflow.workers.utils.losses": "rlflow.workers.losses",
}
# Packages that exist only as parents of an old path.
PARENTS = {name.rpartition(".")[0] for name in ALIASES} - set(ALIASES) - set(ALIASES.values())


class _AliasLoader(importlib.abc.Loader):
    def __init__(self, target: str) -> None:
        self.target = target

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The target is already executed; the import system has just put the alias's spec on it.
        module.__spec__ = self.own_spec


class _ParentLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds the old paths. It is asked first: an old path below one of our packages would else be loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in ALIASES:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(ALIASES[fullname]))
        return None


class ParentFinder(importlib.abc.MetaPathFinder):
    """Finds packages that exist only as parents of old paths; asked last, since most parents are real packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in PARENTS:
            return importlib.machinery.ModuleSpec(fullname, _ParentLoader(), is_package=True)
        return None


def install() -> None:
    """Make the old paths importable; idempotent."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
        sys.meta_path.append(ParentFinder())
