"""The Python of docs/transfer_queue_consumers.md runs as it stands, and its table names the metrics that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.exporter import TableCollector, TableFigures
from rlflow.transfer_queue.meter import Meter

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transfer_queue_consumers.md"


@pytest.fixture(autouse=True)
def no_table() -> Iterator[None]:
    tq.close()
    yield
    tq.close()


def test_the_blocks(pages: ModuleType) -> None:
    blocks = pages.blocks("python", pages=[PAGE])
    assert len(blocks) == 2
    for block in blocks:
        namespace: dict[str, Any] = {"__name__": "consumers"}
        exec(compile(block.text, str(block), "exec"), namespace)


def test_the_metrics(pages: ModuleType) -> None:
    named: set[str] = set()
    for cells in pages.table_rows(PAGE):
        names = re.findall(r"`(tq_\w+|\.\.\.\w+|_p\d+)`", cells[0])
        for name in names:
            # `..._errors_total` stands for the first name's counter, `_p50` for the one with `_avg`.
            stem = names[0].removesuffix("_total") if name.startswith("...") else "tq_storage_request_latency"
            named.add(name if name.startswith("tq_") else stem + name.removeprefix("..."))
    collector = TableCollector(Meter())
    collector.figures = TableFigures(
        {"partitions": {}, "blocks": {}, "next_index": 0, "lost_units": 0}, [], capacity=10
    )
    served = {f"{m.name}_total" if m.type == "counter" else m.name for m in collector.collect()}
    assert named == served
