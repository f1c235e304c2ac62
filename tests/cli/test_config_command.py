"""`rlflow config`: questions about keys, the resolved tree."""

from __future__ import annotations

import json

import pytest

from rlflow.cli.main import main

CANARY = "canary-5f3a9c1e77"


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "rollout.n"]) == 0
    text = capsys.readouterr().out
    for part in ("actor_rollout_ref.rollout.n\n", "Sessions a prompt", "a whole number", "default: 1", "rollout.yaml:"):
        assert part in text
    assert main(["config", "explain", "actor_rollout_ref.rollout.prompt_length"]) == 0
    assert "default: that of data.max_prompt_length" in capsys.readouterr().out


def test_a_pattern_shows_all_that_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "*.optim.lr*", "--json"]) == 0
    keys = [one["key"] for one in json.loads(capsys.readouterr().out)]
    assert {"actor_rollout_ref.actor.optim.lr", "critic.optim.lr_scheduler_type"} <= set(keys)
    assert main(["config", "explain", "*.optim.lr*"]) == 0
    assert capsys.readouterr().out.count("\n") == len(keys), "many keys: a line each"


def test_a_misspelt_key_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", "trainer.total_epoch"]) == 2
    assert "did you mean trainer.total_epochs" in capsys.readouterr().err
    assert main(["config", "explain", "nothing*like*this"]) == 2
    assert "no key matches 'nothing*like*this'" in capsys.readouterr().err


def test_the_tree_is_shown_resolved_and_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    secrets = [f"+reward.reward_kwargs.api_key={CANARY}", f"trainer.experiment_name=x-{CANARY}"]
    assert main(["config", "show", "data.max_prompt_length=77", *secrets]) == 0
    text = capsys.readouterr().out
    assert "    prompt_length: 77\n" in text and "api_key: '***'" in text and CANARY not in text
    assert main(["config", "show", "--node", "algorithm.kl_ctrl", "algorithm.kl_ctrl.kl_coef=0.5"]) == 0
    assert capsys.readouterr().out.startswith("type: fixed\nkl_coef: 0.5\n")
    assert main(["config", "show", "--node", "algorithm.gama"]) == 2
    assert "did you mean algorithm.gamma" in capsys.readouterr().err
