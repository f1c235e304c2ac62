"""Rounds: what an engine generates does not depend on when requests arrive (`rollout.full_determinism`)."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import rollout_tiny as tiny

from rlflow.utils.errors import ContractError, DeadlineError
from rlflow.workers.rollout.base import SamplingParams
from rlflow.workers.rollout.hf.admission import FirstCome, Rounds
from rlflow.workers.rollout.hf.batch import Generation

WAIT_S = 30
SESSIONS = [f"e0r{row}a0_{number}" for row in range(5) for number in range(2)]
PROMPTS = dict(zip([name.split("_")[0] for name in SESSIONS[::2]], tiny.prompts(5, seed=30), strict=True))


def ask(engine, session: str, turn: int = 0, prompt=None, timeout_s: float = WAIT_S, **params) -> Future[Generation]:
    options = {"max_tokens": 4 + (SESSIONS.index(session) * 7 + turn * 5) % 11, "ignore_eos": True, **params}
    return engine.submit(
        prompt or PROMPTS[session.split("_")[0]],
        SamplingParams(seed=hash((SESSIONS.index(session), turn)) % 2**32, **options),
        request_id=f"{session}-{turn}",
        timeout_s=timeout_s,
        session=session,
        turn=turn,
    )


def unfold(engine, session: str, turns: int) -> list[tuple[list[int], list[float]]]:
    """A session with tools: each turn's prompt is all before it and one more token."""
    seen = list(PROMPTS[session.split("_")[0]])
    results = []
    for turn in range(turns):
        result = ask(engine, session, turn, seen).result(WAIT_S)
        results.append((result.token_ids, result.log_probs))
        seen += [*result.token_ids, 7 + turn]
    engine.end_session(session)
    return results


def play(engine, order: list[str]) -> dict[str, list[tuple[list[int], list[float]]]]:
    """All sessions at once, a thread each, begun in `order`."""
    turns = {name: number % 4 for number, name in enumerate(SESSIONS)}  # some ask for nothing
    with ThreadPoolExecutor(len(SESSIONS)) as pool:
        running = {name: pool.submit(unfold, engine, name, turns[name]) for name in order}
        return {name: running[name].result(WAIT_S) for name in SESSIONS}


def shuffled(seed: int) -> list[str]:
    return random.Random(seed).sample(SESSIONS, len(SESSIONS))


@pytest.mark.parametrize("slots", [3, 16])
def test_tokens_and_log_probs_are_the_same_bit_for_bit_in_any_order_of_arrival(make_engine, slots):
    results = []
    for seed in range(4):
        engine = make_engine(slots=slots, admission=Rounds(), max_model_len=128)
        engine.announce(SESSIONS)
        results.append(play(engine, shuffled(seed)))
    assert any(len(turns) == 3 for turns in results[0].values())
    for other in results[1:]:
        assert other == results[0]


def test_without_rounds_the_order_of_arrival_shows_in_the_last_bits(make_engine):
    """What rounds are for: should this fail, the forward has become independent of its batch, and they may go."""
    seen = set()
    for seed in range(3):
        engine = make_engine(slots=3, admission=FirstCome())
        engine.pause()
        futures = {name: ask(engine, name) for name in shuffled(seed)}
        engine.resume()
        seen.add(repr([futures[name].result(WAIT_S).log_probs for name in SESSIONS]))
    assert len(seen) > 1


def test_a_second_announcement_is_served_as_on_a_fresh_engine(make_engine):
    engine = make_engine(slots=4, admission=Rounds(), max_model_len=128)
    results = []
    for seed in range(2):
        engine.announce(SESSIONS)
        results.append(play(engine, shuffled(seed)))
    assert results[0] == results[1]


def test_a_round_waits_for_every_session_until_it_asks_or_ends(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:3])
    first, second = ask(engine, SESSIONS[1]), ask(engine, SESSIONS[0])
    engine.end_session("never heard of")
    status = engine.status()
    assert (status["waiting"], status["running"], status["decode_steps"]) == (2, 0, 0)
    engine.end_session(SESSIONS[2])  # it ends without a request
    assert first.result(WAIT_S).stop_reason == second.result(WAIT_S).stop_reason == "length"


def test_later_requests_wait_for_the_next_round(make_engine):
    engine = make_engine(admission=Rounds(), max_model_len=256)
    engine.announce(SESSIONS[:2])
    long = ask(engine, SESSIONS[1], max_tokens=200)
    ask(engine, SESSIONS[0], max_tokens=1).result(WAIT_S)
    follow = ask(engine, SESSIONS[0], 1, max_tokens=1)
    assert not long.done(), "the second request arrived during the first round"
    long.result(WAIT_S)
    assert not follow.done() and engine.status()["waiting"] == 1
    engine.end_session(SESSIONS[1])
    assert follow.result(WAIT_S).stop_reason == "length"


def test_an_aborted_request_leaves_its_session_awaited(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:2])
    gone, kept = ask(engine, SESSIONS[0]), ask(engine, SESSIONS[1], timeout_s=WAIT_S)
    engine.pause()  # aborts both
    assert gone.result(WAIT_S).stop_reason == kept.result(WAIT_S).stop_reason == "abort"
    engine.resume()
    again = ask(engine, SESSIONS[1])
    assert engine.status()["waiting"] == 1 and not again.done()
    engine.end_session(SESSIONS[0])
    assert again.result(WAIT_S).stop_reason == "length"


def test_a_deadline_bounds_the_wait_for_others_and_names_them(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:8])
    alone = ask(engine, SESSIONS[0], timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"waiting for a request or the end of session e0r0a0_1.* and 2 more"):
        alone.result(WAIT_S)


def test_sessions_of_prompts_that_no_longer_run_are_forgotten(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:4])  # their worker dies: nobody ends them
    engine.announce(SESSIONS[6:7], keep=["e0r1a0"])
    waiting = ask(engine, SESSIONS[6])
    assert not waiting.done()
    for name in SESSIONS[2:4]:  # of the prompt that was kept
        engine.end_session(name)
    assert waiting.result(WAIT_S).stop_reason == "length"


def test_a_session_that_begins_again_loses_what_it_asked_for_before(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:2])
    old = ask(engine, SESSIONS[0])
    engine.announce(SESSIONS[:1], keep=["e0r0a0"])
    assert old.result(WAIT_S).stop_reason == "abort"
    new, other = ask(engine, SESSIONS[0]), ask(engine, SESSIONS[1])
    assert new.result(WAIT_S).stop_reason == other.result(WAIT_S).stop_reason == "length"


def test_requests_of_nobody_are_served_and_not_waited_for(make_engine):
    engine = make_engine(admission=Rounds())
    assert engine.submit([5, 6], SamplingParams(max_tokens=3), request_id="a").result(WAIT_S).token_ids
    engine.announce(SESSIONS[:1])
    stranger = engine.submit([5, 6], SamplingParams(max_tokens=3), request_id="b")
    assert not stranger.done() and engine.status()["waiting"] == 1
    ask(engine, SESSIONS[0]).result(WAIT_S)
    assert stranger.result(WAIT_S).token_ids


def test_without_usable_weights_requests_are_refused_whoever_is_missing(make_engine):
    engine = make_engine(admission=Rounds())
    engine.announce(SESSIONS[:2])
    engine.pause()
    failed = engine.load_weights(lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    engine.resume()
    with pytest.raises(ContractError, match="cannot generate"):
        ask(engine, SESSIONS[0]).result(WAIT_S)
