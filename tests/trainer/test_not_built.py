"""Jobs that are not in this version check their command line and refuse by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

JOBS = {
    "sft_trainer": ("supervised fine-tuning", "data.max_length=2048"),
    "sft_trainer_ray": ("supervised fine-tuning on Ray", "engine=megatron"),
    "main_eval": ("scoring a file", "custom_reward_function.path=/x.py"),
    "main_generation_server": ("answering a file", "data.output_path=/x"),
}


@pytest.mark.parametrize(("module", "job"), JOBS.items())
def test_a_job_that_is_not_built_says_so_and_what_else_is_wrong(module: str, job: tuple[str, str], capsys: Any) -> None:
    main = importlib.import_module(f"rlflow.trainer.{module}").main
    assert main([job[1]]) == 2
    said = capsys.readouterr().err
    assert f"error: {job[0]}" in said and "not in this version" in said and "try:" in said
    assert said.count("error:") == 1
    assert main([job[1], "data.nothing=1"]) == 2
    assert "data.nothing is not a key" in capsys.readouterr().err
