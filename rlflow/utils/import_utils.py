"""Load users' objects from a file path, `file://`, `pkg://package.module` or a dotted name.

A module loaded from a file is named after its absolute path (not after `hash()`), so that every process of a run
gives it the same name, and it is registered in `sys.modules` so that its classes pickle by reference.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlflow.compat import loads_as_ours, our_name
from rlflow.utils.errors import ConfigError

_PACKAGE = str(Path(__file__).resolve().parents[1])


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name without code (./wandb of offline runs) is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load_module(path: str, module_name: str | None = None) -> ModuleType:
    """Import a module from `pkg://a.b`, `file:///x/y.py` or a file path.

    Raises:
        FileNotFoundError: no such file.
        RuntimeError: the module raised while it was executed, or ended the process (the cause is chained).
    """
    if path.startswith("pkg://"):
        package = our_name(path.removeprefix("pkg://").strip("/").replace("/", "."))
        try:
            return importlib.import_module(package)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"importing {package} failed: {_fault(error)}") from error
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
    loads_as_ours(module)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise RuntimeError(f"importing {file} failed: {_fault(error)}") from error
    return module


def _fault(error: BaseException) -> str:
    """What went wrong and, as far as known, in which line of the user's code."""
    if isinstance(error, SyntaxError):  # which is raised before any line of the file runs
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = (*(f"{folder}/" for folder in [*installed, _PACKAGE]), "<frozen ")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def load_extern_object(path: str, name: str) -> Any:
    """The attribute `name` of the module at `path`; AttributeError lists what the module offers."""
    module = load_module(path)
    if not hasattr(module, name):
        public = sorted(n for n, v in vars(module).items() if not n.startswith("_") and callable(v))
        raise AttributeError(f"{path} has no {name!r}; it defines {', '.join(public) or 'nothing public'}")
    return getattr(module, name)


def load_class_from_fqn(fqn: str, description: str = "class") -> type:
    """The class named by `package.module.Class`; the error names what was asked and what was tried."""
    module_name, _, class_name = our_name(fqn).rpartition(".")
    if not module_name:
        raise ConfigError(f"{description} {fqn!r} is not a dotted name; expected package.module.Class")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{description} {fqn!r} cannot be loaded: {error}") from error


def import_external_libs(libs: Any) -> None:
    """Import modules for their side effects (registrations): a dotted name, a `.py` path, or a list of them.

    Raises:
        ConfigError: one of them is no name, is not there, or failed while it was imported, and in which line.
    """
    if libs is None:
        return
    several = isinstance(libs, Iterable) and not isinstance(libs, str)
    for lib in libs if several else [libs]:
        try:
            if not isinstance(lib, str):
                raise TypeError(f"{lib!r} is a {type(lib).__name__}, not a name")
            is_path = lib.endswith(".py") or lib.startswith(("pkg://", "file://"))
            load_module(lib if is_path else f"pkg://{lib}")
        except (TypeError, OSError, RuntimeError, ConfigError) as error:
            raise ConfigError(
                f"model.external_lib={lib} cannot be imported: {error}\n"
                "    try:    a module name that Python finds here, or the path of a .py file, without such an error"
            ) from error
