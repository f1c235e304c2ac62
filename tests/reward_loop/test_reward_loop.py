"""Reward workers as Ray actors."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from rlflow.reward_loop import Invalid, RewardInput, RewardLoopManager, Score
from rlflow.utils.errors import ConfigError
from rlflow.utils.ray_utils import ray_get

pytestmark = pytest.mark.usefixtures("ray_cluster")

SCORERS = str(Path(__file__).with_name("scorers.py"))


def config(**reward):
    return OmegaConf.create({"reward": {"num_workers": 1, "timeout_s": 1.0, **reward}})


def data(action="", text="abc", **columns):
    row = {"data_source": "s", "reward_model": {"ground_truth": action}, "extra_info": {}, **columns}
    return RewardInput([1], [2], [1], text, row)


def scores(handle, *inputs):
    return ray_get([handle.compute_score.remote(item) for item in inputs], what="scores", timeout_s=60)


@pytest.fixture(scope="module")
def manager(ray_cluster):
    manager = RewardLoopManager(config(num_workers=2, custom_reward_function={"path": SCORERS}))
    yield manager
    manager.shutdown()


def test_scores_and_reasons_come_back_as_values(manager):
    handle = manager.reward_loop_worker_handles[0]
    started = time.monotonic()
    result = scores(handle, data(), data("raise"), data("hang"), data("crash"), data("see"), data(reward_model=None))
    assert time.monotonic() - started < 15
    assert result[0] == Score(3.0, {"acc": 3.0})
    reasons = ["RuntimeError: no idea", "no score within 1 s", "exited with code 7"]
    for invalid, reason in zip(result[1:4], reasons, strict=True):
        assert isinstance(invalid, Invalid) and reason in invalid.reason
    assert result[4].value == 1.0 and result[4].extra_info["seen"][0] == "s"
    assert result[5] == Invalid('the row has no reward_model["ground_truth"]')
    status = manager.status()[0]
    assert status["scored"] == 2 and sum(status["invalid"].values()) == 4


def test_no_process_is_left_after_shutdown(ray_cluster):
    manager = RewardLoopManager(config(custom_reward_function={"path": SCORERS}))
    handle = manager.reward_loop_worker_handles[0]
    hanging = handle.compute_score.remote(data("hang holding the GIL"))
    scores(handle, data("pid"))
    pids = manager.status()[0]["scorer_pids"]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    manager.shutdown()
    del hanging
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_killed_worker_comes_back(ray_cluster):
    manager = RewardLoopManager(config(custom_reward_function={"path": SCORERS}))
    handle = manager.reward_loop_worker_handles[0]
    pid = psutil.Process(manager.status()[0]["scorer_pids"][0]).ppid()
    os.kill(pid, 9)
    end = time.monotonic() + 30
    while "dead" in manager.status()[0]:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert scores(handle, data()) == [Score(3.0, {"acc": 3.0})]
    manager.shutdown()


def test_a_manager_of_the_users_own_that_hangs_or_raises_is_bounded(ray_cluster, tmp_path):
    file = tmp_path / "my_manager.py"
    file.write_text(
        "import asyncio\n"
        "from rlflow.reward_loop import RewardManagerBase, reward_manager\n"
        "from rlflow.reward_loop import worker\n"
        "worker.MANAGER_GRACE_S = 0.0\n"
        "class Mine(RewardManagerBase):\n"
        "    async def run_single(self, data):\n"
        "        if data.response_text == 'hang':\n            await asyncio.Event().wait()\n"
        "        if data.response_text == 'raise':\n            raise KeyError('x')\n"
        "        return {'reward_score': await self.compute_score(solution_str=data.response_text, **"
        "{'data_source': 's', 'ground_truth': ''})}\n"
    )
    node = {"source": "importlib", "name": "Mine", "module": {"path": str(file)}}
    manager = RewardLoopManager(config(reward_manager=node, custom_reward_function={"path": SCORERS}))
    result = scores(manager.reward_loop_worker_handles[0], *(data(text=text) for text in ("hang", "raise", "ab")))
    assert result[0] == Invalid("the reward manager gave no score within 1 s")
    assert result[1] == Invalid("the reward manager raised KeyError: 'x'")
    assert result[2] == Score(2.0, {})
    manager.shutdown()


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"custom_reward_function": {"path": "/no/such/reward.py"}}, "is no file"),
        ({"custom_reward_function": {"path": SCORERS, "name": "grade"}}, "it defines compute_score"),
        ({"reward_manager": {"name": "nive"}}, "known: .*naive"),
        ({"timeout_s": 0}, "must be positive"),
    ],
)
def test_mistakes_are_found_at_start_up(reward, message):
    with pytest.raises(ConfigError, match=message):
        RewardLoopManager(config(**reward))


def test_an_unknown_data_source_is_invalid_with_the_way_out(ray_cluster):
    manager = RewardLoopManager(config())
    (result,) = scores(manager.reward_loop_worker_handles[0], data())
    assert isinstance(result, Invalid) and "custom_reward_function" in result.reason
    manager.shutdown()
