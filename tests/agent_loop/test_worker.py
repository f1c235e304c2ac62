"""The whole way of a prompt: manager, workers, reward workers and the TransferQueue, all real; the LLM is scripted."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

from rlflow import transfer_queue as tq
from rlflow.agent_loop import AgentLoopManagerTQ
from rlflow.agent_loop.settings import BASELINE_COLUMN
from rlflow.reward_loop import RewardLoopManager
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ContractError
from rlflow.workers.rollout.base import TokenOutput

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCORERS = str(Path(__file__).parents[1] / "reward_loop" / "scorers.py")
LOOPS = str(Path(__file__).with_name("loops.py"))
ANSWER = [72, 105]
GREEDY = [72, 105, 33]


class ScriptedClient:
    """Does what the script says for a request id; else answers two tokens, sampled by weights of step 8."""

    def __init__(self, script=None):
        self.script = script or {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        action = self.script.get(request_id)
        if action == "raise":
            raise RuntimeError(f"server lost {request_id}")
        if action == "hang":
            await asyncio.Event().wait()
        if action == "slow":
            await asyncio.sleep(1.0)
        if action == "once":  # kills the worker at the first try only
            file = Path(self.script["file"])
            if not file.exists():
                file.write_text(str(os.getpid()))
                await asyncio.Event().wait()
        answer = GREEDY if sampling_params["temperature"] == 0 else ANSWER
        return TokenOutput(
            token_ids=[] if action == "nothing" else answer,
            log_probs={"no log-probs": None, "nothing": []}.get(action, [-0.5, -0.25, -0.125][: len(answer)]),
            stop_reason="stop",
            num_preempted=0,
            extra_fields={"global_steps": 8, "min_global_steps": 8, "max_global_steps": 8},
        )


SCRIPT = {
    "fails_1": "raise",
    "hangs_0": "hang",
    "hangs_1": "slow",
    "bare_0": "no log-probs",
    "busy_0": "hang",
    "empty_0": "nothing",
    "baseless_2": "raise",
}


@pytest.fixture(scope="module")
def table(ray_cluster):
    tq.init()
    yield
    tq.close()


@pytest.fixture(scope="module")
def config(make_config):
    config = make_config(agent={"num_workers": 2, "session_timeout_s": 4.0}, val_kwargs={"n": 1, "do_sample": False})
    config.actor_rollout_ref.model.external_lib = LOOPS
    config.reward.custom_reward_function = {"path": SCORERS}
    return config


@pytest.fixture(scope="module")
def rewards(table, config):
    manager = RewardLoopManager(config)
    yield manager.reward_loop_worker_handles
    manager.shutdown()


@pytest.fixture(scope="module")
def manager(table, rewards, config):
    manager = AgentLoopManagerTQ.create(
        config=config, llm_client=ScriptedClient(SCRIPT), reward_loop_worker_handles=rewards
    )
    yield manager
    manager.shutdown()


def batch(*uids, validate=False, **columns):
    rows = {
        "uid": list(uids),
        "raw_prompt": [[{"role": "user", "content": uid}] for uid in uids],
        "data_source": ["s"] * len(uids),
        "reward_model": [{"style": "rule", "ground_truth": ""} for _ in uids],
        "extra_info": [{"index": i} for i in range(len(uids))],
        "ability": ["math"] * len(uids),
        "dummy_tensor": torch.zeros(len(uids), 1, dtype=torch.uint8),
        **columns,
    }
    return tu.get_tensordict(rows, {"global_steps": 9, "validate": validate})


def finish(manager, prompts):
    """Submit prompts as the trainer does, wait for their markers; (markers, {key: tag}) of what is there then."""
    partition = "val" if tu.get(prompts, "validate") else "train"
    uids = tu.get(prompts, "uid")
    tq.kv_batch_put(uids, partition, tags=[{"is_prompt": True, "status": "pending", "global_steps": 9} for _ in uids])
    manager.generate_sequences(prompts)
    return wait_for(uids, partition)


def wait_for(uids, partition="train"):
    tq.kv_wait(partition, keys=uids, predicate=tq.Predicate(("finished", "failure")), timeout_s=60.0)
    tags = tq.kv_list(partition)[partition]
    rows = {key: tag for key, tag in tags.items() if key not in uids and key.split("_")[0] in uids}
    return {uid: tags[uid] for uid in uids}, rows


def fetch(*keys, partition="train", fields=None):
    return tq.kv_batch_get(list(keys), partition, fields)


def test_every_session_of_a_prompt_becomes_a_row(manager, tokenizer):
    markers, tags = finish(manager, batch("p1", "p2"))
    assert markers["p1"] == {"is_prompt": True, "status": "finished", "global_steps": 9}
    assert sorted(tags) == ["p1_0_0", "p1_1_0", "p2_0_0", "p2_1_0"]
    rows = fetch(*sorted(tags))
    prompt = tokenizer.decode(rows["prompts"][0])
    assert prompt.endswith("<|im_start|>user\np1<|im_end|>\n<|im_start|>assistant\n")
    p = len(rows["prompts"][0])
    assert tags["p1_0_0"] == {
        "status": "success",
        "prompt_len": p,
        "response_len": 2,
        "seq_len": p + 2,
        "global_steps": 9,
        "min_global_steps": 8,
        "max_global_steps": 8,
    }
    assert set(rows.keys()) == {
        "prompts", "responses", "response_mask", "loss_mask", "input_ids", "position_ids", "rollout_log_probs",
        "rm_scores", "uid", "session_id", "data_source", "reward_model", "raw_prompt", "extra_info", "index",
        "num_turns", "metrics", "extra_fields",
    }  # fmt: skip
    assert rows["responses"][0].tolist() == ANSWER
    assert rows["rollout_log_probs"][0].tolist() == [-0.5, -0.25]
    assert rows["rm_scores"][0].tolist() == [0.0, float(len(tokenizer.decode(ANSWER)))]
    assert tu.get(rows, "session_id") == [0, 1, 0, 1]
    assert tu.get(rows, "index") == [0, 0, 1, 1]
    extra = tu.get(rows, "extra_fields")[0]
    assert extra["reward_extra_info"] == {"acc": 2.0} and extra["stop_reason"] == "stop"
    assert tu.get(rows, "metrics")[0]["compute_score"] > 0


def test_a_failed_session_fails_its_prompt_and_keeps_the_siblings_row(manager):
    markers, tags = finish(manager, batch("fails", "good"))
    assert markers["fails"]["status"] == "failure" and markers["fails"]["failed_sessions"] == 1
    assert markers["fails"]["failed"] == "RuntimeError: server lost fails_1"
    assert markers["good"]["status"] == "finished"
    assert sorted(tags) == ["fails_0_0", "good_0_0", "good_1_0"]


def test_a_hanging_session_fails_at_its_deadline_after_its_sibling_was_stored(manager):
    names = {"agent_name": ["single_turn_agent", "test_stubborn"]}
    markers, tags = finish(manager, batch("hangs", "deaf", **names))
    assert "session deaf_0 took over 4 s" in markers["deaf"]["failed"] and markers["deaf"]["failed_sessions"] == 2
    assert markers["hangs"]["failed_sessions"] == 1
    reason = markers["hangs"]["failed"]
    assert "session hangs_0 took over 4 s" in reason and "'generate turn 0'" in reason
    assert sorted(tags) == ["hangs_1_0"]


def test_running_sessions_are_reported(manager):
    tq.kv_put("busy", "train", tag={"status": "pending"})
    manager.generate_sequences(batch("busy"))
    tq.kv_wait("train", keys=["busy_1_0"], predicate=tq.Predicate("success"), timeout_s=30)
    status = manager.status()
    (session,) = [session for session in status["running"] if session["uid"] == "busy" and session["session"] == 0]
    assert session["age_s"] >= 0 and session["worker"] in (0, 1) and session["phase"]
    assert all(worker["alive"] for worker in status["workers"]) and sum(w["prompts"] for w in status["workers"]) == 1


def test_sessions_without_log_probs_fail_instead_of_leaving_a_hole(manager):
    markers, _ = finish(manager, batch("bare"))
    assert "has no response_logprobs" in markers["bare"]["failed"]


def test_rewards_that_hang_raise_or_crash_mask_the_row_and_nothing_else(manager):
    truths = ["hang", "raise", "crash", "nan", ""]
    uids = [f"r{i}" for i in range(len(truths))]
    columns = {"reward_model": [{"ground_truth": truth} for truth in truths], "__rollout_n__": [1] * len(truths)}
    markers, tags = finish(manager, batch(*uids, **columns))
    assert {marker["status"] for marker in markers.values()} == {"finished"}
    reasons = ["no score within 1 s", "RuntimeError: no idea of that", "exited with code 7", "the score is nan"]
    for uid, reason in zip(uids, reasons, strict=False):
        assert reason in tags[f"{uid}_0_0"]["invalid"]
    assert "invalid" not in tags["r4_0_0"]
    rows = fetch(*(f"{uid}_0_0" for uid in uids))
    assert [int(mask.sum()) for mask in rows["response_mask"]] == [0, 0, 0, 0, 2]
    assert [int(mask.sum()) for mask in rows["loss_mask"]] == [0, 0, 0, 0, 2]
    assert [float(score.sum()) for score in rows["rm_scores"]] == [0.0, 0.0, 0.0, 0.0, 2.0]
    extra = tu.get(rows, "extra_fields")
    assert "no score within" in extra[0]["reward_invalid_reason"] and "reward_invalid_reason" not in extra[4]


def test_several_outputs_share_the_last_ones_reward(manager):
    _, tags = finish(manager, batch("two", **{"agent_name": ["test_two_outputs"], "__rollout_n__": [1]}))
    assert sorted(tags) == ["two_0_0", "two_0_1"]
    rows = fetch(*sorted(tags))
    assert [score.tolist() for score in rows["rm_scores"]] == [[0.0, 3.0], [0.0, 0.0, 3.0]]
    assert [extra["reward_extra_info"] for extra in tu.get(rows, "extra_fields")] == [{"acc": 3.0}] * 2
    assert tags["two_0_0"]["min_global_steps"] == 9  # no generate call told a version


def test_sessions_that_end_without_a_row_are_no_failure(manager):
    markers, tags = finish(manager, batch("none", **{"agent_name": ["test_nothing"]}))
    assert markers["none"]["status"] == "finished" and tags == {}


def test_an_empty_answer_is_a_row_like_any_other(manager):
    _, tags = finish(manager, batch("empty", "full"))
    assert tags["empty_0_0"]["response_len"] == 0 and "invalid" not in tags["empty_0_0"]
    rows = fetch("empty_0_0", "full_0_0")
    assert [len(response) for response in rows["responses"]] == [0, 2]
    assert [len(score) for score in rows["rm_scores"]] == [0, 2]


def test_a_loop_may_score_itself_but_not_with_nan(manager):
    _, tags = finish(manager, batch("own", **{"agent_name": ["test_own_score"]}))
    assert float(fetch("own_0_0")["rm_scores"][0].sum()) == 0.25
    assert "reward_score to nan" in tags["own_1_0"]["invalid"]


def test_an_unknown_loop_fails_with_its_name(manager):
    markers, _ = finish(manager, batch("lost", **{"agent_name": ["no_loop"]}))
    assert "'no_loop' is unknown; known:" in markers["lost"]["failed"] and markers["lost"]["failed_sessions"] == 2


def test_control_columns_steer_and_are_not_seen_by_loops(manager):
    columns = {"agent_name": ["test_kwargs"], "__rollout_n__": [3], "__do_sample__": [False], BASELINE_COLUMN: [False]}
    _, tags = finish(manager, batch("steer", **columns))
    assert len(tags) == 3
    seen = tu.get(fetch("steer_2_0"), "extra_fields")[0]["seen"]
    assert seen["hidden"] == [] and seen["step"] == 9
    assert {"uid", "session_id", "raw_prompt", "ability", "index"} <= set(seen["columns"])
    assert (seen["params"]["temperature"], seen["params"]["top_k"]) == (0.0, -1)


def test_a_greedy_session_gives_its_score_to_the_rows_of_its_prompt_and_leaves_no_row(manager):
    markers, tags = finish(manager, batch("based", "plain", **{BASELINE_COLUMN: [True, None]}))
    assert sorted(tags) == ["based_0_0", "based_1_0", "plain_0_0", "plain_1_0"]
    assert markers["based"] == {"is_prompt": True, "status": "finished", "global_steps": 9}
    assert [tags[key].get("reward_baseline") for key in sorted(tags)] == [3.0, 3.0, None, None], "three greedy tokens"
    assert [float(scores.sum()) for scores in fetch("based_0_0", "based_1_0")["rm_scores"]] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("uid", "columns", "failed", "reason"),
    [
        ("baseless", {}, 1, "server lost baseless_2"),
        ("unscored", {"reward_model": [{"ground_truth": "nan"}]}, 1, "has no score to be a baseline: .*nan"),
        ("mute", {"agent_name": ["test_nothing"]}, 1, "the agent loop returned no output"),
    ],
)
def test_a_prompt_without_a_baseline_fails_and_its_rows_go(manager, uid, columns, failed, reason):
    markers, tags = finish(manager, batch(uid, **{BASELINE_COLUMN: [True], **columns}))
    assert tags == {}
    assert markers[uid]["status"] == "failure" and markers[uid]["failed_sessions"] == failed
    assert re.search(reason, markers[uid]["failed"])


def test_validation_has_its_partition_and_is_greedy(manager):
    markers, tags = finish(manager, batch("v9r0a0", validate=True, **{"agent_name": ["test_kwargs"]}))
    assert markers["v9r0a0"]["status"] == "finished" and list(tags) == ["v9r0a0_0_0"]
    seen = tu.get(fetch("v9r0a0_0_0", partition="val"), "extra_fields")[0]["seen"]
    assert seen["params"]["temperature"] == 0.0


def test_malformed_prompts_fail_alone(manager):
    columns = {"raw_prompt": [None, [{"role": "user", "content": "x"}]], "__rollout_n__": [None, 0]}
    markers, _ = finish(manager, batch("m1", "m2", **columns))
    assert markers["m1"]["status"] == "failure" and markers["m1"]["failed_sessions"] == 2
    assert "asks for 0 sessions" in markers["m2"]["failed"]


def test_a_batch_without_prompts_or_step_is_refused(manager):
    with pytest.raises(ContractError, match="raw_prompt, global_steps"):
        manager.generate_sequences(tu.get_tensordict({"uid": ["u"]}))


def test_prompts_of_a_killed_worker_start_again(table, rewards, make_config, config, tmp_path):
    client = ScriptedClient({"again_1": "once", "file": str(tmp_path / "pid")})
    single = config.copy()
    single.actor_rollout_ref.rollout.agent = {"num_workers": 1, "session_timeout_s": 60.0}
    manager = AgentLoopManagerTQ.create(config=single, llm_client=client, reward_loop_worker_handles=rewards)
    tq.kv_put("again", "train", tag={"is_prompt": True, "status": "pending"})
    manager.generate_sequences(batch("again"))
    version, seen = 0, {}
    while "again_0_0" not in seen or not (tmp_path / "pid").exists():
        version, changes = tq.kv_watch("train", version, 30.0)
        seen.update(changes)
    os.kill(int((tmp_path / "pid").read_text()), 9)
    manager.status()  # finds the worker gone, waits for its restart, hands the prompt over again
    markers, tags = wait_for(["again"])
    assert markers["again"]["status"] == "finished" and sorted(tags) == ["again_0_0", "again_1_0"]
    manager.shutdown()
