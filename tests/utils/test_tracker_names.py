"""Which trackers there are and what they need, without importing one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlflow.config.overrides import compose_config
from rlflow.config.trackers import fit_default_trackers
from rlflow.utils.tracker_names import TRACKERS, tracker_names, tracker_problem


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine without wandb, where an offline run left its folder ./wandb."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "wandb", ("only_a_folder",))


def test_names() -> None:
    assert tracker_names("console") == ["console"]
    assert tracker_names(["wandb", "tracking", "file", "file"]) == ["wandb", "file"]
    assert tracker_names(None) == []
    assert tracker_problem("console") is tracker_problem("file") is None


@pytest.mark.parametrize("name", ["rl_insight", "vemlp_wandb"])
def test_names_of_other_versions(name: str) -> None:
    assert "not in this version" in (tracker_problem(name) or "")


def test_a_misspelt_name() -> None:
    assert "did you mean tensorboard?" in (tracker_problem("tensorbord") or "")
    assert "console, file, wandb" in (tracker_problem("xyz") or "")


@pytest.mark.usefixtures("without_wandb")
def test_a_missing_package_names_the_extra() -> None:
    assert "pip install 'rlflow[wandb]'" in (tracker_problem("wandb") or "")


@pytest.mark.usefixtures("without_wandb")
def test_a_default_is_dropped_and_a_choice_is_not() -> None:
    config = compose_config(["actor_rollout_ref.rollout.name=hf"])
    notice = fit_default_trackers(config, ["trainer.total_epochs=1"])
    assert notice is not None and "without wandb" in notice and list(config.trainer.logger) == ["console"]
    assert fit_default_trackers(config, []) is None

    chosen = ["actor_rollout_ref.rollout.name=hf", "trainer.logger=[console,wandb]"]
    config = compose_config(chosen)
    assert fit_default_trackers(config, chosen) is None and list(config.trainer.logger) == ["console", "wandb"]
