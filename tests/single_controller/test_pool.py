"""Reservation: what fits, what is said when it does not, and who holds what."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
import ray

from rlflow.single_controller.base import ResourcePool
from rlflow.single_controller.ray import RayResourcePool, ResourcePoolManager, merge_resource_pool, split_resource_pool
from rlflow.single_controller.ray.cluster import Node, address_key
from rlflow.single_controller.ray.pool import check_fits
from rlflow.utils.errors import ConfigError, ContractError, DeadlineError

pytestmark = pytest.mark.alone


def _nodes(*gpus):
    return [Node(str(i), f"10.0.0.{i}", {"GPU": count}, {"GPU": 0}) for i, count in enumerate(gpus)]


def test_places_on_nodes_are_counted_by_node():
    pool = ResourcePool([1, 3])
    assert pool.world_size == 4
    assert pool.local_world_size_list() == [1, 3, 3, 3]
    assert pool.local_rank_list() == [0, 0, 1, 2]
    assert pool() == [1, 3]


@pytest.mark.parametrize(
    ("wanted", "there"), [([4, 8], (8, 4)), ([4, 4], (8,)), ([2, 6, 4], (6, 6)), ([3, 3, 3, 2, 2, 2], (7, 8))]
)
def test_counts_that_fit_the_nodes_are_accepted(wanted, there):
    check_fits(RayResourcePool(wanted), _nodes(*there))


@pytest.mark.parametrize(("wanted", "there"), [([8], (4, 4)), ([4, 4, 4], (8, 2)), ([1], (0,)), ([3, 3, 3], (5, 5))])
def test_counts_that_fit_no_node_are_refused_although_the_sum_might_do(wanted, there):
    with pytest.raises(ConfigError) as error:
        check_fits(RayResourcePool(wanted, name_prefix="train"), _nodes(*there))
    text = str(error.value)
    assert f"{sum(wanted)} GPU as {wanted}" in text
    assert f"10.0.0.0: GPU 0 free of {there[0]}" in text
    assert "try:" in text


def test_processes_may_spread_when_they_need_not_be_together():
    check_fits(RayResourcePool([8]), _nodes(4, 4), one_node_each=False)


def test_addresses_sort_as_numbers():
    assert sorted(["10.0.0.10", "head", "fe80::1", "10.0.0.9"], key=address_key) == [
        "10.0.0.9", "10.0.0.10", "fe80::1", "head",
    ]  # fmt: skip


def test_gpus_that_are_not_there_are_refused_before_any_wait(ray_cluster):
    manager = ResourcePoolManager({"global": [8]}, {"actor": "global"}, device_name="cuda")
    with pytest.raises(ValueError, match="8 GPU as") as error:
        manager.create_resource_pool()
    assert "GPU 0 free of 0" in str(error.value)
    assert manager.get_n_gpus() == 8


def test_a_role_without_a_pool_is_refused(ray_cluster):
    with pytest.raises(ConfigError, match="'other'"):
        ResourcePoolManager({"global": [1]}, {"actor": "other"}, device_name="cpu").create_resource_pool()
    manager = ResourcePoolManager({"global": [1]}, {"actor": "global"}, device_name="cpu")
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor").name_prefix == "global"
    with pytest.raises(ConfigError, match="critic"):
        manager.get_resource_pool("critic")


def test_a_reservation_that_never_comes_ends_with_what_was_asked_and_what_is_there(ray_cluster):
    pool = RayResourcePool(
        [2], name_prefix="odd", device_name="cpu", accelerator_type="NO-SUCH", placement_timeout_s=0.5
    )
    start = time.monotonic()
    with pytest.raises(DeadlineError) as error:
        pool.get_placement_groups()
    assert time.monotonic() - start < 10
    text = str(error.value)
    assert "'odd' was not placed within 0.5 s" in text
    assert "asked:  2 x" in text
    assert "NO-SUCH 0 free of 0" in text


def test_cpu_pools_leave_room_for_one_another_and_give_back(ray_cluster):
    before = ray.available_resources()["CPU"]
    pools = [RayResourcePool([4], device_name="cpu") for _ in range(3)]
    for pool in pools:
        assert len(pool.bundles()) == 4
    assert ray.available_resources().get("CPU", 0) > 0
    for pool in pools:
        pool.release()
    deadline = time.monotonic() + 10
    while ray.available_resources().get("CPU", 0) < before and time.monotonic() < deadline:
        time.sleep(0.05)  # Ray tells nobody when a placement group's resources are back
    assert ray.available_resources()["CPU"] >= before


def test_the_first_and_later_calls_list_the_same_groups(ray_cluster):
    pool = RayResourcePool([1, 2], device_name="cpu")
    assert [g.id for g in pool.get_placement_groups()] == [g.id for g in pool.get_placement_groups()]
    with pytest.raises(ContractError, match="'cuda'"):
        pool.get_placement_groups(device_name="cuda")
    pool.release()


def test_merging_keeps_all_bundles_and_refuses_unlike_pools(ray_cluster):
    first, second = RayResourcePool([1], device_name="cpu"), RayResourcePool([2], device_name="cpu")
    merged = merge_resource_pool(first, second)
    assert merged.world_size == len(merged.bundles()) == 3
    with pytest.raises(ContractError, match="max_colocate_count"):
        merge_resource_pool(first, RayResourcePool([1], device_name="cpu", max_colocate_count=2))
    with pytest.raises(ContractError, match="slices"):
        merge_resource_pool(first, split_resource_pool(second, 1)[0])
    merged.release()


def test_cuda_groups_get_a_share_of_their_own_device():
    """Ray counts GPUs without touching them, so the placement of the cuda path is tested without one."""
    script = textwrap.dedent(
        """
        import os
        import ray
        from rlflow.single_controller.base import Dispatch, Worker, register
        from rlflow.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        class Seen(Worker):
            @register(dispatch_mode=Dispatch.ONE_TO_ALL)
            def devices(self):
                return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"], os.environ["RLFLOW_DEVICE"]

        ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
        pool = RayResourcePool([2], max_colocate_count=2)
        first = RayWorkerGroup(pool, RayClassWithInitArgs(Seen))
        second = RayWorkerGroup(pool, RayClassWithInitArgs(Seen))
        assert sorted(first.devices()) == [("0", "0", "cuda"), ("1", "0", "cuda")], first.devices()
        assert first.devices() == second.devices()
        beside = RayClassWithInitArgs(Seen)(sharing_with=first.workers[1])
        place = ray.get(beside.describe.remote(), timeout=60)
        assert place["devices"] == first.devices()[1][0], place
        ray.kill(beside)
        first.shutdown()
        second.shutdown()
        pool.release()
        ray.shutdown()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
