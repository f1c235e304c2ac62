from __future__ import annotations

import pytest

from rlflow.agent_loop.settings import BASELINE_COLUMN, AgentLoopSettings, request_seed


@pytest.fixture
def settings(make_config):
    return AgentLoopSettings.from_config(
        make_config(temperature=0.7, top_p=0.9, top_k=20, val_kwargs={"n": 3, "temperature": 0.5, "do_sample": True})
    )


def test_training_samples_as_the_rollout_config_says(settings):
    assert settings.sampling_params({}, validate=False) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "max_tokens": 64,
    }


def test_a_row_can_ask_for_greedy_and_for_its_own_number_of_sessions(settings):
    params = settings.sampling_params({"__do_sample__": False}, validate=False)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 1.0, -1)
    assert settings.sessions({}, False) == 2
    assert settings.sessions({"__rollout_n__": 5}, False) == 5


def test_the_greedy_session_of_a_prompt_comes_after_its_sampled_ones(settings):
    row = {BASELINE_COLUMN: True, "__rollout_n__": 3}
    assert settings.sessions(row, False) == 3
    assert settings.baseline_session(row, False) == 3 and list(settings.session_numbers(row, False)) == [0, 1, 2, 3]
    assert settings.baseline_session({}, False) is None and len(settings.session_numbers({}, False)) == 2
    assert settings.baseline_session(row, validate=True) is None


def test_validation_has_parameters_of_its_own(settings):
    assert settings.sampling_params({}, validate=True)["temperature"] == 0.5
    assert settings.sessions({}, True) == 3


def test_validation_is_greedy_unless_it_samples_whatever_the_temperature(make_config):
    settings = AgentLoopSettings.from_config(
        make_config(val_kwargs={"temperature": 0.9, "top_p": 0.5, "do_sample": False})
    )
    params = settings.sampling_params({}, validate=True)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 1.0, -1)


def test_ignore_eos_is_passed_on(make_config):
    settings = AgentLoopSettings.from_config(make_config(ignore_eos=True, calculate_log_probs=False))
    params = settings.sampling_params({}, validate=False)
    assert params["ignore_eos"] is True and params["logprobs"] is False


def test_request_seeds_are_fixed_numbers_of_63_bits():
    seed = request_seed(42, "e0r0a0", 0, 0)
    assert seed == request_seed(42, "e0r0a0", 0, 0)
    seeds = {request_seed(s, u, i, t) for s in (1, 2) for u in ("a", "b") for i in range(20) for t in range(20)}
    assert len(seeds) == 1600 and all(0 <= seed < 2**63 for seed in seeds)
