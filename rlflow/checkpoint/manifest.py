"""The list of a checkpoint's files with sizes and SHA-256 hashes: what "whole" means.

`manifest.json`: {"format": 1, "files": {"actor/model/index.json": {"size": 1234, "sha256": "..."}, ...}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            yield path


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path | str) -> Path:
    """Describe every file below `folder`; returns the manifest's path."""
    folder = Path(folder)
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in _files(folder)
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1, sort_keys=True) + "\n")
    return manifest


def verify_manifest(folder: Path | str, *, hashes: bool = True, below: Sequence[str] = ()) -> list[str]:
    """What is wrong with a checkpoint, one line each naming the file; an empty list means it is whole.

    Args:
        folder: a folder with a manifest.
        hashes: False compares sizes only, which finds missing and truncated files but no flipped byte.
        below: check only the files whose path in the manifest starts with one of these, and that each names one.
    """
    folder = Path(folder)
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text())
        files = dict(manifest["files"])
        if manifest["format"] != FORMAT:
            return [f"{folder / MANIFEST}: format {manifest['format']} is not {FORMAT}"]
    except FileNotFoundError:
        return [f"{folder / MANIFEST}: missing"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder / MANIFEST}: unreadable ({error})"]
    problems = [
        f"{folder / MANIFEST}: names no file {prefix}" + ("..." if prefix.endswith("/") else "")
        for prefix in below
        if not any(name.startswith(prefix) for name in files)
    ]
    if below:
        files = {name: entry for name, entry in files.items() if name.startswith(tuple(below))}
    for name, entry in sorted(files.items()):
        problem = _check(folder / name, entry, hashes)
        if problem:
            problems.append(f"{folder / name}: {problem}")
    return problems


def _check(path: Path, entry: dict[str, Any], hashes: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != entry["size"]:
            return f"has {size} bytes, should have {entry['size']}"
        if hashes and _sha256(path) != entry["sha256"]:
            return "its content changed since it was written (sha256)"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error})"
    return None
