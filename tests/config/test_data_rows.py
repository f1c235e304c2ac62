"""Rows of data files are counted from what the files say about themselves."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.config.checks import validate_config
from rlflow.config.data_rows import count_rows
from rlflow.config.overrides import compose_config
from rlflow.utils.errors import ConfigError


def test_rows_of_all_files_count_up_to_the_limit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 7}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    both = [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]
    assert count_rows(both) == 9 and count_rows(both, 8) == 8 and count_rows(both[0]) == 7


def test_a_file_that_does_not_tell_makes_the_number_unknown(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "list.json").write_text("[{}, {}]")
    for name in ("broken.parquet", "list.json", "missing.jsonl"):
        assert count_rows(str(tmp_path / name)) is None
    assert count_rows([]) is None


def test_a_step_that_needs_more_prompts_than_there_are_is_refused_before_ray(files: list[str], tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"] * 50}), tmp_path / "train.parquet")
    sizes = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    with pytest.raises(ConfigError, match=r"train_batch_size=64 prompts a step, and the train files have 50") as error:
        validate_config(compose_config([*files, *sizes]))
    assert "try:    data.train_batch_size=48" in str(error.value)
    validate_config(compose_config([*files, *sizes, "data.train_batch_size=48"]))
