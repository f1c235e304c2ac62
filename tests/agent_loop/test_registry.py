from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rlflow
from rlflow.agent_loop import AgentLoopBase, register
from rlflow.agent_loop.registry import LoopTable, resolve_config_path
from rlflow.agent_loop.single_turn import SingleTurnAgentLoop
from rlflow.utils.errors import ConfigError

LOOP = """
from rlflow.agent_loop import AgentLoopBase, register

@register("registered_here")
class MyLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return None
"""


def test_the_built_in_loop_is_there():
    assert LoopTable().get("single_turn_agent").cls is SingleTurnAgentLoop


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'no_loop' is unknown; known: .*single_turn_agent"):
        LoopTable().get("no_loop")


def test_register_makes_a_loop_known():
    @register("test_loop")
    class Loop(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            return None

    assert LoopTable().get("test_loop").cls is Loop


def test_a_yaml_file_names_loops_and_their_constructor_keywords(tmp_path, monkeypatch):
    (tmp_path / "my_loops_of_a_test.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tmp_path / "loops.yaml"
    config.write_text(
        "- name: mine\n  _target_: my_loops_of_a_test.MyLoop\n  depth: 3\n"
        "- name: single_turn_agent\n  _target_: my_loops_of_a_test.MyLoop\n"
    )
    table = LoopTable(str(config))
    cls = sys.modules["my_loops_of_a_test"].MyLoop
    assert table.get("mine").cls is cls and table.get("mine").kwargs == {"depth": 3}
    assert table.get("single_turn_agent").cls is cls
    assert table.get("registered_here").cls is cls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- name: x\n", "entry 0 needs the keys"),
        ("a: 1\n", "must be a YAML list"),
        ("- name: x\n  _target_: no.Such\n", "x"),
    ],
)
def test_a_broken_yaml_file_is_a_config_error(tmp_path, text, message):
    config = tmp_path / "loops.yaml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        LoopTable(str(config))


def test_paths_are_looked_up_from_the_working_directory_then_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("")
    package = Path(rlflow.__file__).parent
    assert resolve_config_path("a.yaml") == tmp_path / "a.yaml"
    assert resolve_config_path(str(tmp_path / "a.yaml")) == tmp_path / "a.yaml"
    assert resolve_config_path("rlflow/__init__.py") == package / "__init__.py"
    assert resolve_config_path("agent_loop/base.py") == package / "agent_loop/base.py"


def test_paths_that_lead_out_or_nowhere_are_refused(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    (tmp_path / "secret.yaml").write_text("")
    monkeypatch.chdir(tmp_path / "cwd")
    with pytest.raises((ConfigError, FileNotFoundError)):
        resolve_config_path("../secret.yaml")
    with pytest.raises(ConfigError, match="leaves the folders"):
        resolve_config_path("../../../../../../../../../../secret.yaml")
    with pytest.raises(FileNotFoundError):
        resolve_config_path("nowhere.yaml")
    with pytest.raises(FileNotFoundError):
        resolve_config_path("/no/such/file.yaml")
