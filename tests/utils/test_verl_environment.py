"""verl's environment variables count as ours, or are named as without effect."""

from __future__ import annotations

import re
from pathlib import Path

import rlflow
from rlflow.config.overrides import compose_config
from rlflow.utils.verl_environment import INSTEAD, READ, add_external_modules, adopt_verl_variables


def test_a_variable_that_something_reads_becomes_ours_unless_ours_is_set() -> None:
    environ = {"VERL_LOGGING_LEVEL": "INFO", "VERL_FORCE_DEVICE": "cpu", "RLFLOW_FORCE_DEVICE": "cuda", "PATH": "/"}
    notices = adopt_verl_variables(environ)
    assert environ["RLFLOW_LOGGING_LEVEL"] == "INFO" and environ["RLFLOW_FORCE_DEVICE"] == "cuda"
    assert notices == ["VERL_LOGGING_LEVEL counts as RLFLOW_LOGGING_LEVEL"]


def test_a_variable_that_nothing_reads_is_named() -> None:
    notices = adopt_verl_variables({"VERL_SEED": "1", "VERL_WHATEVER": "1"})
    assert len(notices) == 2 and all("has no effect" in notice for notice in notices)


def test_the_tables_are_true() -> None:
    text = "".join(
        path.read_text() for path in Path(rlflow.__file__).parent.rglob("*.py") if "verl_env" not in path.name
    )
    read = set(re.findall(r"RLFLOW_([A-Z_]+)", text)) | {"USE_EXTERNAL_MODULES", "FILE_LOGGER_PATH", "FILE_LOGGER_ROOT"}
    assert read >= READ and not read & set(INSTEAD) - {"SEED"}


def test_external_modules_join_those_of_the_configuration() -> None:
    config = compose_config(["actor_rollout_ref.model.external_lib=mine"])
    assert add_external_modules(config, {}) is None
    notice = add_external_modules(config, {"RLFLOW_USE_EXTERNAL_MODULES": "a, b.c"})
    assert notice is not None and config.actor_rollout_ref.model.external_lib == ["mine", "a", "b.c"]
