"""What scorers print: shown within limits, remembered for messages, never in the way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rlflow.reward_loop import output
from rlflow.reward_loop.output import ScorerOutput
from rlflow.reward_loop.pool import ScorerPool
from rlflow.reward_loop.result import InvalidRewardError
from rlflow.reward_loop.scorer import ScorerSpec
from rlflow.utils.errors import ConfigError


def test_lines_are_shown_until_the_allowance_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    out = ScorerOutput("scorer 7", clock=lambda: now[0])
    out.feed(b"first\nsec")
    out.feed(b"ond\n" + b"more\n" * 10_000)
    shown = [record.getMessage() for record in caplog.records]
    assert shown[:3] == ["scorer 7: first", "scorer 7: second", "scorer 7: more"]
    assert len(shown) == output.BURST_LINES
    now[0] = 2.0
    out.feed(b"later\nagain\nno more\n")
    out.close()
    left_out = 10_002 - output.BURST_LINES
    assert [record.getMessage() for record in caplog.records][output.BURST_LINES :] == [
        f"scorer 7: {left_out} lines of output left out",
        "scorer 7: later",
        "scorer 7: again",
        "scorer 7: 1 lines of output left out",
    ]
    assert out.tail().splitlines()[-3:] == ["later", "again", "no more"]


def test_endless_lines_and_broken_text_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    out = ScorerOutput("s")
    for _ in range(100):
        out.feed(b"x" * 5000)
    out.feed(b"\n\xff\xfe\x00 caf\xc3\xa9\n")
    out.close()
    assert all(len(record.getMessage()) <= output.LINE_CHARS + 3 for record in caplog.records)
    assert out.tail().splitlines()[-1] == "\\xff\\xfe\x00 café"


def scorer(folder: Path, body: str, top: str = "") -> ScorerSpec:
    path = folder / "scorer.py"
    path.write_text(f"import os, sys, time\n{top}\ndef compute_score(data_source, solution_str, **kw):\n    {body}\n")
    return ScorerSpec(str(path))


def run(spec: ScorerSpec, calls: int = 1, load_timeout_s: float = 30.0, loop: str = "asyncio") -> list[object]:
    async def main() -> list[object]:
        pool = ScorerPool(spec, 20.0, 1, load_timeout_s)
        try:
            await pool.start()
            return [await pool.call(data_source="s", solution_str="abc") for _ in range(calls)]
        finally:
            await pool.close()

    # Ray runs its asyncio actors on uvloop where it is installed.
    with asyncio.Runner(loop_factory=pytest.importorskip(loop).new_event_loop) as runner:
        return runner.run(main())


def test_a_scorer_that_prints_megabytes_does_not_flood_the_log_and_scores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = "print('debug\\n' * 200_000); sys.stderr.write('e' * 1_000_000); return 1.0"
    assert run(scorer(tmp_path, body), calls=3) == [1.0] * 3
    shown = [record.getMessage() for record in caplog.records if record.name == output.__name__]
    assert 0 < len(shown) < output.BURST_LINES + 40
    assert "lines of output left out" in shown[-1]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_last_words_of_a_scorer_are_in_the_reason(tmp_path: Path, loop: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRewardError, match="exited with code 3; it last wrote: cannot open the table"):
        run(
            scorer(tmp_path, "print('hm'); print('cannot open the table', file=sys.stderr, flush=True); os._exit(3)"),
            loop=loop,
        )
    assert time.monotonic() - started < 10


def test_an_import_that_hangs_has_its_own_short_deadline(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        run(scorer(tmp_path, "return 1.0", top="print('loading the judge', flush=True); time.sleep(600)"), 1, 2.0)
    assert time.monotonic() - started < 15
    text = str(error.value)
    assert f"importing compute_score of {tmp_path}/scorer.py took over 2 s (reward.load_timeout_s)" in text
    assert "| loading the judge" in text


def test_an_import_that_ends_the_process_is_told_with_its_output(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"exited with code 4\n    its last output:\n    \| no licence"):
        run(scorer(tmp_path, "return 1.0", top="print('no licence', flush=True); os._exit(4)"))
