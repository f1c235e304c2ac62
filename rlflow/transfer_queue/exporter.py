"""Prometheus metrics of the table: one endpoint beside the controller, for itself and all storage units.

```
calls -> Meter (controller) ---------------.
calls -> Meter (storage unit) -> stats() --+-> TableFigures, every interval_s -> /metrics
Table -> rows, progress, blocks -----------'
```

Names and labels are those of the public package where it has the figure; `tq_storage_bytes`, `tq_storage_held_bytes`
and `tq_lost_units` are ours.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from socketserver import TCPServer, ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rlflow.transfer_queue.controller import TransferQueueController
from rlflow.transfer_queue.meter import BOUNDS, Meter, metered, rows_of_controller_call
from rlflow.utils.errors import ConfigError

logger = logging.getLogger(__name__)

UNIT = "storage_unit_id"
PARTITION = "partition_id"
OPERATION = "op_type"


@dataclass
class TableFigures:
    """What was collected last.

    Attributes:
        table: `RowNumbers.figures`.
        units: `StorageHost.stats` of each unit; `requests` in it are `Meter.figures` of the unit.
        capacity: rows that the table may hold, None for no limit.
    """

    table: dict[str, Any] = field(default_factory=dict)
    units: Sequence[dict[str, Any]] = ()
    capacity: int | None = None


class TableCollector:
    """Makes metric families of the figures at each scrape.

    Args:
        meter: the controller's.
    """

    def __init__(self, meter: Meter) -> None:
        self.figures = TableFigures()
        self._meter = meter

    def collect(self) -> Iterator[Metric]:
        """All families."""
        own = self._meter.figures()
        yield from request_families("controller", {None: own["operations"]})
        yield _gauge("tq_controller_uptime_seconds", "Seconds since the controller was started", own["uptime_s"])
        yield _gauge("tq_controller_memory_rss_bytes", "Resident memory of the controller", own["rss_bytes"])
        if self.figures.table:
            yield from _table_families(self.figures)
        units = {
            str(number): stats["requests"] for number, stats in enumerate(self.figures.units) if "requests" in stats
        }
        yield from request_families("storage", {unit: requests["operations"] for unit, requests in units.items()})
        yield from _unit_families(self.figures, units)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _gauges(name: str, text: str, labels: Sequence[str], values: dict[Any, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else list(key), float(value))
    return family


def request_families(role: str, operations: dict[str | None, dict[str, Any]]) -> Iterator[Metric]:
    """Requests of the controller (under None) or of each storage unit, by operation."""
    labels = [OPERATION] if role == "controller" else [OPERATION, UNIT]
    name = f"tq_{role}_request"
    duration = HistogramMetricFamily(f"{name}_duration_seconds", "Time of a request, waiting included", labels=labels)
    calls = CounterMetricFamily(name, "Requests", labels=labels)
    errors = CounterMetricFamily(f"{name}_errors", "Requests that raised", labels=labels)
    samples = CounterMetricFamily(f"{name}_samples", "Rows that requests were about", labels=labels)
    for unit, figures in operations.items():
        for operation, figure in figures.items():
            key = [operation] if unit is None else [operation, unit]
            duration.add_metric(key, _cumulative(figure["buckets"]), figure["seconds"])
            calls.add_metric(key, figure["calls"])
            errors.add_metric(key, figure["errors"])
            samples.add_metric(key, figure["rows"])
    yield from (duration, calls, errors, samples)


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip([*map(str, BOUNDS), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


def _table_families(figures: TableFigures) -> Iterator[Metric]:
    table = figures.table
    partitions = table["partitions"]
    yield _gauge("tq_partitions_total", "Partitions", len(partitions))
    rows = {name: of["rows"] for name, of in partitions.items()}
    yield _gauges("tq_partition_samples_total", "Rows of a partition", [PARTITION], rows)
    produced = {name: of["production"] for name, of in partitions.items()}
    yield _gauges(
        "tq_partition_production_progress", "Share of the cells of a partition that are there", [PARTITION], produced
    )
    consumed = {(name, task): share for name, of in partitions.items() for task, share in of["consumption"].items()}
    yield _gauges(
        "tq_partition_consumption_progress",
        "Share of the rows of a partition that a task has consumed",
        [PARTITION, "task_name"],
        consumed,
    )
    yield _gauge("tq_global_index_allocated_total", "Row numbers given out so far", table["next_index"])
    yield _gauge("tq_global_index_reusable_total", "Row numbers to be given out again: none ever are", 0)
    yield _gauge("tq_lost_units", "Storage units that are gone", table["lost_units"])
    if figures.capacity is not None:
        held = sum(rows.values())
        yield _gauge("tq_storage_capacity_total", "Rows that the table may hold", figures.capacity)
        yield _gauge("tq_storage_utilization_ratio", "Rows held, of those that may be", held / figures.capacity)


def _unit_families(figures: TableFigures, requests: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    blocks = figures.table.get("blocks", {})
    live = {unit: count for unit, (count, _) in blocks.items()}
    yield _gauges("tq_storage_active_keys_total", "Blocks of a unit that rows refer to", [UNIT], live)
    yield _gauges(
        "tq_storage_bytes", "Bytes of these blocks", [UNIT], {unit: size for unit, (_, size) in blocks.items()}
    )
    held = {
        (str(number), kind): value
        for number, stats in enumerate(figures.units)
        for kind, value in stats.items()
        if isinstance(value, (int, float))
    }
    yield _gauges("tq_storage_held_bytes", "What a unit says of its memory, by kind", [UNIT, "kind"], held)
    rss = {unit: of["rss_bytes"] for unit, of in requests.items()}
    yield _gauges("tq_storage_memory_rss_bytes", "Resident memory of a storage unit", [UNIT], rss)
    arrived = {unit: of["arrived"] for unit, of in requests.items()}
    yield _gauges("tq_storage_requests_arrived", "Requests that reached a storage unit", [UNIT], arrived)
    for figure in ("avg", "p50", "p99"):
        latency = {
            (operation, unit): of_operation[figure]
            for unit, of in requests.items()
            for operation, of_operation in of["operations"].items()
        }
        text = f"{figure} of the latest requests of a storage unit, seconds"
        yield _gauges(f"tq_storage_request_latency_{figure}", text, [OPERATION, UNIT], latency)
    ops = {
        (operation, unit): of_operation["calls"] / max(of["uptime_s"], 1e-9)
        for unit, of in requests.items()
        for operation, of_operation in of["operations"].items()
    }
    yield _gauges("tq_storage_request_ops", "Requests a second since the unit was started", [OPERATION, UNIT], ops)


def _reachable(host: str) -> str:
    """An address that a scraper can use, where the server listens on all of them."""
    ray = sys.modules.get("ray")
    if host != "0.0.0.0" or ray is None or not ray.is_initialized():  # noqa: S104 - a comparison
        return host
    return ray.util.get_node_ip_address()


class _Server(ThreadingMixIn, WSGIServer):
    """Binds without asking a name server for its own name, which takes seconds where none answers."""

    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    """Logs no scrapes."""

    def log_message(self, format: str, *args: Any) -> None: ...


class MeteredController(metered(TransferQueueController, rows_of_controller_call)):  # type: ignore[misc]
    """A controller whose calls are timed, and that serves /metrics.

    Raises:
        ConfigError: the port is taken; at the first `session`, so that whoever called `init` sees it.
    """

    def __init__(self, config: dict[str, Any], placements: Sequence[str | None]) -> None:
        super().__init__(config, placements)
        self._collector = TableCollector(self.meter)
        self._interval_s = float(config["metrics"]["interval_s"])
        self._collecting: asyncio.Task[None] | None = None
        self._server: Any = None
        self._capacity = config["backend"]["SimpleStorage"]["total_storage_size"]
        self._start_error: ConfigError | None = None
        try:
            self._config["metrics"]["endpoint"] = self._serve(config["metrics"])
        except ConfigError as error:
            self._start_error = error

    def _serve(self, metrics: dict[str, Any]) -> str:
        registry = CollectorRegistry()
        registry.register(self._collector)
        host, port = metrics["host"], metrics["port"]
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), _Server, _Handler)
        except OSError as error:
            raise ConfigError(
                f"transfer_queue.metrics.port={port} on {host} cannot be served: {error.strerror or error}. Another "
                "process, perhaps another run's table, has it; try port 0 for a free one"
            ) from error
        Thread(target=self._server.serve_forever, args=(0.1,), name="transfer-queue-metrics", daemon=True).start()
        return f"{_reachable(host)}:{self._server.server_port}"

    async def session(self) -> dict[str, Any]:
        """See `TransferQueueController.session`."""
        if self._start_error is not None:
            raise self._start_error
        if self._collecting is None:
            self._collecting = asyncio.create_task(self._collect())
        return await super().session()

    async def _collect(self) -> None:
        while True:
            try:
                units = await self._host.stats()
                self._collector.figures = TableFigures(self._table.figures(), units, self._capacity)
            except Exception:  # noqa: BLE001 - figures are missing until the next round, the table goes on
                logger.warning("the figures of the table could not be collected", exc_info=True)
            await asyncio.sleep(self._interval_s)

    async def stop_metrics(self) -> None:
        """Give the port back; for a table in the process of its owner. An actor's ends with it."""
        if self._collecting is not None:
            self._collecting.cancel()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
