"""Prometheus metrics: what they say, where they listen, and that they cost nothing when off."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

import rlflow.transfer_queue as tq
from rlflow.transfer_queue.controller import TransferQueueController
from rlflow.transfer_queue.meter import BOUNDS, RECENT, Meter, metered
from rlflow.transfer_queue.runtime import _controller_class
from rlflow.transfer_queue.settings import merge_config
from rlflow.utils.errors import ConfigError

LOCAL = {"backend": {"storage_backend": "Local", "SimpleStorage": {"total_storage_size": 10}}}


@contextmanager
def table(conf: dict[str, Any], **metrics: Any) -> Iterator[None]:
    tq.close()
    tq.init({**conf, "metrics": {"enabled": True, "interval_s": 0.05, **metrics}})
    try:
        yield
    finally:
        tq.close()


def scrape() -> dict[tuple[str, tuple[str, ...]], float]:
    """{(sample, values of its labels in the order of their names): value}."""
    with urllib.request.urlopen(f"http://{tq.get_metrics_endpoint()}/metrics", timeout=10) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {(s.name, tuple(v for _, v in sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def scrape_until(sample: tuple[str, tuple[str, ...]], value: float) -> dict[tuple[str, tuple[str, ...]], float]:
    deadline = time.monotonic() + 30
    while True:
        found = scrape()
        if found.get(sample) == value:
            return found
        assert time.monotonic() < deadline, f"{sample} is {found.get(sample)}, not {value}"
        time.sleep(0.05)


def use() -> None:
    client = tq.get_client()
    for key in ("a", "b"):
        tq.kv_put(key, "train", {"n": torch.tensor(1)}, {"s": 1})
    tq.kv_put("a", "train", {"m": torch.tensor(1)})
    client.get_meta(["n"], 1, "train", task_name="update")
    with pytest.raises(KeyError):
        tq.kv_batch_get("nobody", "train")


def check(found: dict[tuple[str, tuple[str, ...]], float]) -> None:
    assert found["tq_partitions_total", ()] == 1
    assert found["tq_partition_production_progress", ("train",)] == 0.75
    assert found["tq_partition_consumption_progress", ("train", "update")] == 0.5
    assert found["tq_global_index_allocated_total", ()] == 2
    assert found["tq_global_index_reusable_total", ()] == 0
    assert found["tq_controller_request_total", ("put",)] == 3
    assert found["tq_controller_request_samples_total", ("put",)] == 3
    assert found["tq_controller_request_errors_total", ("put",)] == 0
    assert found["tq_controller_request_errors_total", ("locate",)] == 1
    assert found["tq_controller_request_duration_seconds_count", ("put",)] == 3
    assert found["tq_controller_request_duration_seconds_bucket", ("+Inf", "put")] == 3
    assert found["tq_controller_uptime_seconds", ()] > 0
    assert found["tq_controller_memory_rss_bytes", ()] > 1e6
    assert sum(v for (name, _), v in found.items() if name == "tq_storage_active_keys_total") == 3
    assert any(name == "tq_storage_request_total" and at[0] != "stats" for name, at in found)
    for name in ("memory_rss_bytes", "requests_arrived"):
        assert found[f"tq_storage_{name}", ("0",)] > 0
    for figure in ("latency_avg", "latency_p50", "latency_p99", "ops"):
        assert any(name == f"tq_storage_request_{figure}" for name, _ in found)


def test_figures_of_a_table_in_one_process():
    with table(LOCAL):
        use()
        found = scrape_until(("tq_partition_samples_total", ("train",)), 2.0)
        check(found)
        assert found["tq_storage_capacity_total", ()] == 10
        assert found["tq_storage_utilization_ratio", ()] == 0.2
        tq.get_client().clear_partition("train")
        assert ("tq_partition_samples_total", ("train",)) not in scrape_until(("tq_partitions_total", ()), 0.0)
    assert tq.get_metrics_endpoint() is None


def test_figures_of_a_table_in_actors_and_a_port_that_is_taken(ray_cluster):
    with table({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}):
        use()
        found = scrape_until(("tq_partition_samples_total", ("train",)), 2.0)
        check(found)
        assert tq.get_metrics_endpoint().startswith("127.0.0.1:")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics.port={port} on 127.0.0.1 cannot be served.*try port 0"):
            tq.init({"metrics": {"enabled": True, "port": port}})
    tq.init()
    assert tq.get_metrics_endpoint() is None
    tq.close()


def test_the_port_asked_for_is_used_and_given_back():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for _ in range(2):
        with table(LOCAL, port=port):
            assert tq.get_metrics_endpoint() == f"127.0.0.1:{port}"
            assert ("tq_controller_uptime_seconds", ()) in scrape()


def test_without_metrics_the_plain_controller_runs():
    assert _controller_class(merge_config({})) is TransferQueueController
    assert "meter" not in vars(TransferQueueController)


def test_wrong_settings_are_named():
    for metrics, message in [
        ({"port": 70000}, "port=70000"),
        ({"port": "x"}, "port='x'"),
        ({"interval_s": 0}, "interval_s=0"),
    ]:
        with pytest.raises(ConfigError, match=f"transfer_queue.metrics.{message}"):
            merge_config({"metrics": metrics})


class Worker:
    """Something to be timed."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def double(self, values: list[int]) -> list[int]:
        return [self.factor * value for value in values]

    async def fail(self) -> None:
        raise ValueError("on purpose")

    def _private(self) -> None: ...


def test_a_timed_class_does_the_same_and_counts():
    worker = metered(Worker, lambda name, args, result: len(args[0]) if args else 0)(2)
    assert worker.double([1, 2]) == [2, 4]
    with pytest.raises(ValueError, match="on purpose"):
        asyncio.run(worker.fail())
    worker._private()
    figures = worker.meter.figures()
    assert figures["arrived"] == 2
    operations = figures["operations"]
    assert operations.keys() == {"double", "fail"}
    assert operations["double"]["rows"] == 2
    assert operations["double"]["errors"] == 0
    assert operations["fail"]["errors"] == 1


def test_quantiles_and_buckets_of_a_meter():
    meter = Meter()
    for number in range(1, 101):
        meter.record("read", number / 100, 1, False)
    figures = meter.figures()["operations"]["read"]
    assert figures["p50"] == pytest.approx(0.505)
    assert figures["p99"] == pytest.approx(0.9901)
    assert figures["seconds"] == pytest.approx(50.5)
    assert len(figures["buckets"]) == len(BOUNDS) + 1
    assert sum(figures["buckets"]) == 100
    assert figures["buckets"][BOUNDS.index(0.01)] == 1
    for _ in range(RECENT):
        meter.record("read", 2.0, 1, False)
    assert meter.figures()["operations"]["read"]["p50"] == 2.0


def test_a_meter_may_be_read_while_it_is_written():
    meter, failures, ended = Meter(), [], threading.Event()

    def read() -> None:
        while not ended.is_set():
            try:
                meter.figures()
            except RuntimeError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20_000):
        meter.record(f"operation {number % 2000}", 0.001, 1, False)
    ended.set()
    reader.join(10)
    assert not failures
