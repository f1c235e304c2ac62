"""The console script, as a user starts it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import write_run

from rlflow.cli.main import COMMANDS, main


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_trace_prints_a_trace(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "e0r4a0_0_0", "--run", str(run_dir), "--width", "100"]) == 0
    assert "update_actor" in capsys.readouterr().out
    assert main(["trace", "e0r4a0", "--run", str(run_dir), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["group"]) == 3


def test_view_writes_pages_and_says_where(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run_dir / 'view' / 'index.html'}: 19 trajectories") and out.count("\n") == 1
    assert main(["view", str(run_dir), "--out", str(tmp_path / "part"), "--steps", "2:3"]) == 0
    assert ": 11 trajectories" in capsys.readouterr().out
    assert main(["view", str(run_dir), "--out", str(tmp_path / "part"), "--steps", "2"]) == 0
    assert ": 3 trajectories" in capsys.readouterr().out, "the older pages are replaced"
    assert not (tmp_path / "part" / "data" / "train-3.js").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", "e0r9a0_1_0", "--run", "RUN"], "did you mean"),
        (["trace", "x", "--run", "RUN/trajectories"], "is no run folder: that is the folder a run writes to"),
        (["view", "RUN/nothing"], "is no folder"),
        (["view", "RUN", "--out", "RUN"], "is the run folder itself"),
        (["view", "RUN", "--out", "RUN/trajectories"], "was not made by rlflow view"),
        (["view", "RUN", "--out", "RUN/config.yaml/x"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([text.replace("RUN", str(run_dir)) for text in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"rlflow {arguments[0]}: ") and message in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tracee"], "no command 'tracee'; did you mean trace?"),
        (["zzz"], "no command 'zzz'; there is plan, doctor, config, trace, view"),
        (["trace"], "rlflow trace: the following arguments are required: KEY"),
        (["view", "x", "--steps", "a:b"], "'a:b' is no range of steps; try 10:20"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    for name, (module, summary) in COMMANDS.items():
        assert (f"{name} " in text and summary in text) == (importlib.util.find_spec(module) is not None)


def test_the_tools_are_light(run_dir: Path) -> None:
    code = (
        "import sys; from rlflow.cli.main import main; "
        f"codes = [main(['trace', 'e0r4a0_0_0', '--run', {str(run_dir)!r}]), main(['view', {str(run_dir)!r}])]; "
        "heavy = {'torch', 'ray', 'transformers', 'tensordict', 'pyarrow'} & set(sys.modules); "
        "sys.exit(f'{codes} {heavy}' if heavy or codes != [0, 0] else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_closed_pipe_is_no_error(run_dir: Path) -> None:
    command = f"{sys.executable} -m rlflow.cli trace e0r4a0 --run {run_dir} --json | head -c 10"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == '{\n  "key":'
