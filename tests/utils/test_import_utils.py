"""What a user's module can do wrong while it is imported ends in one error that says where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rlflow.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from rlflow.utils.errors import ConfigError
from rlflow.utils.import_utils import import_external_libs, load_module

TAKEN = """
from rlflow.trainer.ppo.core_algos import register_adv_est
@register_adv_est("grpo")
def mine(**kwargs): ...
"""
FAULTS = {
    "nameless": ("\n\nundefined_name\n", "NameError: name 'undefined_name' is not defined", 3),
    "no_syntax": ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax", 2),
    "taken": (TAKEN, "ValueError: advantage estimator 'grpo' is already", 3),
    "leaver": ("import sys\nsys.exit(3)\n", "SystemExit: 3", 2),
    "importer": ("import no_such_package_here\n", "ModuleNotFoundError: No module named 'no_such_package_here'", 1),
}


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_module_is_named_with_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, by_path: bool
) -> None:
    source, what, line = FAULTS[name]
    file = tmp_path / f"broken_{name}.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    lib = str(file) if by_path else file.stem
    with pytest.raises(ConfigError) as error:
        import_external_libs(["math", lib])
    text = str(error.value)
    assert f"external_lib={lib} cannot be imported: importing " in text
    assert what in text and f"({file}, line {line})" in text and "\n    try:    " in text
    assert not {module for module in set(sys.modules) - before if file.stem in module}


@pytest.mark.parametrize(
    ("libs", "part"),
    [
        (5, "external_lib=5 cannot be imported: 5 is a int, not a name"),
        (["math", 3], "external_lib=3"),
        ("no_such_module_here", "No module named 'no_such_module_here'"),
        ("/nowhere/a.py", "no Python file at /nowhere/a.py"),
        ("", "external_lib= cannot be imported"),
    ],
)
def test_what_is_no_module_is_refused(libs: Any, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        import_external_libs(libs)
    assert part in str(error.value)


def test_nothing_to_import_is_fine() -> None:
    import_external_libs(None)
    import_external_libs([])


def test_an_interrupted_import_stays_an_interrupt_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "interrupted.py"
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_module(str(file))
    assert not [name for name in sys.modules if "interrupted_" in name and name.startswith("rlflow_user_")]


ESTIMATOR = """
from rlflow.trainer.ppo.core_algos import register_adv_est
@register_adv_est("twice")
def twice(token_level_rewards, response_mask, *, scale={scale}, **kwargs):
    return token_level_rewards, token_level_rewards
"""


def test_one_file_by_path_and_by_module_name_registers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file, other = tmp_path / "registers_twice.py", tmp_path / "registers_too.py"
    file.write_text(ESTIMATOR.format(scale=1.0))
    other.write_text(ESTIMATOR.format(scale=1.0))
    try:
        import_external_libs([str(file), "registers_twice"])
        with pytest.raises(ConfigError) as error:
            import_external_libs("registers_too")
        for part in (f"twice ({file}, line 3)", f"twice ({other}, line 3) cannot have that name", "'my_twice'"):
            assert part in str(error.value)
    finally:
        ADV_ESTIMATOR_REGISTRY.pop("twice", None)
        sys.modules.pop("registers_twice", None)


def test_functions_of_one_line_that_differ_in_what_they_hold_are_different(tmp_path: Path) -> None:
    file = tmp_path / "makes_two.py"
    loop = "for scale in (1.0, 2.0):\n    @register_adv_est('held')\n    def held(scale=scale, **kwargs): ...\n"
    file.write_text(f"from rlflow.trainer.ppo.core_algos import register_adv_est\n{loop}")
    try:
        with pytest.raises(ConfigError, match="advantage estimator 'held' is already"):
            import_external_libs(str(file))
    finally:
        ADV_ESTIMATOR_REGISTRY.pop("held", None)
