"""The engine's thread, without Ray: what is generated, and when."""

from __future__ import annotations

import threading
import time

import pytest
import rollout_tiny as tiny
import torch
from model_families import FAMILIES, tiny_model

from rlflow.utils.errors import ConfigError, ContractError, DeadlineError
from rlflow.workers.rollout.base import RolloutError, SamplingParams

WAIT_S = 30


def submit(engine, prompt, name="r", timeout_s=WAIT_S, **params):
    return engine.submit(prompt, SamplingParams(**params), request_id=name, timeout_s=timeout_s)


def run(engine, prompts, **params):
    futures = [submit(engine, p, f"r{i}", seed=i, **params) for i, p in enumerate(prompts)]
    return [f.result(WAIT_S) for f in futures]


def await_steps(engine, count):
    end = time.monotonic() + WAIT_S
    while engine.status()["decode_steps"] < count:
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_agree_with_a_plain_forward(make_engine, plain, temperature):
    prompts = tiny.prompts(12)
    results = run(make_engine(), prompts, temperature=temperature, max_tokens=20)
    for prompt, result in zip(prompts, results, strict=True):
        expected = tiny.log_probs_of(plain, prompt, result.token_ids, temperature)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_greedy_tokens_are_those_of_generate(make_engine, plain):
    prompts = tiny.prompts(6, seed=1)
    results = run(make_engine(slots=3), prompts, temperature=0.0, max_tokens=16)
    for prompt, result in zip(prompts, results, strict=True):
        expected = plain.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
        assert result.token_ids == expected


def test_bfloat16_weights_are_served_close_to_their_exact_values(make_engine, model_path):
    exact = tiny.plain_model(model_path, torch.bfloat16).float()
    prompts = tiny.prompts(4, seed=2)
    for compute in ("bfloat16", "float32"):
        engine = make_engine(dtype="bfloat16", engine_kwargs={"hf": {"compute_dtype": compute}})
        assert engine.model.dtype == getattr(torch, compute)
        for prompt, result in zip(prompts, run(engine, prompts, max_tokens=12), strict=True):
            expected = tiny.log_probs_of(exact, prompt, result.token_ids)
            tolerance = 1e-4 if compute == "float32" else 0.15
            torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=tolerance, rtol=0)


def test_tokens_are_the_same_alone_and_in_a_crowd(make_engine):
    prompts = tiny.prompts(20, seed=3)
    crowd = run(make_engine(slots=7), prompts, max_tokens=24, ignore_eos=True)
    alone = make_engine(slots=1)
    for i, (prompt, result) in enumerate(zip(prompts, crowd, strict=True)):
        single = submit(alone, prompt, seed=i, max_tokens=24, ignore_eos=True).result(WAIT_S)
        assert single.token_ids == result.token_ids
        assert single.log_probs == pytest.approx(result.log_probs, abs=1e-4)


def test_requests_join_and_leave_a_running_batch(make_engine, plain):
    engine = make_engine(slots=3)
    prompts = tiny.prompts(10, seed=4)
    lengths = [30, 3, 17, 1, 8, 25, 2, 11, 5, 30]
    futures = [
        submit(engine, p, f"r{i}", seed=i, max_tokens=n, ignore_eos=True)
        for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    results = [f.result(WAIT_S) for f in futures]
    assert [len(r.token_ids) for r in results] == lengths
    assert all(r.stop_reason == "length" for r in results)
    for prompt, result in zip(prompts, results, strict=True):
        expected = tiny.log_probs_of(plain, prompt, result.token_ids)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_equal_prompts_are_prefilled_once(make_engine, plain):
    engine = make_engine(slots=8)
    engine.pause()  # all of them are waiting when the engine starts
    prompt, other = tiny.prompts(2, seed=5, low=10)
    futures = [submit(engine, prompt, f"r{i}", seed=i, max_tokens=8, ignore_eos=True) for i in range(6)]
    futures.append(submit(engine, other, "other", seed=9, max_tokens=8, ignore_eos=True))
    engine.resume()
    results = [f.result(WAIT_S) for f in futures]
    assert engine.status()["prefill_tokens"] == len(prompt) - 1 + len(other) - 1
    assert engine.status()["shared_tokens"] == 5 * (len(prompt) - 1)
    assert len({tuple(r.token_ids) for r in results}) > 1
    for p, result in zip([prompt] * 6 + [other], results, strict=True):
        expected = tiny.log_probs_of(plain, p, result.token_ids)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_a_late_equal_prompt_copies_from_the_running_one(make_engine, plain):
    engine = make_engine(slots=1)
    prompt = tiny.prompts(1, seed=6, low=12)[0]
    # One slot: the second request is admitted after the first has left, so nothing is there to copy.
    [f.result(WAIT_S) for f in [submit(engine, prompt, str(i), seed=i, max_tokens=4) for i in range(2)]]
    assert engine.status()["shared_tokens"] == 0
    engine = make_engine(slots=4, max_model_len=256)
    first = submit(engine, prompt, "first", seed=0, max_tokens=240, ignore_eos=True)
    await_steps(engine, 1)
    late = submit(engine, prompt, "late", seed=1, max_tokens=10, ignore_eos=True).result(WAIT_S)
    assert not first.done()
    assert engine.status()["prefill_tokens"] == engine.status()["shared_tokens"] == len(prompt) - 1
    expected = tiny.log_probs_of(plain, prompt, late.token_ids)
    torch.testing.assert_close(torch.tensor(late.log_probs), expected, atol=1e-4, rtol=0)


def test_a_prompt_of_one_token_needs_no_prefill(make_engine, plain):
    engine = make_engine()
    result = submit(engine, [7], seed=0, max_tokens=5).result(WAIT_S)
    assert engine.status()["prefill_tokens"] == 0
    expected = tiny.log_probs_of(plain, [7], result.token_ids)
    torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)


def test_stop_tokens_end_a_sequence_and_belong_to_it(make_engine):
    engine = make_engine()
    prompt = tiny.prompts(1, seed=7)[0]
    free = submit(engine, prompt, seed=0, max_tokens=20, ignore_eos=True).result(WAIT_S)
    assert len(free.token_ids) == 20 and free.stop_reason == "length"
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    stopped = submit(engine, prompt, seed=0, max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)).result(WAIT_S)
    assert stopped.stop_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]


def test_the_end_token_of_the_model_config_stops_unless_ignored(make_engine, tmp_path):
    import json

    path = tiny.save_model(tmp_path)
    engine = make_engine(path=path)
    prompt = tiny.prompts(1, seed=8)[0]
    eos = submit(engine, prompt, seed=0, max_tokens=9, ignore_eos=True).result(WAIT_S).token_ids[4]
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [eos, 5]}))
    engine = make_engine(path=path)
    assert engine.model.eos_token_ids == {eos, 5, tiny.EOS}
    result = submit(engine, prompt, seed=0, max_tokens=9).result(WAIT_S)
    assert result.stop_reason == "stop" and result.token_ids[-1] == eos
    assert len(submit(engine, prompt, seed=0, max_tokens=9, ignore_eos=True).result(WAIT_S).token_ids) == 9


def test_max_tokens_is_clamped_to_the_room(make_engine):
    engine = make_engine(max_model_len=40)
    result = submit(engine, list(range(3, 38)), seed=0, max_tokens=100, ignore_eos=True).result(WAIT_S)
    assert len(result.token_ids) == 5 and result.stop_reason == "length"
    with pytest.raises(ContractError, match="max_model_len=40"):
        submit(engine, list(range(3, 43)))


def test_a_token_outside_the_vocabulary_is_refused(make_engine):
    with pytest.raises(ContractError, match="vocabulary of 512"):
        submit(make_engine(), [3, 600])


def test_abort_of_one_request_returns_what_it_has(make_engine):
    engine = make_engine(max_model_len=256)
    prompt = tiny.prompts(1, seed=9)[0]
    running = submit(engine, prompt, "running", seed=0, max_tokens=200, ignore_eos=True)
    other = submit(engine, prompt, "other", seed=1, max_tokens=20, ignore_eos=True)
    await_steps(engine, 3)
    assert engine.abort("running") and not engine.abort("nobody")
    result = running.result(WAIT_S)
    assert result.stop_reason == "abort"
    assert 3 <= len(result.token_ids) == len(result.log_probs) < 200
    assert other.result(WAIT_S).stop_reason == "length"
    engine.sleep()
    queued = submit(engine, prompt, "queued")
    assert engine.abort("queued")
    assert queued.result(WAIT_S).stop_reason == "abort" and queued.result().token_ids == []


def test_pause_aborts_all_and_later_requests_wait_for_resume(make_engine):
    engine = make_engine(slots=2)
    futures = [submit(engine, [i + 3], f"r{i}", seed=i, max_tokens=60, ignore_eos=True) for i in range(5)]
    await_steps(engine, 3)
    ids = engine.pause()
    results = [f.result(1) for f in futures]
    finished = [i for i, r in enumerate(results) if r.stop_reason != "abort"]
    assert sorted(ids) == [f"r{i}" for i in range(5) if i not in finished]
    assert all(len(r.log_probs) == len(r.token_ids) for r in results)
    later = submit(engine, [9], "later", seed=1, max_tokens=4, ignore_eos=True)
    assert engine.status()["waiting"] == 1 and not later.done()
    engine.resume()
    assert len(later.result(WAIT_S).token_ids) == 4


def test_an_interrupted_sequence_continues_with_the_same_random_numbers(make_engine):
    engine = make_engine()
    whole = submit(engine, [5, 6], seed=3, max_tokens=20, ignore_eos=True).result(WAIT_S)
    head = submit(engine, [5, 6], seed=3, max_tokens=8, ignore_eos=True).result(WAIT_S)
    tail = submit(engine, [5, 6, *head.token_ids], seed=3, max_tokens=12, ignore_eos=True).result(WAIT_S)
    assert head.token_ids + tail.token_ids == whole.token_ids


def test_sleep_frees_the_cache_and_wake_up_serves_again(make_engine):
    engine = make_engine()
    before = submit(engine, [5, 6, 7], seed=0, max_tokens=10).result(WAIT_S)
    assert engine.status()["kv_cache_allocated"]
    engine.sleep()
    assert not engine.status()["kv_cache_allocated"]
    waiting = submit(engine, [5, 6, 7], seed=0, max_tokens=10)
    engine.wake_up()
    assert waiting.result(WAIT_S).token_ids == before.token_ids


def test_sleep_aborts_what_does_not_end_in_time(make_engine):
    engine = make_engine(max_model_len=256)
    future = submit(engine, [5], seed=0, max_tokens=255, ignore_eos=True)
    await_steps(engine, 2)
    engine.sleep(drain_timeout_s=0.0)
    assert future.result(1).stop_reason == "abort" and len(future.result().token_ids) >= 1


def test_a_deadline_ends_a_request_with_its_cause(make_engine):
    engine = make_engine()
    engine.pause()
    with pytest.raises(DeadlineError, match="before its first token.*paused=True"):
        submit(engine, [5], "late", timeout_s=0.05).result(WAIT_S)


def test_an_exception_in_the_thread_reaches_every_caller(make_engine, monkeypatch):
    engine = make_engine()

    def broken(*args):
        raise ValueError("a broken kernel")

    engine.pause()
    futures = [submit(engine, [5 + i], f"r{i}", max_tokens=4) for i in range(3)]
    monkeypatch.setattr(engine.model, "decode", broken)
    engine.resume()
    for future in futures:
        with pytest.raises(RolloutError, match="ValueError: a broken kernel"):
            future.result(WAIT_S)
    with pytest.raises(RolloutError, match="a broken kernel"):
        submit(engine, [5])
    with pytest.raises(RolloutError, match="a broken kernel"):
        engine.pause()


def test_a_model_without_weights_is_refused_before_the_first_sync(make_engine):
    engine = make_engine(version=None, load_format="dummy")
    with pytest.raises(ContractError, match="before the first weight sync"):
        submit(engine, [5])


def test_an_idle_engine_uses_no_processor_time(make_engine):
    engine = make_engine()
    submit(engine, [5], max_tokens=2).result(WAIT_S)
    before = time.process_time()
    threading.Event().wait(0.3)
    assert time.process_time() - before < 0.05


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"attention_chunk_size": 16}, "attention_chunk_size=16"),
        ({"use_bidirectional_attention": True}, "later tokens"),
    ],
)
def test_attention_that_the_engine_does_not_do_is_refused_by_name(overrides, named):
    from transformers import LlamaConfig

    from rlflow.workers.rollout.hf.kv_cache import check_attention_support

    config = LlamaConfig(num_hidden_layers=2)
    for key, value in overrides.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=named):
        check_attention_support(config)


@pytest.fixture(scope="module", params=FAMILIES)
def family_path(request, tmp_path_factory):
    torch.manual_seed(0)
    name, options = FAMILIES[request.param]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    tokens = {"bos_token_id": 1, "eos_token_id": tiny.EOS, "pad_token_id": 0}
    model = tiny_model(name, vocab_size=tiny.VOCAB, **sizes, **heads, **tokens, **options)
    for param in model.parameters():
        if param.dim() > 1:
            param.data.mul_(3)
    path = tmp_path_factory.mktemp("family")
    model.save_pretrained(path)
    return str(path)


def test_every_family_gives_the_tokens_and_log_probs_of_its_plain_model(make_engine, family_path):
    """Prompts shorter and longer than the windows, slots of different lengths."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(family_path, dtype=torch.float32, attn_implementation="eager").eval()
    engine = make_engine(path=family_path, slots=3)
    prompts = [*tiny.prompts(4, seed=11), [5]]
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": tiny.EOS}
    for prompt, result in zip(prompts, run(engine, prompts, temperature=0.0, max_tokens=10), strict=True):
        assert result.token_ids == plain.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    for prompt, result in zip(prompts, run(engine, prompts, max_tokens=10), strict=True):
        expected = tiny.log_probs_of(plain, prompt, result.token_ids)
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=1e-4, rtol=0)
