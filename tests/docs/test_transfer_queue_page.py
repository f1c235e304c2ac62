"""The tour of docs/transfer_queue.md runs as it stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rlflow.transfer_queue as tq

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transfer_queue.md"


@pytest.fixture(autouse=True)
def no_table() -> Iterator[None]:
    tq.close()
    yield
    tq.close()


def test_the_tour(pages: ModuleType, ray_cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = pages.blocks("python", pages=[PAGE])
    assert len(blocks) >= 8
    namespace: dict[str, Any] = {"__name__": "tour"}
    for block in blocks:
        exec(compile(block.text, str(block), "exec"), namespace)
    assert "float32" in capsys.readouterr().out, "the error that the page shows"
