"""The code of docs/data_proto.md runs as it stands, and its worker class works in a group."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlflow.single_controller.base import Dispatch, get_predefined_dispatch_fn
from rlflow.utils.errors import ContractError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data_proto.md"


def test_the_blocks_run(pages: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = pages.blocks("python", pages=[PAGE])
    assert len(blocks) >= 8
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block.text, str(block), "exec"), namespace)
    said = capsys.readouterr().out.strip()
    assert f"print(error)  # {said}" in PAGE.read_text(), "the error that the page shows"
    check_scorer(namespace)


def check_scorer(namespace: dict[str, Any]) -> None:
    from rlflow.single_controller.base import WorkerContext
    from rlflow.single_controller.base.parallel import ParallelLayout

    workers = [namespace["Scorer"](context=WorkerContext(rank=rank, world_size=4)) for rank in range(4)]
    layout = ParallelLayout.build([worker.get_parallel_info() for worker in workers])
    assert layout.by_dp().of_rank == (0, 0, 1, 1) and layout.by_dp().collect_order == (0, 2)
    data = namespace["data"]
    assert workers[0].double(data).batch["doubled"].tolist() == (data.batch["score"] * 2).tolist()


def test_the_table_names_every_mode(pages: ModuleType) -> None:
    named = {name for cells in pages.table_rows(PAGE) for name in re.findall(r"`(\w+)`", cells[0])}
    wanted = {mode.name for mode in Dispatch if is_ours(mode)}
    # Neither is a way to send arguments.
    assert wanted - named == {"RANK_ZERO", "DIRECT_ROLLOUT_METHOD"}


def is_ours(mode: Any) -> bool:
    """Whether the package registered it, not a test."""
    try:
        function = get_predefined_dispatch_fn(mode)["dispatch_fn"]
    except ContractError:
        return False
    return getattr(function, "func", function).__module__.startswith("rlflow.")
