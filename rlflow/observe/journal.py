"""The journal of a run: `events.jsonl` in its folder, one JSON object a line, only ever appended to.

    {"event": "issued", "time": 1764500000.1, "step": 3, "partition": "train", "uids": ["e0r4a0", "e0r5a0"]}

Invariants
    - A line is in the file when `write` returns, and on the disk when `durable` was asked for.
    - A half-written last line, left by a killed process, is cut off before anything is appended.
    - Going back to a checkpoint moves the lines after it to `*.rolled_back.jsonl`; nothing is thrown away.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

JOURNAL = "events.jsonl"
METRICS = "metrics.jsonl"


class JsonLines:
    """A file of JSON lines that outlives the process that writes it.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()  # the trainer's thread and the supervisor's write the journal
        cut_half_line(path)
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def append(self, line: dict[str, Any], durable: bool = False) -> None:
        """Add one line; values that are no JSON become text, numbers that are not finite become null."""
        text = json.dumps(plain(line), ensure_ascii=False) + "\n"
        with self._lock:
            self._file.write(text)
            self._file.flush()
        if durable:
            os.fsync(self._file.fileno())

    def sync(self) -> None:
        """Bring everything written so far to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more lines."""
        self._file.close()


class Journal:
    """Writes the events of a run.

    Args:
        folder: the run folder; it must exist.
        clock: unix seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._lines = JsonLines(folder / JOURNAL)
        self._clock = clock

    def write(self, event: str, step: int, *, durable: bool = False, **facts: Any) -> None:
        """Add an event of step `step`; facts that are None are left out."""
        known = {name: value for name, value in facts.items() if value is not None}
        self._lines.append({"event": event, "time": self._clock(), "step": step, **known}, durable)

    def close(self) -> None:
        """No more events."""
        self._lines.close()


def cut_half_line(path: Path) -> None:
    """Remove an unfinished last line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            found = file.read(keep - start).rfind(b"\n")
            if found >= 0:
                keep = start + found + 1
                break
            keep = start
        if keep < end:
            file.truncate(keep)


def roll_back(path: Path, keep: Callable[[list[dict[str, Any]]], int]) -> int:
    """Move the last lines of a file to `{stem}.rolled_back.jsonl`.

    Args:
        path: a file of JSON lines; one that does not exist has nothing to move.
        keep: given all lines, how many of them stay.

    Returns:
        How many lines were moved. The file is replaced in one step.
    """
    if not path.exists():
        return 0
    cut_half_line(path)
    # Not splitlines(): JSON strings may hold other line separators than \n.
    texts = [f"{text}\n" for text in path.read_text(encoding="utf-8").split("\n") if text]
    count = keep([_parse(text) for text in texts])
    gone = texts[count:]
    if not gone:
        return 0
    with path.with_name(f"{path.stem}.rolled_back.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(gone)
        file.flush()
        os.fsync(file.fileno())
    rest = path.with_name(f".{path.name}.tmp")
    with rest.open("w", encoding="utf-8") as file:
        file.writelines(texts[:count])
        file.flush()
        os.fsync(file.fileno())
    os.replace(rest, path)
    return len(gone)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; lines that are none (a half-written last one) are left out."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = _parse(text)
            if line:
                yield line


def _parse(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def plain(value: Any) -> Any:
    """What JSON can hold: NaN and infinity become null, arrays become lists, unknown objects become their text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
