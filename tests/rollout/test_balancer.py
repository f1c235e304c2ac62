import pytest

from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.load_balancer import Ask, GlobalRequestLoadBalancer
from rlflow.workers.rollout.replica import RolloutReplicaRegistry, get_rollout_replica_class


@pytest.fixture
def balancer():
    return GlobalRequestLoadBalancer({"a": "A", "b": "B", "c": "C"}, max_cache_size=4)


def test_a_conversation_stays_on_its_server(balancer):
    first = balancer.acquire_server("talk", 10)
    for i in range(3):
        balancer.acquire_server(f"other{i}", 1)
    assert balancer.acquire_server("talk", 1000) == first


def test_the_server_with_fewest_tokens_in_flight_is_chosen_and_the_first_among_equals(balancer):
    assert balancer.acquire_server("long", 500) == ("a", "A")
    assert balancer.acquire_server("short1", 100)[0] == "b"
    assert balancer.acquire_server("short2", 120)[0] == "c"
    assert balancer.acquire_server("short3", 100)[0] == "b"
    assert balancer.acquire_server("short4", 100)[0] == "c"
    assert balancer.get_status()["b"] == {"requests": 2, "tokens": 200}


def test_release_takes_the_lease_back_once(balancer):
    balancer.acquire_server("x", 50, "lease-x")
    balancer.acquire_server("x", 70, "lease-y")
    balancer.release_server("a", "lease-x")
    balancer.release_server("a", "lease-x")
    assert balancer.get_status()["a"] == {"requests": 1, "tokens": 70}
    balancer.release_server("a")
    balancer.release_server("a")
    balancer.release_server("nobody")
    assert balancer.get_total_inflight() == 0 and balancer.get_inflight_count("a") == 0


def test_a_removed_server_gets_nothing_more_and_its_conversations_move(balancer):
    assert balancer.acquire_server("talk", 5)[0] == "a"
    balancer.remove_servers(["a", "unknown"])
    assert balancer.acquire_server("talk", 5)[0] == "b"
    balancer.remove_servers(["b", "c"])
    with pytest.raises(RuntimeError, match="No available servers"):
        balancer.acquire_server("talk", 5)


def test_a_server_added_again_keeps_the_load_that_still_runs_on_it(balancer):
    balancer.acquire_server("x", 50)
    balancer.remove_servers(["a"])
    balancer.add_servers({"a": "A2"})
    assert balancer.get_status()["a"]["tokens"] == 50
    assert balancer.get_all_servers()["a"] == "A2"


def test_conversations_used_least_recently_are_forgotten(balancer):
    for name in ("p", "q", "r", "s"):
        balancer.acquire_server(name, 10)
    balancer.acquire_server("p", 1)
    balancer.acquire_server("t", 10)
    assert balancer.clear_sticky_cache()["cleared_entries"] == 4
    assert balancer.clear_sticky_cache()["cleared_entries"] == 0


def test_a_lease_of_a_dead_client_expires(balancer):
    balancer.acquire_server("x", 50, "lease", lease_s=0.0)
    balancer.acquire_server("y", 1)
    assert balancer.get_total_inflight() == 1


def test_an_engine_that_is_not_in_this_version_is_refused_by_name():
    with pytest.raises(ConfigError, match="trtllm.*not in this version"):
        get_rollout_replica_class("trtllm")


def test_unknown_engines_are_refused_and_own_ones_can_be_registered(monkeypatch):
    with pytest.raises(ConfigError, match="Known: hf"):
        get_rollout_replica_class("mine")
    monkeypatch.setattr(RolloutReplicaRegistry, "_loaders", dict(RolloutReplicaRegistry._loaders))
    RolloutReplicaRegistry.register("mine", lambda: dict)
    assert get_rollout_replica_class("mine") is dict


def test_under_full_determinism_the_name_decides_whatever_the_load():
    names = [f"e0r{i}_0" for i in range(60)]
    balancers = [GlobalRequestLoadBalancer({"a": "A", "b": "B", "c": "C"}, full_determinism=True) for _ in range(2)]
    balancers[1].acquire_server("heavy", 10_000)
    chosen = [{name: balancer.acquire_server(name, 7)[0] for name in names} for balancer in balancers]
    assert chosen[0] == chosen[1] and set(chosen[0].values()) == {"a", "b", "c"}


def test_several_requests_are_leased_in_one_call_and_handles_are_sent_once(balancer):
    asks = [Ask(f"t{i}", 10, f"lease{i}", 60.0) for i in range(6)]
    answer = balancer.lease_many(asks)
    assert answer.servers == ["a", "b", "c", "a", "b", "c"] and answer.handles == {"a": "A", "b": "B", "c": "C"}
    assert balancer.lease_many([asks[0]], answer.epoch).handles is None
    balancer.give_back([ask.lease_id for ask in asks] + ["unknown"])
    assert balancer.get_total_inflight() == 0 and balancer.get_status()["a"]["tokens"] == 0
    balancer.report_dead("a")
    balancer.report_dead("a")
    after = balancer.lease_many([asks[0]], answer.epoch)
    assert after.servers == ["b"] and set(after.handles) == {"b", "c"} and balancer.get_reissued() == 2


class Server:
    """Stands for an actor handle; notes the sessions whose end it is told."""

    def __init__(self):
        self.ended = []
        self.end_session = self
        self.remote = self.ended.append


def test_an_announcement_is_divided_in_blocks_whatever_the_load():
    servers = {name: Server() for name in "ab"}
    balancer = GlobalRequestLoadBalancer(servers)
    balancer.acquire_server("heavy", 10_000)
    names = [f"p{i}_{j}" for i in range(3) for j in range(2)]
    parts = balancer.announce_sessions(names)
    assert {key: part for key, (_, part) in parts.items()} == {"a": names[:3], "b": names[3:]}
    assert [balancer.acquire_server(name, 1)[0] for name in reversed(names)] == ["b"] * 3 + ["a"] * 3
    balancer.end_session(names[4])
    balancer.end_session(names[4])
    balancer.end_session("nobody")
    assert (servers["a"].ended, servers["b"].ended) == ([], [names[4]])


def test_every_server_hears_of_an_announcement_even_without_a_session_of_its_own(balancer):
    parts = balancer.announce_sessions(["one_0"])
    assert {key: part for key, (_, part) in parts.items()} == {"a": ["one_0"], "b": [], "c": []}


def test_an_announced_session_moves_when_its_server_is_gone(balancer):
    balancer.announce_sessions(["s_0", "s_1", "s_2"])
    balancer.remove_servers(["a"])
    assert balancer.acquire_server("s_0", 5)[0] == "b"
    balancer.end_session("s_0")  # its server cannot be told
    balancer.remove_servers(["b", "c"])
    with pytest.raises(RuntimeError, match="No available servers"):
        balancer.announce_sessions(["s_3"])
