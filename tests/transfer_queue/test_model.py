"""Whatever interleaving of calls several clients make, the table is a dict of rows.

A hypothesis state machine drives the table through several clients and a plain model beside it. Clients in Ray are
processes; in process they are a thread, a thread with an event loop, and the test's own thread.

`RLFLOW_TQ_EXAMPLES=500` runs it for longer.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tensordict import NonTensorStack, TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

DEADLINE_S = 60.0
EXAMPLES = int(os.environ.get("RLFLOW_TQ_EXAMPLES", "12"))
KEYS = [f"k{i}" for i in range(6)]
FIELDS = ["scalar", "flag", "tokens", "matrix", "text"]

# -- values: a field's value in a row is made of one number ------------------------------------------------------------


def cell(field: str, number: int, other_dtype: bool = False) -> Any:
    """What a row holds, as plain Python: what is put, and what must come back."""
    if field == "scalar":
        return float(number) if other_dtype else number
    if field == "flag":
        return number % 2 == 0
    if field == "tokens":
        return [number + i for i in range(number % 5)]
    if field == "matrix":
        return [[float(number), float(i)] for i in range(1 + number % 3)]
    return {"answer": f"text {number}", "turns": [number] * (number % 3)}


def column(field: str, cells: list[Any]) -> Any:
    """The cells as a value of a TensorDict."""
    if field == "scalar":
        return torch.tensor(cells, dtype=torch.float32 if isinstance(cells[0], float) else torch.int64)
    if field == "flag":
        return torch.tensor(cells)
    if field == "text":
        return NonTensorStack(*cells)
    dtype = torch.int64 if field == "tokens" else torch.float32
    rows = [torch.tensor(value, dtype=dtype) for value in cells]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def plain(batch: TensorDict) -> dict[str, Any]:
    """A TensorDict as lists of cells, and its size."""
    found = {}
    for name in batch.keys():
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.is_nested:
            found[name] = [row.tolist() for row in value.unbind()]
        else:
            found[name] = value.tolist()
    return {"size": batch.batch_size[0], **found}


# -- clients -----------------------------------------------------------------------------------------------------------


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call, `cells` made to a TensorDict."""
    cells = kwargs.pop("cells", None)
    if cells is None:
        return kwargs
    columns = {field: column(field, values) for field, values in cells.items()}
    return {**kwargs, "fields": TensorDict(columns, batch_size=[len(args[0])])}


def outcome(result: Any) -> Any:
    """What a call returned, in plain Python."""
    if isinstance(result, TensorDict):
        return plain(result)
    return (result.keys, result.tags, sorted(result.fields)) if isinstance(result, tq.KVBatchMeta) else result


def perform(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the table; the outcome, or the name of the error."""
    try:
        return outcome(getattr(tq, name)(*args, **arguments(args, kwargs)))
    except tq.TransferQueueError as error:
        return type(error).__name__


async def perform_async(name: str, *args: Any, **kwargs: Any) -> Any:
    """`perform` through the async form."""
    try:
        return outcome(await getattr(tq, f"async_{name}")(*args, **arguments(args, kwargs)))
    except tq.TransferQueueError as error:
        return type(error).__name__


@ray.remote(num_cpus=0)
class Process:
    """A client in a process of its own."""

    def perform(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return perform(name, *args, **kwargs)


class RemoteClient:
    """Calls through another process."""

    def __init__(self) -> None:
        self._process = Process.remote()
        self.send("kv_list")()

    def send(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Begin a call; the returned function awaits its result."""
        ref = self._process.perform.remote(name, *args, **kwargs)
        return lambda: ray_get(ref, what=name, timeout_s=DEADLINE_S)

    def end(self) -> None:
        ray.kill(self._process)


class ThreadClient:
    """Calls from a thread of this process."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def send(self, name: str, *args: Any, **kwargs: Any) -> Any:
        future = self._pool.submit(perform, name, *args, **kwargs)
        return lambda: future.result(DEADLINE_S)

    def end(self) -> None:
        self._pool.shutdown()


class LoopClient:
    """Awaits the async forms on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def send(self, name: str, *args: Any, **kwargs: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(perform_async(name, *args, **kwargs), self._loop)
        return lambda: future.result(DEADLINE_S)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def is_local() -> bool:
    return tq.get_client().config["backend"]["storage_backend"] == "Local"


@pytest.fixture(scope="module")
def clients(table: None) -> Any:
    third = ThreadClient() if is_local() else RemoteClient()
    made = [ThreadClient(), LoopClient(), third]
    yield made
    for client in made:
        client.end()


# -- the machine -------------------------------------------------------------------------------------------------------

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)
some_fields = st.lists(st.sampled_from(FIELDS), min_size=1, max_size=3, unique=True)
tag_values = st.one_of(st.integers(0, 9), st.sampled_from(["running", "finished"]), st.none())
tags = st.dictionaries(st.sampled_from(["status", "n", "by"]), tag_values, max_size=2)
numbers = st.integers(0, 40)
who = st.integers(0, 2)


class Machine(RuleBasedStateMachine):
    """The model: {key: (tag, {field: cell})}, in creation order."""

    clients: list[Any]
    partition_count = 0

    @initialize()
    def start(self) -> None:
        Machine.partition_count += 1
        self.partition = f"model{Machine.partition_count}"
        self.rows: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.mirror: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.writes = 0
        self.written: dict[tuple[str, str], int] = {}  # (key, field) -> the write that put it last
        self.saved: Any = None
        self.folder = Path(tempfile.mkdtemp(prefix="rlflow_model_"))

    def call(self, client: int, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.clients[client].send(name, *args, **kwargs)()

    # what the model says

    def common(self, keys: list[str]) -> list[str]:
        return sorted(set.intersection(*(set(self.rows[key][1]) for key in keys)))

    def write(self, keys: list[str], cells: dict[str, list[Any]], new_tags: list[dict[str, Any]] | None) -> Any:
        self.writes += 1
        self.written.update({(key, field): self.writes for key in keys for field in cells})
        for place, key in enumerate(keys):
            tag, row = self.rows.setdefault(key, ({}, {}))
            row.update({field: values[place] for field, values in cells.items()})
            tag.update(new_tags[place] if new_tags is not None else {})
        return keys, [self.rows[key][0] for key in keys], self.common(keys)

    def read(self, keys: list[str], selected: list[str] | None, missing_ok: list[str]) -> Any:
        if any(key not in self.rows for key in keys):
            return "StorageKeyNotFoundError"
        common = self.common(keys)
        if selected is None and not common:
            return "NotReadyError"
        names = common if selected is None else selected
        if any(name not in common and name not in missing_ok for name in names):
            return "MissingFieldError"
        return {"size": len(keys)} | {
            name: [self.rows[key][1][name] for key in keys] for name in names if name in common
        }

    def holds_floats(self) -> bool | None:
        """Whether the scalars are floats; None while there are none."""
        kinds = {isinstance(row["scalar"], float) for _, row in self.rows.values() if "scalar" in row}
        return kinds.pop() if kinds else None

    # what the clients do

    @rule(client=who, keys=some_keys, fields=some_fields, number=numbers, floats=st.booleans(), data=st.data())
    def put(self, client: int, keys: list[str], fields: list[str], number: int, floats: bool, data: Any) -> None:
        new_tags = data.draw(st.none() | st.lists(tags, min_size=len(keys), max_size=len(keys)))
        cells = {f: [cell(f, number + i, floats) for i in range(len(keys))] for f in fields}
        got = self.call(client, "kv_batch_put", keys, self.partition, cells=cells, tags=new_tags)
        if "scalar" in fields and self.holds_floats() not in (None, floats):
            assert got == "DtypeConflictError"
        else:
            assert got == self.write(keys, cells, new_tags)

    @rule(client=who, key=st.sampled_from(KEYS), tag=tags)
    def put_tag(self, client: int, key: str, tag: dict[str, Any]) -> None:
        assert self.call(client, "kv_put", key, self.partition, tag=tag) == self.write([key], {}, [tag])

    @rule(key=st.sampled_from(KEYS), number=numbers)
    def merge_from_all_sides_at_once(self, key: str, number: int) -> None:
        merges = [{f"by {client}": number} for client in range(len(self.clients))]
        cells = {"tokens": [cell("tokens", number)]}
        waits = [
            client.send("kv_put", key, self.partition, tag=tag)
            for client, tag in zip(self.clients, merges, strict=True)
        ]
        waits.append(self.clients[0].send("kv_batch_put", [key], self.partition, cells=cells))
        for wait in waits:
            assert not isinstance(wait(), str)
        for tag in merges:
            self.write([key], {}, [tag])
        self.write([key], cells, None)

    @precondition(lambda self: self.rows)
    @rule(client=who, number=numbers, data=st.data())
    def overwrite_while_others_read(self, client: int, number: int, data: Any) -> None:
        """A reader sees the row before or after, never a mixture."""
        key = data.draw(st.sampled_from(list(self.rows)))
        before = self.read([key], ["tokens", "matrix"], ["tokens", "matrix"])
        cells = {field: [cell(field, number)] for field in ("tokens", "matrix")}
        writing = self.clients[client].send("kv_batch_put", [key], self.partition, cells=cells)
        reading = [
            other.send("kv_batch_get", [key], self.partition, ["tokens", "matrix"], missing_ok=["tokens", "matrix"])
            for other in self.clients
        ]
        assert writing() == self.write([key], cells, None)
        after = self.read([key], ["tokens", "matrix"], [])
        for read in reading:
            assert read() in (before, after)

    @rule(
        client=who,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5),
        selected=st.none() | some_fields,
        optional=st.booleans(),
    )
    def get(self, client: int, keys: list[str], selected: list[str] | None, optional: bool) -> None:
        missing_ok = selected if selected and optional else []
        got = self.call(client, "kv_batch_get", keys, self.partition, selected, missing_ok=missing_ok)
        assert got == self.read(keys, selected, missing_ok)

    @rule(client=who, keys=some_keys)
    def clear(self, client: int, keys: list[str]) -> None:
        assert self.call(client, "kv_clear", keys, self.partition) is None
        for key in keys:
            self.rows.pop(key, None)

    @precondition(lambda self: self.rows)
    @rule(client=who, data=st.data())
    def compare_and_set(self, client: int, data: Any) -> None:
        key, expected, n = data.draw(st.sampled_from(list(self.rows))), data.draw(tag_values), data.draw(numbers)
        got = self.call(client, "kv_put", key, self.partition, tag={"n": n}, expect={"n": expected})
        if self.rows[key][0].get("n") == expected:
            assert got == self.write([key], {}, [{"n": n}])
        else:
            assert got == "TagConflictError"

    @rule(client=who)
    def lineage(self, client: int) -> None:
        """Which fields there are, and the order in which they were put."""
        if not self.rows:
            return
        found = self.call(client, "kv_lineage", list(self.rows), self.partition)
        assert {key: sorted(fields) for key, fields in found.items()} == {
            key: sorted(cells) for key, (_, cells) in self.rows.items()
        }
        cells = [(self.written[key, field], entry["version"]) for key in found for field, entry in found[key].items()]
        order = {written: version for written, version in sorted(cells)}
        assert len(set(cells)) == len(order) and list(order.values()) == sorted(set(order.values()))

    @rule()
    def save(self) -> None:
        tq.save_checkpoint(self.folder / "saved", metadata={"rows": len(self.rows)})
        self.saved = copy.deepcopy((self.rows, self.written))

    @precondition(lambda self: self.saved)
    @rule(client=who)
    def restore(self, client: int) -> None:
        """The rows of then are back; a follower must start anew."""
        rows, written = copy.deepcopy(self.saved)
        assert tq.load_checkpoint(self.folder / "saved") == {"rows": len(rows)}
        self.rows, self.written = rows, written
        if self.version and rows:
            assert self.call(client, "kv_watch", self.partition, self.version, 0.0) == "WatchGapError"
        self.version, self.mirror = 0, {}

    @rule(client=who)
    def listing(self, client: int) -> None:
        listed = self.call(client, "kv_list", self.partition).get(self.partition, {})
        assert list(listed.items()) == [(key, tag) for key, (tag, _) in self.rows.items()]

    @precondition(lambda self: self.rows)
    @rule(client=who, data=st.data())
    def wait_for_what_is_there(self, client: int, data: Any) -> None:
        key = data.draw(st.sampled_from(list(self.rows)))
        if "status" in self.rows[key][0]:
            done = tq.Predicate(self.rows[key][0]["status"])
            _, found = self.call(client, "kv_wait", self.partition, keys=[key], predicate=done, timeout_s=DEADLINE_S)
            assert found == {key: self.rows[key][0]}

    @rule(client=who)
    def follow(self, client: int) -> None:
        """Changes since the last look make the mirror equal to the table."""
        version, changes = self.call(client, "kv_watch", self.partition, self.version, 0.0)
        assert version >= self.version
        self.version = version
        for key, tag in changes.items():
            self.mirror.pop(key, None)
            if tag is not None:
                self.mirror[key] = tag
        assert self.mirror == {key: tag for key, (tag, _) in self.rows.items()}

    def teardown(self) -> None:
        if self.rows:
            tq.kv_clear(list(self.rows), self.partition)
        assert held_blocks() == 0
        shutil.rmtree(self.folder)


def held_blocks() -> int:
    stats = asyncio.run(tq.get_client().async_stats())
    return sum(unit["blocks"] for unit in stats["units"])


def test_the_table_is_a_dict_of_rows(clients):
    Machine.clients = clients
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES * (2 if is_local() else 1),
            stateful_step_count=30,
            deadline=None,
            derandomize="RLFLOW_TQ_EXAMPLES" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
