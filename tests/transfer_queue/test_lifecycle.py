"""Who may create, join, leave and end the table, and what the others notice."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import psutil
import pytest
import ray
import torch

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.settings import merge_config, place_units
from rlflow.utils.errors import ConfigError, DeadlineError
from rlflow.utils.ray_utils import ray_get

pytestmark = pytest.mark.alone


@ray.remote(num_cpus=0)
class OtherProcess:
    """A process that never calls init."""

    def put(self, key: str, partition: str) -> dict:
        tq.kv_put(key, partition, {"x": torch.ones(3)}, {"by": "other"})
        return tq.kv_list(partition)

    async def put_async(self, key: str, partition: str) -> None:
        await tq.async_kv_put(key, partition, {"x": torch.ones(3)}, {"by": "other"})

    def sum(self, key: str, partition: str) -> float:
        return float(tq.kv_batch_get(key, partition)["x"].values().sum())

    def leave(self) -> None:
        tq.close()

    def init(self, conf: dict | None) -> object:
        return tq.init(conf)

    def save(self, folder: str) -> str:
        tq.kv_list()  # attaches
        try:
            tq.save_checkpoint(folder)
        except RuntimeError:
            return "RuntimeError"
        return "none"

    def error_of(self, partition: str, since: int) -> str:
        try:
            tq.kv_watch(partition, since, 60)
        except tq.TransferQueueError as error:
            return type(error).__name__
        return "none"

    def announce_and_sleep(self, partition: str) -> str:
        version = tq.kv_put("asleep", partition, tag={}) and tq.kv_watch(partition)[0]
        tq.kv_put("asleep", partition, tag={"ready": True})
        return self.error_of(partition, version + 1)


@pytest.fixture(scope="module")
def other_process(ray_cluster):
    process = OtherProcess.remote()
    yield process
    ray.kill(process)


@pytest.fixture
def other(other_process):
    """A process without a connection."""
    yield other_process
    get(other_process.leave.remote())


def get(ref: object) -> object:
    return ray_get(ref, what="the other process", timeout_s=60)


def test_another_process_attaches_by_itself_and_may_leave(ray_table, other):
    tq.kv_put("mine", "train", {"x": torch.arange(4.0)})
    assert get(other.sum.remote("mine", "train")) == 6
    assert get(other.put.remote("theirs", "train"))["train"] == {"mine": {}, "theirs": {"by": "other"}}
    get(other.leave.remote())
    assert tq.kv_batch_get("theirs", "train")["x"].values().sum() == 3
    assert get(other.sum.remote("mine", "train")) == 6  # attaches again
    get(other.leave.remote())
    assert tq.kv_list("train")["train"].keys() == {"mine", "theirs"}


def test_the_writer_of_a_field_is_named_across_processes(ray_table, other):
    get(other.put.remote("a", "train"))
    tq.kv_put("b", "train", {"x": torch.ones(3)})
    lineage = tq.kv_lineage(["a", "b"], "train")
    theirs, mine = lineage["a"]["x"]["writer"], lineage["b"]["x"]["writer"]
    assert f"pid {os.getpid()} on " in mine
    assert theirs.startswith("actor pid ")
    assert f"pid {os.getpid()} on " not in theirs
    assert theirs.split(" on ")[1] == mine.split(" on ")[1]


def test_only_the_owner_saves_a_checkpoint(ray_table, other, tmp_path):
    assert get(other.save.remote(str(tmp_path / "c"))) == "RuntimeError"
    assert not (tmp_path / "c").exists()


def test_an_async_actor_attaches_by_itself(ray_table, other):
    get([other.put_async.remote(f"k{i}", "train") for i in range(10)])
    assert len(tq.kv_list("train")["train"]) == 10


def test_init_in_another_process_attaches_and_ignores_the_config(ray_table, other):
    conf = {"backend": {"SimpleStorage": {"num_data_storage_units": 7}}}
    assert get(other.init.remote(conf)) == conf
    get(other.put.remote("a", "train"))
    assert "a" in tq.kv_list("train")["train"]


def test_when_the_owner_closes_the_others_are_told(ray_table, other):
    sleeping = other.announce_and_sleep.remote("train")
    tq.kv_wait("train", predicate=tq.Predicate(True, 1, tag="ready"), timeout_s=60)
    start = time.monotonic()
    tq.close()
    assert get(sleeping) == "QueueUnavailableError"
    assert get(other.error_of.remote("train", 1)) == "QueueNotInitializedError"
    assert time.monotonic() - start < 30
    with pytest.raises(AssertionError):
        tq.get_client()
    tq.close()  # once more does nothing


def test_the_table_ends_with_its_owner(ray_cluster):
    tq.close()
    owner = OtherProcess.remote()
    get(owner.init.remote(None))
    tq.kv_put("a", "train", tag={})  # attaches here
    tq.close()
    tq.kv_put("b", "train", tag={})  # close was only leaving
    assert tq.kv_list("train")["train"].keys() == {"a", "b"}
    version, _ = tq.kv_watch("train")
    ray.kill(owner)
    with pytest.raises(tq.QueueUnavailableError, match="gone"):
        tq.kv_watch("train", version, 60)
    tq.init()
    assert tq.kv_list() == {}
    tq.close()


def test_a_dead_controller_is_named_and_a_new_table_can_follow(ray_table):
    tq.kv_put("a", "train", tag={"s": 1})
    ray.kill(tq.get_client().controller.handle)
    with pytest.raises(tq.QueueUnavailableError, match="TransferQueue controller .* is gone"):
        tq.kv_list()
    with pytest.raises(tq.QueueUnavailableError):
        asyncio.run(tq.async_kv_put("b", "train", tag={}))
    tq.init()
    assert tq.kv_list() == {}
    tq.kv_put("a", "train", {"x": torch.ones(1)})
    assert tq.kv_batch_get("a", "train")["x"].values().tolist() == [1]


def test_init_after_an_unnoticed_death_creates_a_new_table(ray_table):
    tq.kv_put("a", "train", tag={})
    controller = tq.get_client().controller
    sleeping = controller.handle.watch.remote("train", 1, 60.0)
    ray.kill(controller.handle)
    with pytest.raises(ray.exceptions.RayActorError):
        get(sleeping)
    tq.init()
    assert tq.kv_list() == {}


def test_a_dead_storage_unit_is_named(ray_cluster):
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"replacement_units": 0}}})
    tq.kv_put("a", "train", {"x": torch.ones(1)})
    for port in tq.get_client()._storage._ports:
        # Its socket answers as long as the process lives, and `ray.kill` does not wait for its end.
        process = psutil.Process(get(port.handle.__ray_call__.remote(lambda unit: os.getpid())))
        process.kill()
        process.wait(20)
        with pytest.raises(ray.exceptions.RayActorError):
            get(port.handle.stats.remote())
    with pytest.raises(tq.StorageUnitLostError, match="storage unit"):
        tq.kv_batch_get("a", "train")
    with pytest.raises(tq.QueueUnavailableError, match="storage units"):
        tq.kv_put("b", "train", {"x": torch.ones(1)})
    # The owner still holds the table: it can look, and end it.
    tq.kv_put("a", "train", tag={"seen": True})
    assert tq.kv_list("train") == {"train": {"a": {"seen": True, "tq_lost": ["x"]}}}
    tq.close()
    tq.init()
    assert tq.kv_list() == {}


def test_a_call_that_gets_no_answer_ends_at_its_deadline(ray_cluster):
    tq.close()
    tq.init({"rpc_timeout_s": 0.5})
    handle = tq.get_client().controller.handle
    blocker = handle.__ray_call__.remote(_block, 1.5)
    with pytest.raises(DeadlineError, match="listing of the TransferQueue controller"):
        tq.kv_list()
    get(blocker)
    tq.close()


def _block(actor: object, seconds: float) -> None:
    time.sleep(seconds)


def test_closing_and_creating_in_turns(ray_cluster):
    for i in range(3):
        tq.close()
        tq.init()
        tq.kv_put(f"k{i}", "train", tag={})
        assert tq.kv_list() == {"train": {f"k{i}": {}}}
    tq.close()


def test_memory_is_freed_with_the_rows(ray_table):
    def held() -> int:
        stats = asyncio.run(tq.get_client().async_stats())
        return sum(unit["blocks"] for unit in stats["units"])

    for i in range(6):
        tq.kv_put(f"k{i}", "train", {"x": torch.ones(1000), "y": "text"})
    assert held() == 6
    tq.kv_put("k0", "train", {"x": torch.zeros(1000), "y": "new"})
    with pytest.raises(tq.DtypeConflictError):
        tq.kv_put("k0", "train", {"x": "text"})
    assert held() == 6
    tq.kv_clear([f"k{i}" for i in range(6)], "train")
    assert held() == 0


def test_without_a_table_a_call_says_what_to_do(ray_cluster):
    tq.close()
    with pytest.raises(AssertionError, match=r"init\(\)"):
        tq.kv_list()
    with pytest.raises(AssertionError):
        tq.get_client()


def test_a_namespace_of_its_own(ray_cluster, other):
    tq.close()
    merged = tq.init({"namespace": "run-7"})
    assert merged.namespace == "run-7"
    assert merged.backend.storage_backend == "SimpleStorage"
    with pytest.raises(ValueError, match="run-7"):
        tq.init({"namespace": "run-8"})
    get(other.init.remote({"namespace": "run-7"}))
    get(other.put.remote("a", "train"))
    assert tq.kv_list("train")["train"].keys() == {"a"}
    tq.close()


def test_config_errors():
    for conf, message in [
        ({"backend": {"SimpleStorage": {"num_data_storage_units": 0}}}, "num_data_storage_units=0"),
        ({"backend": {"SimpleStorage": {"total_storage_size": -1}}}, "total_storage_size=-1"),
        ({"backend": {"storage_backend": "MooncakeStore"}}, "try one of SimpleStorage"),
        ({"rpc_timeout_s": 0}, "rpc_timeout_s=0"),
        ("text", "got str"),
    ]:
        with pytest.raises(ConfigError, match=message):
            merge_config(conf)
    with pytest.raises(ValueError, match="sampler"):
        merge_config({"controller": {"sampler": "NoSuchSampler"}})


def test_unit_counts_follow_the_machine():
    def node(name: str, cores: int, **resources: float) -> dict:
        return {"NodeID": name, "Alive": True, "Resources": {"CPU": cores, **resources}}

    def units(conf: dict, *nodes: dict) -> list:
        return place_units(merge_config({"backend": {"SimpleStorage": conf}}), nodes)

    eight = {"num_data_storage_units": 8}
    assert units(eight, node("a", 2)) == [None]
    assert units(eight, node("a", 32)) == [None] * 4
    assert units({**eight, "exact_unit_count": True}, node("a", 2)) == [None] * 8
    assert units({"num_data_storage_units": 3}, node("a", 2), node("b", 2)) == ["a", "b", "a"]
    tagged = {**eight, "required_node_resource": "disk"}
    assert units(tagged, node("a", 2), node("b", 2, disk=1.0)) == ["b"]
    with pytest.raises(ConfigError, match="disk"):
        units(tagged, node("a", 2))


def test_importing_the_package_is_light():
    code = (
        "import sys, rlflow.transfer_queue as tq\n"
        "tq.KVBatchMeta, tq.kv_put, tq.Predicate, tq.StorageKeyNotFoundError\n"
        "import rlflow.transfer_queue.api\n"
        "assert not {'torch', 'ray', 'tensordict'} & set(sys.modules)\n"
        "import rlflow.transfer_queue.controller\n"  # what the controller's process and the units load
        "assert not {'torch', 'tensordict'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
