"""Public module paths of the reference's layout, for users' code that imports them.

The tables are in `rlflow.compat_paths`. Importing an old path gives the very module it stands for (not a copy), so that
registries and classes are the same objects. Where two layouts differ the house's own path is the one to use in new
code.

The reference's own package name works too. In files that are loaded by path (`loads_as_ours`) `import verl...` always
means this package: only their `__import__` is another one, `sys.modules` is left alone. Elsewhere `verl` is this
package where no `verl` is installed.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from rlflow.compat_paths import ALIASES, FACADES, UNBUILT

REFERENCE, OURS = "verl", "rlflow"
_PATHS = {**ALIASES, **dict.fromkeys(FACADES, ""), **dict.fromkeys(UNBUILT, "")}
# Packages that exist only as parents of an old path.
PARENTS = {".".join(name.split(".")[:count]) for name in _PATHS for count in range(2, name.count(".") + 1)} - set(
    _PATHS
)


def our_name(name: str) -> str:
    """A dotted name with this package in the place of the reference's; any other name as it is."""
    return OURS + name[len(REFERENCE) :] if name == REFERENCE or name.startswith(f"{REFERENCE}.") else name


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


class _NamesLoader(importlib.abc.Loader):
    """A module whose names are looked up when they are asked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        setattr(module, "__getattr__", self._look_up)  # noqa: B010 - a module's own hook, which mypy takes for ours

    def _look_up(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.name!r} has no attribute {name!r}")
        if self.name in UNBUILT:
            raise ImportError(f"{self.name}.{name}: not in this version: {UNBUILT[self.name]}")
        for target in FACADES.get(self.name, ()):
            module = importlib.import_module(target)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.name!r} has no attribute {name!r}")


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds the old paths. It is asked first: an old path below one of our packages would else be loaded twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in ALIASES:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(ALIASES[fullname]))
        if fullname in FACADES or fullname in UNBUILT:
            return importlib.machinery.ModuleSpec(fullname, _NamesLoader(fullname), is_package=True)
        if fullname.startswith(f"{REFERENCE}.") and sys.modules.get(REFERENCE) is sys.modules[OURS]:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(our_name(fullname)))
        return None


class LastFinder(importlib.abc.MetaPathFinder):
    """Asked last: packages that exist only as parents of old paths (most parents are real), and an absent reference."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in PARENTS:
            return importlib.machinery.ModuleSpec(fullname, _NamesLoader(fullname), is_package=True)
        if fullname == REFERENCE:
            return importlib.machinery.ModuleSpec(fullname, _AliasLoader(OURS))
        return None


def install() -> None:
    """Make the old paths importable; idempotent."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
        sys.meta_path.append(LastFinder())


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,  # noqa: A002 - the names of the built-in's arguments
    locals: Mapping[str, object] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    return builtins.__import__(name if level else our_name(name), globals, locals, fromlist or (), level)


def loads_as_ours(module: ModuleType) -> None:
    """Let `import verl...` mean this package in a module that is about to be executed, also later in its functions."""
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
