"""Every key of the tree is honoured, named as without effect, or refused: nothing that is set is ignored in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.config.checks import validate_config
from rlflow.config.describe import describe, keys_of
from rlflow.config.key_check import changed, check_keys
from rlflow.config.key_rules import RULES
from rlflow.config.key_states import HONOURED, INERT, UNBUILT, matches, rule_for
from rlflow.config.old_keys import MOVED, OTHER_PLACES, OVER_ALL_RANKS
from rlflow.config.overrides import compose_config
from rlflow.utils.errors import ConfigError

PACKAGE = Path(rlflow.__file__).parent
# Read as a whole, by code that does not name the key.
READ_AS_A_WHOLE = {
    "ray_kwargs.ray_init.num_cpus": "the arguments of ray.init go to it as they are",
    "**.optim.grad_clip": "the optimizer's dataclass gives it to clip_grad",
    "**.optim.warmup_style": "the optimizer's dataclass gives it to lr_scheduler_type",
    "actor_rollout_ref.rollout.checkpoint_engine.*_timeout_s": "read by the name of the phase",
}


def sources() -> str:
    """The code that acts on a configuration: all but the tree and its types."""
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "config"]
    files += [path for path in (PACKAGE / "config").glob("*_checks.py")]
    files += [PACKAGE / "config" / name for name in ("checks.py", "machine.py", "critic.py", "reward.py")]
    return "\n".join(path.read_text() for path in files)


def unread(keys: list[str], text: str) -> list[str]:
    """Keys whose last name stands nowhere as an attribute or a string."""
    names = set(re.findall(r"(?:\.|[\"'])([A-Za-z_][\w]*)\b", text))
    return [key for key in keys if key.rpartition(".")[2] not in names]


def is_moved(key: str) -> bool:
    places = {*MOVED, *OTHER_PLACES, *OVER_ALL_RANKS}
    return key in places or key.startswith(("reward_model.rollout.", "reward_model.model."))


def leaves() -> dict[str, Any]:
    return {key: value for key, value in keys_of().items() if not (isinstance(value, dict) and value)}


def test_what_counts_as_honoured_is_read_by_code() -> None:
    kept = [key for key in leaves() if rule_for(key) is None and not is_moved(key)]
    kept = [key for key in kept if not any(matches(pattern, key) for pattern in READ_AS_A_WHOLE)]
    assert len(kept) > 200
    assert unread(kept, sources()) == []


def test_that_test_can_fail() -> None:
    assert unread(["trainer.never_read_by_anyone", "data.shuffle"], sources()) == ["trainer.never_read_by_anyone"]


def test_every_rule_concerns_a_key() -> None:
    keys = [*keys_of(), *keys_of("ppo_trainer", "megatron")]
    assert [rule.pattern for rule in RULES if not any(matches(rule.pattern, key) for key in keys)] == []


def test_a_rule_is_the_first_for_some_key() -> None:
    keys = [*keys_of(), *keys_of("ppo_trainer", "megatron")]
    first = {rule.pattern for rule in map(rule_for, keys) if rule is not None}
    assert [rule.pattern for rule in RULES if rule.pattern not in first] == []


def other(value: Any) -> Any:
    """A value that is not this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return {"x": 1} if isinstance(value, dict) else ["x"] if isinstance(value, list) else "other"


def test_every_key_that_is_not_honoured_is_named_when_it_is_set() -> None:
    from omegaconf import OmegaConf, open_dict

    ruled = {key: value for key, value in leaves().items() if rule_for(key) is not None}
    config: Any = compose_config(["actor_rollout_ref.rollout.name=hf"])
    with open_dict(config):
        for key, value in ruled.items():
            OmegaConf.update(config, key, other(value), merge=False)
    problems: list[str] = []
    notices: list[str] = []
    check_keys(config, problems, notices)
    said = "\n".join((*problems, *notices))
    unsaid = [key for key in ruled if key not in said and f"{key.rpartition('.')[0]}.x" not in said]
    # Nodes that follow others as wholes are replaced above before their own keys.
    assert [key for key in unsaid if not key.endswith((".mtp", ".qat"))] == []
    assert len(problems) > 40 and len(notices) > 20


def test_the_defaults_are_silent(files: list[str]) -> None:
    assert list(changed({"a": {"b": 1}}, {"a": {"b": 1}, "a.b": 1})) == []
    problems: list[str] = []
    notices: list[str] = []
    check_keys(compose_config(), problems, notices)
    assert problems == [] and notices == []


def test_a_key_without_effect_gives_one_line_and_a_missing_feature_a_problem(files: list[str]) -> None:
    notices = validate_config(compose_config([*files, "data.return_raw_chat=false", "data.return_full_prompt=true"]))
    assert sum("data.return" in notice for notice in notices) == 1
    with pytest.raises(ConfigError, match=r"actor\.profiler\.enable=true asks for profiling(.|\n)*try:    leave it"):
        validate_config(compose_config([*files, "actor_rollout_ref.actor.profiler.enable=true"]))


def test_a_key_that_another_engine_honours_says_so() -> None:
    assert "vllm" in describe("actor_rollout_ref.rollout.enforce_eager").reason
    states = {describe(key).state for key in ("data.shuffle", "data.truncation", "distillation.enabled")}
    assert states == {HONOURED, INERT, UNBUILT}
