"""Writes the viewer's folder: pages, styles and scripts of this package, and the run's data as scripts.

Invariants
    - The folder appears whole: it is made beside its place and then moved there.
    - Only a folder that this module made is ever replaced.
    - One step's records are in memory at a time.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from rlflow.observe.events import Journal
from rlflow.observe.records import RunFolder, TrajectoryFile
from rlflow.observe.viewer import payload, summary
from rlflow.observe.visible import visible
from rlflow.utils.errors import RlflowError

MARKER = "rlflow_view.txt"
STYLES = ("view.css", "pages.css")
SCRIPTS = ("core.js", "color.js", "chart.js", "timeline.js", "list.js", "tokens.js", "trajectory.js", "app.js")
TEXTS_A_FILE = 2000


class ViewError(RlflowError):
    """The viewer's folder cannot be written there."""


@dataclass(frozen=True)
class ViewReport:
    """What was written."""

    index: Path
    trajectories: int
    files: int
    bytes: int


def write_view(
    run: RunFolder,
    out: Path,
    *,
    changes: dict[str, Any] | None = None,
    steps: range | None = None,
    on_file: Callable[[int, int], None] | None = None,
) -> ViewReport:
    """Write the viewer of a run to `out`.

    Args:
        run: the run; it may still be going.
        out: made or, when it is an earlier viewer, replaced.
        changes: configuration key -> default, for the keys that differ from their defaults; None when not known.
        steps: the steps whose trajectories are shown; None for all.
        on_file: called with (written, to write) after each file of trajectories.

    Raises:
        ViewError: `out` holds something else, or cannot be written.
    """
    _refuse_foreign(out, run)
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / "data").mkdir(parents=True)
        journal = run.journal()
        chosen = [file for file in run.trajectory_files() if steps is None or file.step in steps]
        count = _write_trajectories(run, journal, chosen, scratch / "data", on_file)
        _write_page(run, journal, chosen, count, changes, scratch)
        _put_in_place(scratch, out)
    except OSError as error:
        raise ViewError(f"{out} cannot be written: {error.strerror or error}; try another --out") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    written = [path for path in out.rglob("*") if path.is_file()]
    return ViewReport(out / "index.html", count, len(written), sum(path.stat().st_size for path in written))


def _refuse_foreign(out: Path, run: RunFolder) -> None:
    if out.resolve() == run.path.resolve():
        raise ViewError(f"--out {out} is the run folder itself; leave it away for {run.path / 'view'}")
    if out.exists() and not (out.is_dir() and ((out / MARKER).is_file() or not any(out.iterdir()))):
        raise ViewError(f"--out {out} exists and was not made by rlflow view, so it is not replaced; try another --out")


def _put_in_place(scratch: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        os.replace(out, old)
    os.replace(scratch, out)
    shutil.rmtree(old, ignore_errors=True)


def _write_trajectories(
    run: RunFolder,
    journal: Journal,
    files: list[TrajectoryFile],
    data: Path,
    on_file: Callable[[int, int], None] | None,
) -> int:
    """One script a file of records, the index of all, and the texts for the search; returns how many there are."""
    index: list[list[Any]] = []
    texts: list[list[str]] = []
    written = 0
    for number, file in enumerate(files):
        rows = run.trajectories(file.step, file.partition)
        name = payload.file_name(file)
        _write(data / f"{name}.js", payload.script(name, payload.step_payload(journal, file, rows)))
        index += [payload.index_row(file, row) for row in rows]
        texts += payload.text_rows(rows)
        if len(texts) >= TEXTS_A_FILE:
            written, texts = _write_texts(data, written, texts), []
        if on_file is not None:
            on_file(number + 1, len(files))
    written = _write_texts(data, written, texts) if texts else written
    lists = {"columns": payload.INDEX, "rows": index, "texts": written}
    _write(data / "index.js", payload.script("index", lists))
    return len(index)


def _write_texts(data: Path, number: int, texts: list[list[str]]) -> int:
    _write(data / f"text-{number}.js", payload.script(f"text-{number}", texts))
    return number + 1


def _write_page(
    run: RunFolder,
    journal: Journal,
    files: list[TrajectoryFile],
    count: int,
    changes: dict[str, Any] | None,
    folder: Path,
) -> None:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    metrics = run.metrics()
    _write(folder / "data" / "run.js", payload.script("run", payload.run_payload(journal, metrics, files)))
    source = package_files("rlflow.observe.viewer") / "assets"
    (folder / "assets").mkdir()
    for name in (*STYLES, *SCRIPTS):
        _write(folder / "assets" / name, (source / name).read_text(encoding="utf-8"))
    environment = Environment(
        loader=PackageLoader("rlflow.observe.viewer"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"visible": visible, "number": number_text, "duration": duration_text}
    word, sentence = summary.status(journal, run.writer_lives())
    page = environment.get_template("index.html.j2").render(
        title=run.path.resolve().name,
        status={"word": word, "sentence": sentence},
        facts=summary.run_facts(run, journal, metrics),
        headlines=summary.headline_numbers(metrics),
        accounting=[(name, journal.accounting(name)) for name in journal.partitions],
        notable=summary.notable(journal),
        config=summary.config_rows(run.config_text(), changes),
        changes_known=changes is not None,
        trajectories=count,
        made=time.time(),
        styles=STYLES,
        scripts=SCRIPTS,
    )
    _write(folder / "index.html", page)
    _write(folder / MARKER, "Made by rlflow view, which may replace this folder.\n")


def _write(path: Path, text: str) -> None:
    # A lone surrogate has no UTF-8; it is shown as its escape.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def number_text(value: float) -> str:
    """A number as people read it: up to four significant digits, thousands apart."""
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.4g}"


def duration_text(seconds: float) -> str:
    """Seconds as h, min, s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
