"""Stand-in for SGLang's CUDA kernels on a machine that cannot load them: every name imports, every call raises.

SGLang's CPU engine imports names of `sgl_kernel` when its modules load, and calls none of them for a dense model: no
torch operator of that name exists, so each layer takes its plain PyTorch form. A call that reaches this file means
that a model or an option needs a real kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

# SGLang has a fallback for these, which it takes when they cannot be imported.
_LEFT_OUT = frozenset({"sgl_kernel.scalar_type"})


def _absent(name: str) -> Callable[..., NoReturn]:
    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} needs the sgl_kernel package, which has no build for this machine.")

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


def _names_of(module: str) -> Callable[[str], Any]:
    def get(name: str) -> Any:
        if name.startswith("__"):  # what the import system asks for; absent is the truth
            raise AttributeError(name)
        return _absent(f"{module}.{name}")

    return get


class _AnySubmodule(MetaPathFinder, Loader):
    """Makes `import sgl_kernel.<anything>` work."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(f"{__name__}.") and name not in _LEFT_OUT:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _names_of(spec.name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


__getattr__ = _names_of(__name__)
sys.meta_path.append(_AnySubmodule())
