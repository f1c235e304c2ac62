"""Who wrote which field, and puts that depend on a tag."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq

pytestmark = pytest.mark.usefixtures("table")


def test_each_field_knows_its_last_writer(partition):
    start = time.time()
    tq.kv_batch_put(["a", "b"], partition, TensorDict({"x": torch.ones(2), "y": torch.ones(2)}, batch_size=[2]))
    tq.kv_batch_put(["b"], partition, TensorDict({"y": torch.zeros(1)}, batch_size=[1]))
    tq.kv_put("c", partition, tag={"s": 1})
    lineage = tq.kv_lineage(["a", "b", "c"], partition)
    assert lineage["a"]["x"] == lineage["a"]["y"] == lineage["b"]["x"]
    first, second = lineage["b"]["x"], lineage["b"]["y"]
    assert second["version"] > first["version"]
    assert start - 1 <= first["time"] <= second["time"] <= time.time() + 1
    assert f"pid {os.getpid()} on " in first["writer"]
    assert lineage["c"] == {}
    assert tq.kv_lineage("b", partition, ["y", "z"]) == {"b": {"y": second}}
    with pytest.raises(KeyError, match="'nobody'"):
        tq.kv_lineage(["nobody"], partition)


def test_a_put_may_depend_on_a_tag(partition):
    tq.kv_put("a", partition, tag={"status": "pending"}, expect={"status": None})
    tq.kv_put("a", partition, {"x": torch.ones(1)}, {"status": "running"}, expect={"status": "pending"})
    with pytest.raises(tq.TagConflictError, match=r"'status' of key 'a'.*is 'running', not 'pending'"):
        tq.kv_put("a", partition, {"x": torch.zeros(1)}, {"status": "stolen"}, expect={"status": "pending"})
    with pytest.raises(tq.TagConflictError, match="'b'"):
        tq.kv_batch_put(["a", "b"], partition, tags=[{"n": 1}] * 2, expect=[{}, {"n": 1}])
    assert tq.kv_list(partition)[partition] == {"a": {"status": "running"}}
    assert tq.kv_batch_get("a", partition)["x"].values().tolist() == [1]


def test_of_many_claims_one_succeeds(partition):
    tq.kv_put("job", partition, tag={"owner": None})

    def claim(worker: int) -> bool:
        try:
            tq.kv_put("job", partition, tag={"owner": worker}, expect={"owner": None})
        except tq.TagConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = [worker for worker, mine in enumerate(pool.map(claim, range(8))) if mine]
    assert [tq.kv_list(partition)[partition]["job"]["owner"]] == won
