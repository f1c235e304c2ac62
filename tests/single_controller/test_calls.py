"""What happens between a call on a group and its result, on four real processes (2 data-parallel ranks x 2 peers)."""

from __future__ import annotations

import os
import sys

import pytest
import ray

from rlflow.protocol import Future
from rlflow.single_controller.base import Dispatch, Execute, Worker, mesh, register
from rlflow.utils.errors import ContractError

# The workers' processes cannot import this module; ship its classes whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rows:
    """A carrier like `KVBatchMeta`: anything with `chunk` and `concat`."""

    def __init__(self, values):
        self.values = list(values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return Rows([self.values[i] for i in index] if isinstance(index, list) else self.values[index])

    def chunk(self, n):
        size = len(self.values) // n
        return [Rows(self.values[i * size : (i + 1) * size]) for i in range(n)]

    @classmethod
    def concat(cls, parts):
        return cls(value for part in parts for value in part.values)


class PaddedRows(Rows):
    def is_padding_enabled(self):
        return True

    def __getitem__(self, index):
        return PaddedRows(super().__getitem__(index).values)

    def chunk(self, n):
        return [PaddedRows(part.values) for part in super().chunk(n)]


class Grid(Worker):
    """dp rank = rank // 2, turned round by `reversed_order`; the second of each pair is a tensor-parallel peer."""

    def __init__(self, name="grid", reversed_order=False):
        super().__init__()
        self.name = name
        dp_rank = self.rank // 2
        self._register_dispatch_collect_info(
            "grid", 1 - dp_rank if reversed_order else dp_rank, is_collect=self.rank % 2 == 0
        )
        self.steps = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def env(self, names):
        return {name: os.environ.get(name) for name in names}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def modules(self):
        return [name for name in ("torch", "transformers", "tensordict") if name in sys.modules]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def same(self, value, *, key=None):
        return value, key

    @register()
    def untouched(self, *values):
        return values

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own(self, value, *, key):
        return value, key

    @register(execute_mode=Execute.RANK_ZERO)
    def first_only(self, value):
        return self.rank, value

    @register(dispatch_mode=mesh("grid"))
    def tag_rows(self, rows, extra=None):
        self.seen = rows.values
        more = extra.values if extra is not None else [0] * len(rows)
        return Rows([(self.rank, value, other) for value, other in zip(rows.values, more, strict=True)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last_seen(self):
        return self.seen

    @register(dispatch_mode=mesh("grid"), blocking=False)
    def tag_rows_later(self, rows):
        return Rows([(self.rank, value) for value in rows.values])

    @register(dispatch_mode=mesh("grid"))
    def nothing(self, rows):
        return None

    @register(dispatch_mode=mesh("grid"))
    def a_number(self, rows):
        return 1

    @register(dispatch_mode=mesh("missing"))
    def on_a_missing_mesh(self, rows):
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def later(self):
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def remember(self, step):
        self.steps.append(step)
        return list(self.steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def negate(self, rows):
        return PaddedRows([-value for value in rows.values])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, rows):
        return len(rows)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self):
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move(self, dp_rank_of):
        self._forget_dispatch_collect_info("grid")
        self._register_dispatch_collect_info("grid", dp_rank_of[self.rank], True)


@pytest.fixture(scope="module")
def grid(make_group):
    return make_group(Grid, [4])


def test_one_to_all_returns_one_value_per_worker_in_rank_order(grid):
    assert grid.place() == [0, 1, 2, 3]


def test_a_worker_starts_without_heavy_modules(grid):
    assert grid.modules() == [[]] * 4


def test_the_environment_of_a_worker(grid):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    names += ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "RLFLOW_DEVICE", "WG_BACKEND"]
    envs = grid.env(names)
    assert [env["RANK"] for env in envs] == [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2", "3"]
    same = {tuple(sorted((k, v) for k, v in env.items() if k not in ("RANK", "LOCAL_RANK"))) for env in envs}
    assert len(same) == 1
    one = envs[0]
    assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["MASTER_ADDR"]) == ("4", "4", "127.0.0.1")
    assert int(one["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 4)
    assert (one["OMP_WAIT_POLICY"], one["GOMP_SPINCOUNT"], one["RLFLOW_DEVICE"]) == ("PASSIVE", "2000", "cpu")


def test_one_to_all_never_spreads_a_list_of_world_size_items(grid):
    assert grid.same([1, 2, 3, 4], key=[5, 6, 7, 8]) == [([1, 2, 3, 4], [5, 6, 7, 8])] * 4


def test_all_to_all_spreads_lists_of_world_size_items_and_nothing_else(grid):
    assert grid.untouched([1, 2, 3, 4], ["a", "b", "c", "d"]) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert grid.untouched((1, 2, 3, 4)) == [((1, 2, 3, 4),)] * 4
    assert grid.untouched([1, 2, 3]) == [([1, 2, 3],)] * 4
    assert grid.untouched([1, 2, 3, 4], "x") == [([1, 2, 3, 4], "x")] * 4
    assert grid.execute_all_sync("untouched", [1, 2, 3, 4]) == [(1,), (2,), (3,), (4,)]


def test_dp_compute_gives_each_rank_its_own_item(grid):
    assert grid.own((1, 2, 3, 4), key=list("abcd")) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    with pytest.raises(ContractError, match=r"one item per worker \(4\), got a list of 3"):
        grid.own([1, 2, 3], key=list("abcd"))


def test_rank_zero_returns_the_single_value(grid):
    assert grid.first_only([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert grid.execute_func_rank_zero(lambda a, b: a + b, 2, 3) == 5


def test_peers_see_the_same_part_and_rows_come_back_in_order(grid):
    out = grid.tag_rows(Rows("abcdef"))
    assert out.values == [(0, "a", 0), (0, "b", 0), (0, "c", 0), (2, "d", 0), (2, "e", 0), (2, "f", 0)]
    assert grid.last_seen() == [list("abc"), list("abc"), list("def"), list("def")]


def test_keyword_arguments_are_split_too_also_alone(grid):
    out = grid.tag_rows(Rows([1, 2]), extra=Rows([3, 4]))
    assert out.values == [(0, 1, 3), (2, 2, 4)]
    assert grid.tag_rows(rows=Rows([1, 2])).values == [(0, 1, 0), (2, 2, 0)]


def test_rows_follow_the_data_parallel_rank_not_the_rank(make_group):
    turned = make_group(Grid, [4], "turned", True)
    assert turned.topology("grid").dp_ranks == (1, 1, 0, 0)
    assert turned.tag_rows(Rows("ab")).values == [(2, "a", 0), (0, "b", 0)]


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("tag_rows", Rows("abc"), r"3 rows \(Rows\) cannot be split into 2 equal parts"),
        ("tag_rows", 5, "a int cannot be split over workers"),
        ("on_a_missing_mesh", Rows("ab"), r"mesh 'missing' is not registered on ranks \[0, 1, 2, 3\]"),
        ("a_number", Rows("ab"), "cannot join int"),
    ],
)
def test_a_call_that_cannot_be_split_or_joined_is_refused(grid, method, argument, message):
    with pytest.raises(ContractError, match=message):
        getattr(grid, method)(argument)


def test_none_from_every_worker_is_none(grid):
    assert grid.nothing(Rows("ab")) is None


def test_a_non_blocking_mesh_call_is_a_future_that_other_workers_can_resolve(grid):
    future = grid.tag_rows_later(Rows("abcd"))
    assert isinstance(future, Future)
    assert len(future.futures) == 4
    again = grid.tag_rows(future)
    assert again.values == [(0, (0, "a"), 0), (0, (0, "b"), 0), (2, (2, "c"), 0), (2, (2, "d"), 0)]
    assert future.get().values == [(0, "a"), (0, "b"), (2, "c"), (2, "d")]


def test_a_non_blocking_call_returns_refs(grid):
    refs = grid.later()
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert refs.get() == ray.get(list(refs), timeout=30) == [0, 1, 2, 3]


def test_async_and_sync_methods_share_a_process_and_keep_their_order(grid):
    start = len(grid.remember("a")[0])
    refs = [grid.execute_all_async("remember", step) for step in "bcd"]
    assert [step[-1] for step in refs[-1].get()] == ["d"] * 4
    assert grid.remember("e")[0][start:] == ["b", "c", "d", "e"]


def test_padding_is_added_to_a_copy_and_taken_off_the_result(grid):
    rows = PaddedRows([1, 2, 3, 4, 5])
    assert grid.negate(rows).values == [-1, -2, -3, -4, -5]
    assert len(rows) == 5
    assert grid.count(rows) == [2, 2, 2, 2]
    with pytest.raises(ContractError, match="5 rows"):
        grid.negate(Rows([1, 2, 3, 4, 5]))


def test_a_function_from_the_controller_runs_on_every_worker(grid):
    def double(worker, rows):
        return Rows([(worker.name, value * 2) for value in rows.values])

    assert grid.execute_with_func_generator(double, Rows([1, 2, 3, 4])).values == [("grid", v) for v in (2, 4, 6, 8)]
    with pytest.raises(ContractError, match="must be a function"):
        grid.execute_with_func_generator(Rows([1]), Rows([1, 2, 3, 4]))


def test_a_direct_rollout_method_is_not_for_the_controller(grid):
    with pytest.raises(NotImplementedError):
        grid.direct()


def test_a_group_with_an_outdated_topology_is_refused_until_it_asks_again(make_group):
    from rlflow.single_controller.ray import WorkerError

    group = make_group(Grid, [2])
    assert group.topology("grid").dp_size == 1
    group.move([0, 1])
    with pytest.raises(WorkerError, match="refresh_topology"):
        group.tag_rows(Rows("ab"))
    group.refresh_topology()
    assert group.tag_rows(Rows("ab")).values == [(0, "a", 0), (1, "b", 0)]


def test_topology_is_asked_once_for_all_meshes(grid, monkeypatch):
    grid.refresh_topology()
    asked = []
    original = type(grid).execute_all_sync
    monkeypatch.setattr(type(grid), "execute_all_sync", lambda self, m, *a: asked.append(m) or original(self, m, *a))
    grid.tag_rows(Rows("ab"))
    grid.tag_rows(Rows("ab"))
    assert asked == ["_query_topology"]


def test_bound_methods_carry_their_name(grid):
    assert type(grid.tag_rows).__name__ == "tag_rows"
    assert "_query_dispatch_info" in dir(grid)
    assert grid._query_dispatch_info("grid") == [0, 0, 1, 1]
    assert grid._query_collect_info("grid") == [True, False, True, False]
