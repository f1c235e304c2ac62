"""Load users' objects from a file path, `file://`, `pkg://package.module` or a dotted name.

A module loaded from a file is named after its absolute path (not after `hash()`), so that every process of a run
gives it the same name, and it is registered in `sys.modules` so that its classes pickle by reference.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlflow.utils.errors import ConfigError


def load_module(path: str, module_name: str | None = None) -> ModuleType:
    """Import a module from `pkg://a.b`, `file:///x/y.py` or a file path.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: the module raised while it was executed (the cause is chained).
    """
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://").strip("/").replace("/", "."))
    file = Path(path.removeprefix("file://")).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no Python file at {file}")
    name = module_name or f"rlflow_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{file} is not a Python module; expected a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"importing {file} failed: {type(error).__name__}: {error}") from error
    return module


def load_extern_object(path: str, name: str) -> Any:
    """The attribute `name` of the module at `path`; AttributeError lists what the module offers."""
    module = load_module(path)
    if not hasattr(module, name):
        public = sorted(n for n, v in vars(module).items() if not n.startswith("_") and callable(v))
        raise AttributeError(f"{path} has no {name!r}; it defines {', '.join(public) or 'nothing public'}")
    return getattr(module, name)


def load_class_from_fqn(fqn: str, description: str = "class") -> type:
    """The class named by `package.module.Class`; the error names what was asked and what was tried."""
    module_name, _, class_name = fqn.rpartition(".")
    if not module_name:
        raise ConfigError(f"{description} {fqn!r} is not a dotted name; expected package.module.Class")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{description} {fqn!r} cannot be loaded: {error}") from error


def import_external_libs(libs: str | list[str] | None) -> None:
    """Import modules for their side effects (registrations): a dotted name, a `.py` path, or a list of them."""
    for lib in [libs] if isinstance(libs, str) else (libs or []):
        if lib.endswith(".py") or lib.startswith(("pkg://", "file://")):
            load_module(lib)
        else:
            importlib.import_module(lib)
