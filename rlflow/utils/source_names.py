"""What a Python module defines, read from its source: nothing of it is executed.

For checks that must not run a user's code (which may load a model, or hang) just to learn that a name is misspelt.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlflow.compat import our_name
from rlflow.compat_paths import ALIASES, FACADES

_MAKES_NAMES = {"globals", "setattr", "exec", "vars"}


@dataclass(frozen=True)
class SourceNames:
    """Names at the top level of a module.

    Fields:
        classes, functions: defined there.
        others: assigned or imported there.
        open_ended: more may be there than the source shows (`import *`, `__getattr__`, `globals()`).
        registered: string arguments of `@register(...)` decorators.
    """

    classes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    registered: set[str] = field(default_factory=set)
    open_ended: bool = False

    def __contains__(self, name: object) -> bool:
        return self.open_ended or name in self.classes | self.functions | self.others


def read_names(file: Path) -> SourceNames:
    """Names of a file. Raises `SyntaxError` or `OSError` when it cannot be read, `ValueError` for NUL bytes."""
    tree = ast.parse(file.read_bytes(), filename=str(file))
    classes: set[str] = set()
    functions: set[str] = set()
    others: set[str] = set()
    registered: set[str] = set()
    open_ended = False
    for node in _top_level(tree.body):
        if isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.add(node.name)
            open_ended |= node.name == "__getattr__"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            others |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            open_ended |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            others |= _names(node)
            open_ended |= bool(_names(node) & _MAKES_NAMES)
        elif isinstance(node, ast.Expr):
            open_ended |= bool(_names(node) & _MAKES_NAMES)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            registered |= set(_registered(node))
    return SourceNames(classes, functions, others, registered, open_ended)


def find_source(module: str) -> Path | None:
    """Source file of a dotted module name.

    None for one that has no source here (compiled, or made at run time). Raises `ModuleNotFoundError` for one that is
    not there. Its packages are not imported.
    """
    module = our_name(module)
    module = ALIASES.get(module, module)
    if module in FACADES:
        return None
    root, *rest = module.split(".")
    if module in sys.modules:
        origin = getattr(sys.modules[module], "__file__", None)
        return Path(origin) if origin and origin.endswith(".py") else None
    try:
        spec = importlib.util.find_spec(root)
    except ValueError:  # a module without a spec, put into sys.modules by hand
        return None
    if spec is None:
        raise ModuleNotFoundError(f"no module named {root!r}")
    if not rest:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    if spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"{root!r} is not a package, so it has no {module!r}")
    for folder in map(Path, spec.submodule_search_locations):
        place = folder.joinpath(*rest)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
        if place.is_dir() or list(place.parent.glob(f"{place.name}.*.so")):
            return None
    raise ModuleNotFoundError(f"no module named {module!r}")


def _names(node: ast.stmt) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _top_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


def _registered(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            called = decorator.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "register":
                for argument in (*decorator.args, *(keyword.value for keyword in decorator.keywords)):
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield argument.value
