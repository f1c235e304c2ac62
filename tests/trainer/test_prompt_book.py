"""What the journal is told of prompts, and which can start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlflow.observe.journal import JOURNAL, read_lines
from rlflow.observe.recorder import RunRecorder
from rlflow.trainer.ppo.prompt_book import PromptBook
from rlflow.utils import tensordict_utils as tu


def test_a_prompt_of_the_step_ends_as_trained_or_with_its_reason(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path)
    recorder.open(0, "", fresh=True)
    book = PromptBook(recorder)
    uids = ["p0", "p1", "p2", "p3"]
    batch: Any = tu.get_tensordict({"uid": uids}, {"validate": False})
    book.issued(1, "train", batch, uids, sessions=2, version=0)
    book.issued(1, "val", batch, ["v0"], sessions=1, version=0)
    assert book.of_this_step == uids, "validation is not trained on"

    [again] = book.again(1, "train", ["p2"])
    assert tu.get(again, "uid") in (["p2"], "p2")
    book.issued(1, "train", again, ["p2"], sessions=2, version=0)
    book.ended(1, "train", "p1", {"failed": "no answer"})
    book.dropped("p2", "no signal")
    book.trained(1, ["p0"], rows=2)
    assert book.of_this_step == []
    with pytest.raises(KeyError):
        book.again(2, "train", ["p2"])
    recorder.end(1, 0)

    events = list(read_lines(tmp_path / JOURNAL))
    dropped = [(event["uids"], event["reason"]) for event in events if event["event"] == "dropped"]
    assert dropped == [(["p1"], "no answer"), (["p2"], "no signal"), (["p3"], "its end was not seen")]
    assert [event["uids"] for event in events if event["event"] == "trained"] == [["p0"]]
    [restart] = [event for event in events if event["event"] == "restart" and event["step"] == 1]
    assert "1 prompts start again: p2" in restart["text"]
