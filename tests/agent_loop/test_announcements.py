"""With `rollout.full_determinism` the servers hear of every session before it begins and when it has ended."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

import cloudpickle
import pytest

from rlflow import transfer_queue as tq
from rlflow.agent_loop import AgentLoopManagerTQ
from rlflow.utils import tensordict_utils as tu
from rlflow.workers.rollout.base import TokenOutput

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class NotingClient:
    """Writes down what it is told, a line each; the prompt's name says how a session goes."""

    def __init__(self, file: Path):
        self.file = file

    def note(self, *words):
        with open(self.file, "a") as stream:
            stream.write(" ".join(map(str, words)) + "\n")

    def announce_sessions(self, sessions, keep):
        self.note("announce", ",".join(sessions), ",".join(sorted(keep)))

    def end_session(self, session):
        self.note("end", session)

    async def generate(self, request_id, *, prompt_ids, sampling_params, session, turn):
        self.note("generate", session, turn)
        uid, number = session.split("_")
        if uid == "fails":
            raise RuntimeError("lost")
        if uid == "hangs" or (uid == "dies" and number == "1" and not self.file.with_suffix(".pid").exists()):
            self.file.with_suffix(".pid").write_text(str(os.getpid()))
            await asyncio.Event().wait()
        return TokenOutput(token_ids=[72], log_probs=[-0.5], stop_reason="stop", num_preempted=0, extra_fields={})

    def lines(self):
        return [line.split(" ") for line in self.file.read_text().splitlines()]


@pytest.fixture(scope="module")
def table(ray_cluster):
    tq.init()
    yield
    tq.close()


@pytest.fixture
def client(tmp_path):
    return NotingClient(tmp_path / "notes")


@pytest.fixture
def manager(table, make_config, client):
    config = make_config(agent={"num_workers": 1, "session_timeout_s": 3.0}, n=2, full_determinism=True)
    manager = AgentLoopManagerTQ.create(config=config, llm_client=client)
    yield manager
    manager.shutdown()


def submit(manager, *uids, **columns):
    rows = {"uid": list(uids), "raw_prompt": [[{"role": "user", "content": uid}] for uid in uids], **columns}
    tq.kv_batch_put(list(uids), "train", tags=[{"is_prompt": True, "status": "pending"} for _ in uids])
    manager.generate_sequences(tu.get_tensordict(rows, {"global_steps": 1, "validate": False}))


def settle(*uids):
    tq.kv_wait("train", keys=list(uids), predicate=tq.Predicate(("finished", "failure")), timeout_s=60.0)


def test_sessions_are_announced_in_the_order_of_the_batch_and_ended_however_they_go(manager, client):
    columns = {"agent_name": ["single_turn_agent", "single_turn_agent", "single_turn_agent", "no_such_loop"]}
    submit(manager, "good", "fails", "hangs", "lost", **columns)
    settle("good", "fails", "hangs", "lost")
    lines = client.lines()
    sessions = [f"{uid}_{i}" for uid in ("good", "fails", "hangs", "lost") for i in range(2)]
    assert lines[0] == ["announce", ",".join(sessions), ""]
    assert Counter(words[1] for words in lines if words[0] == "end") == Counter(sessions)
    begun = {words[1] for words in lines if words[0] == "generate"}
    assert begun == set(sessions[:6])


def test_prompts_of_a_killed_worker_are_announced_again(manager, client):
    submit(manager, "dies")
    version, seen = 0, {}
    while "dies_0_0" not in seen or not client.file.with_suffix(".pid").exists():
        version, changes = tq.kv_watch("train", version, 30.0)
        seen.update(changes)
    os.kill(int(client.file.with_suffix(".pid").read_text()), 9)
    manager.status()  # finds the worker gone and hands the prompt over again
    settle("dies")
    lines = client.lines()
    assert [words[1] for words in lines if words[0] == "announce"] == ["dies_0,dies_1"] * 2
    last = max(number for number, words in enumerate(lines) if words[0] == "announce")
    assert {words[1] for words in lines[last:] if words[0] == "end"} == {"dies_0", "dies_1"}
