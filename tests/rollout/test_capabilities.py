"""The table of what engines can do: every refusal names engine, key, value and a way out."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from rlflow.config import CheckpointEngineConfig
from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout import capabilities
from rlflow.workers.rollout.base import SamplingParams
from rlflow.workers.rollout.capabilities import CAPABILITIES, EngineCapabilities, check_request, register_engine
from rlflow.workers.rollout.replica import RolloutReplicaRegistry


def test_every_engine_of_the_table_can_be_chosen() -> None:
    assert set(CAPABILITIES) <= set(RolloutReplicaRegistry._loaders)


def test_the_embedded_engine_reads_what_its_row_says() -> None:
    values = {"logprobs": True, "stop_token_ids": [1], "ignore_eos": False}
    for key in CAPABILITIES["hf"].sampling:
        SamplingParams.from_dict({key: values.get(key, 1)})


@pytest.mark.parametrize(
    ("engine", "params", "options", "match"),
    [
        ("hf", {"min_p": 0.1}, {}, r"engine hf cannot use min_p=0.1 .*rollout.name=vllm"),
        ("hf", {}, {"image_data": ["x"]}, r"engine hf cannot use image_data=.*Leave it out"),
        ("sglang", {}, {"priority": 3}, r"engine sglang cannot use priority=3 .*rollout.name=vllm"),
        ("vllm", {"beam_width": 4}, {}, r"engine vllm cannot use beam_width=4 .*Leave it out"),
        ("mine", {"min_p": 0.1}, {}, r"engine mine cannot use min_p=0.1"),
    ],
)  # fmt: skip
def test_a_request_that_would_be_ignored_is_refused(engine, params, options, match) -> None:
    with pytest.raises(ConfigError, match=match):
        check_request(engine, params, options)


def test_what_is_absent_or_empty_asks_for_nothing() -> None:
    check_request("hf", {"min_p": None, "top_p": 0.9}, {"image_data": None, "priority": 0})
    check_request("vllm", {"min_p": 0.1}, {"priority": 2, "image_data": []})


def test_an_engine_of_your_own_gets_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "CAPABILITIES", dict(CAPABILITIES))
    register_engine(EngineCapabilities(name="mine", title="Mine", sampling=frozenset({"heat"})))
    check_request("mine", {"heat": 1})
    header, rows = capabilities.markdown_rows()
    assert header[-1] == "Mine" and all(len(row) == len(header) for row in rows)


def checks(overrides: dict, row: EngineCapabilities | None = None, monkeypatch=None) -> tuple[str, str]:
    """(problems, notices) of the engine's checks on a default configuration with these rollout settings."""
    from types import SimpleNamespace

    from rlflow.config import RolloutConfig
    from rlflow.config.algorithm import AlgoConfig
    from rlflow.config.engine_checks import check_engine

    correction = overrides.pop("correction", {})
    algorithm = AlgoConfig()
    for key, value in correction.items():
        object.__setattr__(algorithm.rollout_correction, key, value)
    c = SimpleNamespace(
        rollout=RolloutConfig(**{"name": "hf", **overrides}),
        trainer=SimpleNamespace(device="cpu"),
        algorithm=algorithm,
    )
    problems: list[str] = []
    notices: list[str] = []
    check_engine(c, problems, notices)
    return "\n".join(problems), "\n".join(notices)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"name": "vlm"}, "try:    actor_rollout_ref.rollout.name=vllm"),
        ({"tensor_model_parallel_size": 4}, "tensor_model_parallel_size=4: the rollout engine hf"),
        ({"data_parallel_size": 2}, "try:    actor_rollout_ref.rollout.data_parallel_size=1, or"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2: the rollout engine hf"),
        ({"load_format": "gguf"}, "load_format=gguf: the rollout engine hf"),
        ({"nnodes": 1}, "try:    actor_rollout_ref.rollout.nnodes=0"),
    ],
)  # fmt: skip
def test_a_setting_the_engine_cannot_honour_is_refused_before_ray_starts(overrides, part) -> None:
    assert part in checks(overrides)[0]


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'rlflow[vllm]', or actor_rollout_ref.rollout.name=hf" in checks({"name": "vllm"})[0]
    monkeypatch.setitem(CAPABILITIES, "vllm", replace(CAPABILITIES["vllm"], packages=()))
    assert checks({"name": "vllm", "data_parallel_size": 2})[0] == ""


def test_defaults_pass() -> None:
    assert checks({}) == ("", "")


def test_a_backend_that_hybrid_replicas_do_not_use_is_said_to_have_no_effect() -> None:
    problems, notice = checks({"checkpoint_engine": CheckpointEngineConfig(backend="broadcast")})
    assert not problems and "checkpoint_engine.backend=broadcast has no effect" in notice


def test_truncated_sampling_that_meets_a_correction_is_told_why_its_ratios_are_off() -> None:
    assert "importance ratio" not in checks({"top_p": 0.9})[1]
    text = checks({"top_k": 20, "correction": {"rollout_is": "token"}})[1]
    assert "top_k=20 with algorithm.rollout_correction.rollout_is=token" in text and "importance ratio" in text
    assert "bypass_mode=true" in checks({"top_p": 0.9, "correction": {"bypass_mode": True}})[1]
