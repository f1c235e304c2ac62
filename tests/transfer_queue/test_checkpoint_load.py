"""Checkpoints that are taken while processes write are each the table of one moment."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

import rlflow.transfer_queue as tq
from rlflow.utils.ray_utils import ray_get

WINDOW = 10
PUTS = 120
PAIR = ["left", "right"]


def write(writer: str) -> None:
    """Put one pair again and again, and a window of rows that moves on: row k comes, then row k - WINDOW goes."""
    pair = [f"{writer} {side}" for side in PAIR]
    for number in range(1, PUTS + 1):
        both = TensorDict({"x": torch.full((2, 50 + number), number), "n": torch.tensor([number] * 2)}, batch_size=[2])
        tq.kv_batch_put(pair, "pairs", both, [{"n": number}] * 2)
        tq.kv_put(f"{writer}/{number}", writer, {"x": torch.full((300,), number)}, {"n": number})
        if number > WINDOW:
            tq.kv_clear(f"{writer}/{number - WINDOW}", writer)


def check_pair(writer: str) -> int:
    """The number of the pair: of both rows, in both fields and in the tags."""
    pair = [f"{writer} {side}" for side in PAIR]
    got = tq.kv_batch_get(pair, "pairs")
    [number] = set(got["n"].tolist())
    assert got["x"].values().tolist() == [number] * 2 * (50 + number)
    assert [tq.kv_list("pairs")["pairs"][key] for key in pair] == [{"n": number}] * 2
    return number


def check_window(writer: str) -> int:
    """The last number of the window, which has no gap; its rows hold what they should."""
    tags = tq.kv_list(writer)[writer]
    numbers = [tag["n"] for tag in tags.values()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) in (WINDOW, WINDOW + 1)
    got = tq.kv_batch_get(list(tags), writer)["x"].values().view(-1, 300)
    assert torch.equal(got, torch.tensor(numbers)[:, None].expand(-1, 300))
    return numbers[-1]


def test_checkpoints_under_live_writers_are_consistent(ray_table, processes, tmp_path: Path):
    writers = ["a", "b"]
    refs = [process.run.remote(write, writer) for process, writer in zip(processes, writers, strict=True)]
    for writer in writers:
        tq.kv_wait(writer, predicate=tq.Predicate(tuple(range(WINDOW + 1, PUTS + 1)), 1, tag="n"), timeout_s=60)
    versions = [tq.kv_watch("pairs")[0]]
    for number in range(4):
        tq.save_checkpoint(tmp_path / str(number), metadata={"number": number})
        versions.append(tq.kv_watch("pairs")[0])
    assert versions == sorted(set(versions)), "the writers went on meanwhile"
    assert versions[-1] < 2 * PUTS, "to the end"
    ray_get(refs, what="the writers", timeout_s=60)

    # Into a table of another number of storage units.
    tq.close()
    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    seen = []
    for number in range(4):
        assert tq.load_checkpoint(tmp_path / str(number)) == {"number": number}
        for writer in writers:
            pair, last = check_pair(writer), check_window(writer)
            assert pair - last in (0, 1), "row k is put after pair k and before pair k + 1"
            seen.append(pair)
    assert len(set(seen)) > 2, "the checkpoints are of different moments"
