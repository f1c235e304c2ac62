"""The best checkpoint: which step it is, that it is never deleted, and what a resumed run makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.checkpoint import list_checkpoints, prune, write_manifest
from rlflow.trainer.ppo.best import best_steps, first_core_mean, forget_best_after, mark_best, mark_saved

ACC = "val-core/s/acc/mean@2"


def config(metric: str | None = None, mode: str = "max", keep: int = 1) -> Any:
    return OmegaConf.create({"trainer": {"best_metric": metric, "best_mode": mode, "max_best_ckpt_to_keep": keep}})


def best_step(folder: Path) -> int | None:
    return next(iter(best_steps(folder, config())), None)


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint = folder / f"global_step_{step}"
        checkpoint.mkdir()
        (checkpoint / "weights").write_text("w")
        write_manifest(checkpoint)


def state(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "best_checkpoint.json").read_text())
    return result


def test_the_best_saved_step_is_named(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6)
    assert mark_best(tmp_path, 2, {ACC: 0.2, "actor/lr": 1}, True, config())
    assert mark_best(tmp_path, 4, {ACC: 0.5}, True, config())
    assert not mark_best(tmp_path, 6, {ACC: 0.5}, True, config()), "no improvement"
    found = state(tmp_path)
    assert (found["step"], found["metric"], found["value"]) == (4, ACC, 0.5)
    assert Path(found["path"]) == tmp_path / "global_step_4" and best_step(tmp_path) == 4


def test_lower_can_be_better(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    assert mark_best(tmp_path, 1, {"val-aux/s/loss/mean@1": 2.0}, True, config("val-aux/s/loss/mean@1", "min"))
    assert mark_best(tmp_path, 2, {"val-aux/s/loss/mean@1": 1.0}, True, config("val-aux/s/loss/mean@1", "min"))


def test_an_unsaved_step_is_remembered_but_never_pointed_to(tmp_path: Path) -> None:
    assert not mark_best(tmp_path, 0, {ACC: 0.9}, False, config())
    found = state(tmp_path)
    assert (found["step"], found["value"], found["path"]) == (0, 0.9, None) and best_step(tmp_path) is None
    save(tmp_path, 2)
    assert mark_best(tmp_path, 2, {ACC: 0.1}, True, config())
    assert not mark_best(tmp_path, 3, {ACC: 0.8}, False, config())
    assert state(tmp_path)["step"] == best_step(tmp_path) == 2
    assert [entry["saved"] for entry in state(tmp_path)["history"]] == [False, True, False]


def test_retention_spares_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    mark_best(tmp_path, 2, {ACC: 0.5}, True, config())
    best = best_step(tmp_path)
    assert best is not None
    assert [path.name for path in prune(tmp_path, 1, protect=[best])] == ["global_step_3", "global_step_1"]
    assert [path.name for path in list_checkpoints(tmp_path)] == ["global_step_4", "global_step_2"]
    assert Path(state(tmp_path)["path"]).is_dir()


def test_a_protected_step_does_not_count_against_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert [path.name for path in prune(tmp_path, 2, protect=[4])] == ["global_step_2", "global_step_1"]


def test_a_run_that_goes_back_forgets_what_it_will_do_again(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 6)
    for step, value in ((2, 0.3), (4, 0.2), (6, 0.9)):
        mark_best(tmp_path, step, {ACC: value}, True, config())
    forget_best_after(tmp_path, 4, config())
    assert state(tmp_path)["step"] == 2
    assert mark_best(tmp_path, 6, {ACC: 0.4}, True, config())
    # Also without being told: a validation replaces those of the same and of later steps.
    assert not mark_best(tmp_path, 4, {ACC: 0.1}, True, config())
    assert [entry["step"] for entry in state(tmp_path)["history"]] == [2, 4] and state(tmp_path)["step"] == 2


def test_a_best_checkpoint_that_was_deleted_is_not_pointed_to(tmp_path: Path) -> None:
    save(tmp_path, 4)
    mark_best(tmp_path, 4, {ACC: 0.2}, True, config())
    (tmp_path / "global_step_4").rename(tmp_path / "elsewhere")
    save(tmp_path, 6)
    assert mark_best(tmp_path, 6, {ACC: 0.1}, True, config())


def test_steps_without_a_validation_change_nothing(tmp_path: Path) -> None:
    assert not mark_best(tmp_path, 1, {"actor/lr": 1.0}, True, config())
    assert not (tmp_path / "best_checkpoint.json").exists()
    save(tmp_path, 1)
    mark_best(tmp_path, 1, {ACC: 0.1}, True, config())
    before = state(tmp_path)
    assert not mark_best(tmp_path, 2, {"actor/lr": 1.0}, True, config())
    assert not mark_best(tmp_path, 3, {ACC: float("nan")}, True, config())
    assert state(tmp_path) == before


def test_a_misspelt_metric_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlflow")
    assert not mark_best(tmp_path, 1, {ACC: 0.5}, True, config("val-core/s/accuracy"))
    assert "trainer.best_metric=val-core/s/accuracy" in caplog.text and ACC in caplog.text


def test_the_default_is_the_first_headline_mean() -> None:
    names = ["val-core/b/reward/mean@1", "val-core/a/reward/best@4/mean", "val-core/a/reward/mean@4", "val-aux/a"]
    assert first_core_mean(dict.fromkeys(names, 0.0)) == "val-core/a/reward/mean@4"
    assert first_core_mean({"x": 1}) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"history": [{"step": "x"}]}', '{"history": 3}'])
def test_an_unreadable_file_is_begun_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "best_checkpoint.json").write_text(text)
    save(tmp_path, 1)
    assert best_step(tmp_path) is None
    assert mark_best(tmp_path, 1, {ACC: 0.5}, True, config()) and state(tmp_path)["step"] == 1


def test_a_step_whose_save_ends_later_is_the_best_from_then_on(tmp_path: Path) -> None:
    mark_best(tmp_path, 1, {ACC: 0.5}, False, config())
    mark_best(tmp_path, 2, {ACC: 0.4}, False, config())
    assert best_step(tmp_path) is None
    save(tmp_path, 1)
    assert mark_saved(tmp_path, 1, config()) and best_step(tmp_path) == 1
    assert [entry["step"] for entry in state(tmp_path)["history"]] == [1, 2], "what came meanwhile stays"
    assert not mark_saved(tmp_path, 3, config()), "a step without a validation"


def test_several_best_ones_stay_also_those_of_an_earlier_run(tmp_path: Path) -> None:
    save(tmp_path, *range(1, 7))
    for step, value in enumerate((0.9, 0.1, 0.7, 0.9, 0.2, 0.3), start=1):
        mark_best(tmp_path, step, {ACC: value}, True, config())
    assert best_steps(tmp_path, config(keep=3)) == [1, 4, 3] and best_steps(tmp_path, config(keep=0)) == []
    assert best_steps(tmp_path, config(mode="min", keep=2)) == [2, 5]
    prune(tmp_path, 1, protect=best_steps(tmp_path, config(keep=3)))
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["6", "4", "3", "1"]


def test_a_lost_file_is_made_again_from_the_numbers_and_the_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    numbers = [(0, 0.9), (2, 0.6), (3, 0.8), (4, 0.5), (6, 0.1)]
    lines = [json.dumps({"step": step, "data": {ACC: value, "actor/lr": 1.0}}) for step, value in numbers]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps({"step": 5, "data": {"actor/lr": 1.0}})]))
    (tmp_path / "best_checkpoint.json").write_text("{")
    assert not mark_best(tmp_path, 6, {ACC: 0.1}, False, config())
    found = state(tmp_path)
    assert found["step"] == 2 and Path(found["path"]).name == "global_step_2"
    assert [(entry["step"], entry["saved"]) for entry in found["history"]] == [
        (0, False),
        (2, True),
        (3, False),
        (4, True),
        (6, False),
    ]
