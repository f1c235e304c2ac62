"""How many rows data files have, without reading them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def count_rows(files: str | Iterable[str] | None, limit: int = -1) -> int | None:
    """Rows of parquet and .jsonl files together, at most `limit` of them (-1: all); None when a file does not tell.

    Prompts that are too long are counted, even where they will be left out.
    """
    names = [files] if isinstance(files, str) else list(files or [])
    counts = [_rows_of(Path(str(name)).expanduser()) for name in names]
    if not counts or None in counts:
        return None
    rows = sum(count for count in counts if count is not None)
    return rows if limit < 0 else min(rows, limit)


def _rows_of(file: Path) -> int | None:
    try:
        if file.suffix == ".jsonl":
            with file.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        import pyarrow.parquet as pq

        return int(pq.read_metadata(file).num_rows)
    except (OSError, ValueError):  # pyarrow's error of a broken file is a ValueError
        return None
