"""Several roles in one process, and groups that share or split bundles."""

from __future__ import annotations

import os
import sys

import pytest
import ray

from rlflow.single_controller.base import Dispatch, Worker, mesh, register
from rlflow.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    split_resource_pool,
)
from rlflow.utils.errors import ContractError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Role(Worker):
    def __init__(self, title="plain"):
        super().__init__()
        self.title = title
        self.size = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self):
        return type(self).__name__, self.title, os.getpid(), self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def register_mesh(self, name):
        self._register_dispatch_collect_info(name, self.rank, True)


class Actor(Role):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def grow(self):
        self.size += 1
        return self.size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def critic_title(self):
        return self.get_fused_worker_by_name("critic").title


class Critic(Role):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def actor_size(self):
        return self.get_fused_worker_by_name("actor").size

    @register(dispatch_mode=mesh("critic"))
    def never(self, rows):
        return rows


@pytest.fixture(scope="module")
def pool(ray_cluster):
    pool = RayResourcePool([2], device_name="cpu")
    yield pool
    pool.release()


@pytest.fixture(scope="module")
def both(pool):
    spec = create_colocated_worker_cls(
        {"actor": RayClassWithInitArgs(Actor, "a"), "critic": RayClassWithInitArgs(ray.remote(Critic), title="c")}
    )
    group = RayWorkerGroup(pool, spec, name_prefix="both_")
    yield group
    group.shutdown()


def test_roles_share_processes_and_views_reach_their_own_methods(both):
    views = both.spawn({"actor", "critic"})
    actors, critics = views["actor"].who(), views["critic"].who()
    assert [who[:2] for who in actors] == [("Actor", "a")] * 2
    assert [who[:2] for who in critics] == [("Critic", "c")] * 2
    assert [who[2:] for who in actors] == [who[2:] for who in critics]
    assert [who[2] for who in actors] == both.pids
    assert not hasattr(views["critic"], "grow")
    assert not hasattr(both, "who")


def test_roles_see_one_another(both):
    views = both.spawn(["actor", "critic"])
    assert views["actor"].grow() == [1, 1]
    assert views["critic"].actor_size() == [1, 1]
    assert views["actor"].critic_title() == ["c", "c"]


def test_each_view_has_its_own_topology(both):
    views = both.spawn(["actor", "critic"])
    views["actor"].register_mesh("actor")
    assert views["actor"].topology("actor").dp_size == 2
    with pytest.raises(ContractError, match="'critic' is not registered"):
        views["critic"].never(None)


def test_fuse_makes_roles_attributes(both):
    both.fuse(["actor"])
    assert both.actor.who()[0][1] == "a"


def test_an_unknown_role_is_refused(both):
    with pytest.raises(ContractError, match="not 'reference'"):
        both.spawn(["reference"])


def test_actor_names_say_prefix_class_and_place(both):
    assert both.worker_names == ["both_WorkerDict_0:0", "both_WorkerDict_0:1"]


def test_another_group_attaches_by_handles_or_names(both):
    by_handle = RayWorkerGroup.from_detached(
        worker_handles=both.workers, ray_cls_with_init=both.ray_cls_with_init
    ).spawn(["actor"])["actor"]
    by_name = RayWorkerGroup.from_detached(
        worker_names=both.worker_names, ray_cls_with_init=both.ray_cls_with_init
    ).spawn(["actor"])["actor"]
    assert by_handle.who() == by_name.who() == both.spawn(["actor"])["actor"].who()


def test_two_groups_share_a_pool_in_different_processes(both, pool):
    other = RayWorkerGroup(pool, RayClassWithInitArgs(Actor, "b"))
    try:
        assert not set(other.pids) & set(both.pids)
        assert [who[1] for who in other.who()] == ["b", "b"]
    finally:
        other.shutdown()


def test_slices_of_a_pool_start_where_they_should_and_hold_groups(ray_cluster):
    pool = RayResourcePool([1, 3], device_name="cpu")
    try:
        three, one = split_resource_pool(pool, [3, 1])
        assert [(p.start_bundle_index, p.world_size) for p in (three, one)] == [(0, 3), (3, 1)]
        halves = split_resource_pool(split_resource_pool(pool, 2)[1], 1)
        assert [(p.start_bundle_index, p.world_size) for p in halves] == [(2, 1), (3, 1)]
        nested = split_resource_pool(three, [1, 2])
        assert [(p.start_bundle_index, p.world_size) for p in nested] == [(0, 1), (1, 2)]
        assert [(b.group_index, b.index) for b in nested[1].bundles()] == [(1, 0), (1, 1)]
        with pytest.raises(ContractError, match="add up"):
            split_resource_pool(pool, [3, 2])
        group = RayWorkerGroup(nested[1], RayClassWithInitArgs(Actor))
        assert [who[3] for who in group.who()] == [0, 1]
        group.shutdown()
    finally:
        pool.release()


def test_a_pool_of_unequal_nodes_gives_one_world(make_group):
    group = make_group(Actor, [1, 2])
    assert (group.world_size, [who[3] for who in group.who()]) == (3, [0, 1, 2])
    assert [name[-3:] for name in group.worker_names] == ["0:0", "1:0", "1:1"]
