"""The `transfer_queue` config: defaults, merging, checks, and how many storage units go where."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlflow.transfer_queue.samplers import make_sampler, sampler_name
from rlflow.transfer_queue.storage import storage_backend
from rlflow.utils.errors import ConfigError

DEFAULTS: dict[str, Any] = {
    # Ray namespace of the named controller actor; runs that share a Ray cluster need different ones. None: the default.
    "namespace": "transfer_queue",
    # Deadline of one remote call.
    "rpc_timeout_s": 120.0,
    # How long a put of new rows waits for others to be cleared when the table is full.
    "capacity_wait_s": 30.0,
    # How long a save or load of a checkpoint may take.
    "checkpoint_timeout_s": 1800.0,
    "controller": {
        # Chooses rows for `get_meta(mode="fetch")`: a name of samplers.SAMPLERS, a dotted name, a class or an instance.
        "sampler": "SequentialSampler",
        # Whether such a fetch with too few rows gives an empty batch at once, instead of waiting for them.
        "polling_mode": False,
        # How long it waits otherwise.
        "fetch_timeout_s": 30.0,
    },
    "metrics": {
        # Serves Prometheus metrics at http://host:port/metrics of the controller's node; port 0 takes a free one.
        "enabled": False,
        "host": "127.0.0.1",
        "port": 0,
        # Seconds between two looks at the table and the storage units.
        "interval_s": 10.0,
    },
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {
            # Rows that may be held at a time; None for no limit.
            "total_storage_size": None,
            # Bytes that may be held at a time; None for no limit.
            "total_storage_bytes": None,
            # An upper bound: one node gets no more than one unit per 8 cores, unless exact_unit_count is set.
            "num_data_storage_units": 2,
            "exact_unit_count": False,
            # Units that may take the place of units that died, one after the other.
            "replacement_units": 3,
            # Only nodes that offer this custom Ray resource get units.
            "required_node_resource": None,
            # Processes of a unit's machine write and read its memory directly; off: everything goes through messages.
            "shared_memory": True,
            # Shared memory that one unit may take, in bytes; beyond it, messages. None: as much as the machine gives.
            "shared_memory_bytes": None,
            # Shared memory that was not needed for this long is given back to the machine.
            "shared_memory_idle_seconds": 60.0,
        },
    },
}

# Namespace of the table that a process attaches to when it is not told one; for worker processes of a run.
NAMESPACE_ENV = "RLFLOW_TRANSFER_QUEUE_NAMESPACE"


def default_namespace() -> str:
    """Where this process looks for its run's table."""
    return os.environ.get(NAMESPACE_ENV) or str(DEFAULTS["namespace"])


_CORES_PER_UNIT = 8


def merge_config(conf: Any) -> dict[str, Any]:
    """`conf` (DictConfig, dict or None) over the defaults, as a plain dict.

    Raises:
        ConfigError: a value that cannot work.
        QueueArgumentError: (a ValueError) an unknown sampler.
    """
    config = _overlay(DEFAULTS, _plain(conf))
    config["namespace"] = config["namespace"] or DEFAULTS["namespace"]
    simple = config["backend"]["SimpleStorage"]
    units, capacity = simple["num_data_storage_units"], simple["total_storage_size"]
    if not _is_count(units):
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.num_data_storage_units={units!r}: the table needs storage; try 1"
        )
    if capacity is not None and not _is_count(capacity):
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.total_storage_size={capacity!r} rows cannot hold a batch; try "
            "100000, or null for no limit"
        )
    limit = simple["total_storage_bytes"]
    if limit is not None and not _is_count(limit):
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.total_storage_bytes={limit!r} bytes cannot hold a batch; try "
            "17179869184 (16 GiB), or null for no limit"
        )
    spares = simple["replacement_units"]
    if spares != 0 and not _is_count(spares):
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.replacement_units={spares!r} is no number of units; try 3, "
            "or 0 for none"
        )
    _check_shared_memory(simple)
    for key in ("rpc_timeout_s", "capacity_wait_s", "checkpoint_timeout_s"):
        _check_duration(key, config[key], DEFAULTS[key])
    storage_backend(config["backend"]["storage_backend"])
    _check_controller(config["controller"])
    _check_metrics(config["metrics"])
    return config


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with plain values only: a sampler given as an object stands there by its name."""
    sampler = sampler_name(config["controller"]["sampler"])
    return {**config, "controller": {**config["controller"], "sampler": sampler}, "metrics": dict(config["metrics"])}


def _check_shared_memory(simple: Mapping[str, Any]) -> None:
    limit = simple["shared_memory_bytes"]
    if limit is not None and not _is_count(limit):
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.shared_memory_bytes={limit!r} is no size; try 17179869184 (16 GiB), "
            "null for no limit, or shared_memory=false for none at all"
        )
    _check_duration("backend.SimpleStorage.shared_memory_idle_seconds", simple["shared_memory_idle_seconds"], 60.0)


def _plain(conf: Any) -> dict[str, Any]:
    if conf is None:
        return {}
    if isinstance(conf, Mapping) and not hasattr(conf, "_metadata"):
        return dict(conf)
    from omegaconf import OmegaConf

    if not OmegaConf.is_config(conf):
        raise ConfigError(f"transfer_queue.init takes a DictConfig, a dict or None, got {type(conf).__name__}")
    return OmegaConf.to_container(conf, resolve=True)  # type: ignore[return-value]


def _overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: _overlay(value, {}) if isinstance(value, Mapping) else value for key, value in base.items()}
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _overlay(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_duration(key: str, value: Any, example: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"transfer_queue.{key}={value!r} is no duration; try {example}")


def _check_controller(controller: Mapping[str, Any]) -> None:
    make_sampler(controller["sampler"])
    if not isinstance(controller["polling_mode"], bool):
        raise ConfigError(f"transfer_queue.controller.polling_mode={controller['polling_mode']!r} is not true or false")
    _check_duration("controller.fetch_timeout_s", controller["fetch_timeout_s"], 30.0)


def _check_metrics(metrics: Mapping[str, Any]) -> None:
    port = metrics["port"]
    if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
        raise ConfigError(f"transfer_queue.metrics.port={port!r} is no port; try 0 for a free one")
    _check_duration("metrics.interval_s", metrics["interval_s"], 10.0)
    if metrics["enabled"] and importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "transfer_queue.metrics.enabled=true needs the package prometheus-client, which is not installed; "
            "pip install 'rlflow[metrics]', or set it to false"
        )


def place_units(config: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Node id of each storage unit; None leaves the place to Ray.

    Args:
        config: the merged config.
        nodes: `ray.nodes()`.

    Raises:
        ConfigError: no node offers `required_node_resource`.
    """
    simple = config["backend"]["SimpleStorage"]
    wanted, resource = int(simple["num_data_storage_units"]), simple["required_node_resource"]
    alive = [node for node in nodes if node["Alive"] and (resource is None or resource in node["Resources"])]
    if resource is not None and not alive:
        raise ConfigError(
            f"transfer_queue.backend.SimpleStorage.required_node_resource={resource!r} is offered by no Ray node; "
            "start one with --resources, or set it to null"
        )
    if len(alive) <= 1:
        if not simple["exact_unit_count"]:
            cores = sum(node["Resources"].get("CPU", 0) for node in alive)
            wanted = min(wanted, max(1, int(cores) // _CORES_PER_UNIT))
        return [alive[0]["NodeID"] if resource is not None else None] * wanted
    return [alive[number % len(alive)]["NodeID"] for number in range(wanted)]
