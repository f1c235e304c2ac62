"""Rows from parquet, .json and .jsonl files, read in order and addressed by position.

Invariants
    - Row i is the same row for the whole life of a table, and every `table[i]` is a fresh copy: what a reward function
      changes in one session's row is not seen by the others.
    - All rows have the same keys: a column that only some files have is None elsewhere.
    - Parquet stays in Arrow memory; a row becomes Python objects when it is asked for.
    - JSON is read by Python, not by Arrow: the values of a column may differ in type between rows (a ground truth that
      is a number here and a string there), and a broken line is named by its number.
"""

from __future__ import annotations

import bisect
import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rlflow.utils.errors import DataError

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
FORMATS = (".parquet", ".json", ".jsonl")


@dataclass(frozen=True)
class Source:
    """The rows of one file."""

    path: Path
    rows: pyarrow.Table | list[Row]
    lines: list[int] | None = None  # line number of each row, where rows are lines

    def __len__(self) -> int:
        return self.rows.num_rows if not isinstance(self.rows, list) else len(self.rows)

    @property
    def columns(self) -> list[str]:
        if not isinstance(self.rows, list):
            return list(self.rows.column_names)
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def take(self, start: int, stop: int) -> list[Row]:
        """Fresh rows start..stop-1."""
        if not isinstance(self.rows, list):
            return self.rows.slice(start, stop - start).to_pylist()
        return copy.deepcopy(self.rows[start:stop])

    def locate(self, index: int) -> str:
        """Where row `index` stands, in words."""
        return f"{self.path}, line {self.lines[index]}" if self.lines else f"{self.path}, row {index} (from 0)"


class RowTable(Sequence[Row]):
    """An immutable sequence of row dicts over one or more files, or a selection of it.

    Users meet it as `dataset.dataframe`: `len`, `table[i]` (a row), `table["column"]` (its values), `column_names`,
    `select(indices)`, `filter(function)`.
    """

    def __init__(self, sources: Sequence[Source], indices: Sequence[int] | None = None) -> None:
        self._sources = list(sources)
        ends: list[int] = []
        for source in self._sources:
            ends.append((ends[-1] if ends else 0) + len(source))
        self._ends = ends
        self._indices = list(indices) if indices is not None else None
        self.column_names = list(dict.fromkeys(name for source in self._sources for name in source.columns))

    @classmethod
    def from_rows(cls, rows: Iterable[Row], name: str = "memory") -> RowTable:
        """A table of rows that are already here."""
        return cls([Source(Path(name), list(rows))])

    def __len__(self) -> int:
        return len(self._indices) if self._indices is not None else (self._ends[-1] if self._ends else 0)

    @overload
    def __getitem__(self, item: int) -> Row: ...
    @overload
    def __getitem__(self, item: str) -> list[Any]: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, item: slice) -> RowTable: ...

    def __getitem__(self, item: int | str | slice) -> Row | list[Any] | RowTable:
        if isinstance(item, str):
            if item not in self.column_names:
                raise KeyError(f"no column {item!r}; the files have {', '.join(self.column_names)}")
            return [row[item] for row in self]
        if isinstance(item, slice):
            return self.select(range(*item.indices(len(self))))
        source, offset = self._find(item)
        return self._complete(source.take(offset, offset + 1)[0])

    def __iter__(self) -> Iterator[Row]:
        if self._indices is not None:
            yield from (self[i] for i in range(len(self)))
            return
        for source in self._sources:
            for start in range(0, len(source), 1024):  # one Arrow conversion a block, not one a row
                yield from map(self._complete, source.take(start, min(start + 1024, len(source))))

    def locate(self, index: int) -> str:
        """File and place of row `index`, for messages."""
        source, offset = self._find(index)
        return source.locate(offset)

    def select(self, indices: Iterable[int]) -> RowTable:
        """The rows at `indices`, in that order."""
        size = len(self)
        chosen = [int(i) for i in indices]
        for i in chosen:
            if not 0 <= i < size:
                raise IndexError(f"row {i} of a table of {size} rows")
        base = self._indices
        return RowTable(self._sources, [base[i] for i in chosen] if base is not None else chosen)

    def filter(self, keep: Callable[[Row], bool]) -> RowTable:
        """The rows for which `keep(row)` holds."""
        return self.select(i for i, row in enumerate(self) if keep(row))

    def _complete(self, row: Row) -> Row:
        return {name: row.get(name) for name in self.column_names}

    def _find(self, index: int) -> tuple[Source, int]:
        size = len(self)
        if not -size <= index < size:
            raise IndexError(f"row {index} of a table of {size} rows")
        index %= size
        if self._indices is not None:
            index = self._indices[index]
        nth = bisect.bisect_right(self._ends, index)
        return self._sources[nth], index - (self._ends[nth - 1] if nth else 0)


def load_table(files: Sequence[str], key: str = "data files") -> RowTable:
    """Read all files, in order.

    Args:
        files: paths; `~` is expanded.
        key: the config key they come from, for messages.

    Raises:
        DataError: a missing file, an unknown format, a file that cannot be parsed, no row at all.
    """
    if not files:
        raise DataError(f"{key} is empty; give one path or a list of paths of {', '.join(FORMATS)} files")
    table = RowTable([_read(_existing(file, key)) for file in files])
    if len(table) == 0:
        raise DataError(f"{key}: no rows in {', '.join(map(str, files))}")
    return table


def _existing(file: str, key: str) -> Path:
    if "://" in str(file):
        scheme = str(file).partition("://")[0]
        raise DataError(
            f"{key}: {file}: {scheme}:// paths are not read; copy the file to a local disk and name it there"
        )
    path = Path(file).expanduser()
    if path.suffix not in FORMATS:
        raise DataError(f"{key}: {file} is of format {path.suffix or '(none)'!r}; expected {', '.join(FORMATS)}")
    if path.is_file():
        return path
    absolute = path.absolute()
    parent = absolute.parent
    if parent.is_dir():
        siblings = sorted(p.name for p in parent.iterdir() if p.suffix in FORMATS)
        found = f"the folder has {', '.join(siblings[:5])}" if siblings else "the folder has no data file"
    else:
        found = f"the folder {parent} does not exist"
    raise DataError(f"{key}: no file {absolute}; {found}. The scripts in examples/data_preprocess/ write such files.")


def _read(path: Path) -> Source:
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return Source(path, pq.read_table(path))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    return _parse_lines(path, text) if path.suffix == ".jsonl" else _parse_json(path, text)


def _parse_lines(path: Path, text: str) -> Source:
    rows, lines = [], []
    # Not splitlines(): JSON strings may hold U+2028 and its kind unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_object(_loads(path, line, f"line {number}"), f"{path}, line {number}"))
            lines.append(number)
    return Source(path, rows, lines)


def _parse_json(path: Path, text: str) -> Source:
    """A list of objects, or an object of columns; a file of one object a line is taken too, as other loaders do."""
    stripped = text.lstrip()
    if not stripped.startswith("["):
        try:
            value = json.loads(text)
        except ValueError:
            return _parse_lines(path, text)
        if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
            sizes = {name: len(column) for name, column in value.items()}
            if len(set(sizes.values())) > 1:
                raise DataError(f"{path}: columns of different length: {sizes}")
            return Source(path, [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)])
        return Source(path, [_object(value, str(path))])
    rows = _loads(path, text, "the file")
    return Source(path, [_object(row, f"{path}, row {i} (from 0)") for i, row in enumerate(rows)])


def _loads(path: Path, text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{path}, {place}: not JSON: {error}") from error


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{place}: found {type(value).__name__}, expected an object with the columns of a row")
    return value
