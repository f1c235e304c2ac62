"""Who gets which memory, and when it comes back."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.transfer_queue.arena import Arena, Cursor, segment_bytes
from rlflow.transfer_queue.segment import UnitAddress, map_for_reading, map_for_writing

NONCE = bytes(range(16))
HERE = UnitAddress("node", os.getpid(), NONCE)
MB = 1 << 20


@pytest.fixture
def arena() -> Arena:
    return Arena(NONCE, idle_s=1000.0)


def segments(arena: Arena) -> tuple[int, int]:
    """Bytes of all segments, and of those that are free."""
    stats = arena.stats()
    return stats["segment_bytes"], stats["free_bytes"]


def test_a_lent_segment_comes_back_when_its_last_block_is_freed(arena):
    lease = arena.lease("w", MB)
    assert lease is not None
    arena.seal(lease.serial, ["w:0", "w:1"], "w")
    arena.free(["w:0", "somebody else's:3"])
    assert segments(arena) == (MB, 0)
    arena.free(["w:1"])
    assert segments(arena) == (MB, MB)
    again = arena.lease("v", MB)
    assert again is not None
    # The same touched memory, under another serial.
    assert (again.number, again.fd) == (lease.number, lease.fd)
    assert again.serial != lease.serial


def test_blocks_may_be_freed_before_the_seal(arena):
    first, second = arena.lease("w", MB), arena.lease("w", MB)
    assert first is not None and second is not None
    arena.free(["w:0", "w:2"])
    arena.seal(first.serial, ["w:0", "w:1"], "w")
    assert segments(arena) == (2 * MB, 0)
    arena.free(["w:1"])
    assert segments(arena) == (2 * MB, MB)
    arena.seal(second.serial, ["w:2"], "w")
    assert segments(arena) == (2 * MB, 2 * MB)


def test_memory_that_is_looked_at_is_not_lent(arena):
    lease = arena.lease("w", MB)
    assert lease is not None
    view = map_for_reading(HERE, lease.fd, lease.serial)
    arena.seal(lease.serial, [], "w")
    assert arena.stats()["pinned_bytes"] == MB
    other = arena.lease("w", MB)
    assert other is not None and other.number != lease.number
    arena.tidy()
    assert len(view) > MB
    del view
    assert arena.stats()["pinned_bytes"] == 0
    third = arena.lease("w", MB)
    assert third is not None and third.number == lease.number


def test_what_a_dead_writer_left_is_taken_back(arena):
    used, unused = arena.lease("w", MB), arena.lease("w", MB)
    own = arena.lease("v", MB)
    assert used is not None and unused is not None and own is not None
    arena.free(["w:0"])
    assert arena.writers() == {"v", "w"}
    arena.abandon("w", ["w:1"])  # it may be in either
    assert arena.writers() == {"v"}
    assert segments(arena) == (3 * MB, 0)
    arena.seal(used.serial, ["w:0"], "w")  # a seal that comes late changes nothing
    arena.free(["w:1"])
    assert segments(arena) == (3 * MB, 2 * MB)


def test_a_seal_of_another_writer_is_ignored(arena):
    lease = arena.lease("w", MB)
    assert lease is not None
    arena.seal(lease.serial, [], "v")
    assert segments(arena) == (MB, 0)


def test_the_limit_is_kept_and_told_once(caplog):
    arena = Arena(NONCE, idle_s=1000.0, limit=3 * MB)
    small, large = arena.lease("w", MB), arena.lease("w", 2 * MB)
    assert small is not None and large is not None
    with caplog.at_level(logging.WARNING):
        assert arena.lease("w", MB) is None
        assert arena.write("w:9", 100) is None
    assert len(caplog.records) == 1
    arena.seal(large.serial, [], "w")
    # Free memory of the wrong size makes room for memory of the right one.
    assert arena.lease("w", MB // 4) is not None
    assert segments(arena)[0] <= 3 * MB


FULL = """
import resource
from rlflow.transfer_queue.arena import Arena
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
arena = Arena(bytes(16), 10.0)
assert arena.lease("w", 1 << 20) is not None
assert arena.lease("w", 4 << 20) is None
assert arena.write("w:0", 4 << 20) is None
assert arena.write("w:1", 1000) is not None
assert arena.stats()["segments"] == 2
"""


def test_when_the_system_has_no_memory_a_lease_is_refused():
    subprocess.run([sys.executable, "-c", FULL], check=True, timeout=60)


def test_free_memory_is_given_back_after_a_while():
    arena = Arena(NONCE, idle_s=0.0)
    lease = arena.lease("w", MB)
    assert lease is not None
    arena.tidy()
    assert segments(arena) == (MB, 0)
    arena.seal(lease.serial, [], "w")
    arena.tidy()
    assert segments(arena) == (0, 0)


def test_the_unit_s_own_segment_comes_back_too(arena):
    extents = [arena.write(f"w:{i}", 300_000) for i in range(5)]
    assert all(extent is not None for extent in extents)
    arena.free([f"w:{i}" for i in range(5)])
    held, free = segments(arena)
    assert held == free


def test_a_freed_block_is_read_until_its_memory_is_used_anew(arena):
    room = arena.write("w:0", 100)
    assert room is not None
    extent, target = room
    target[:] = 3
    data = arena.read(extent)
    assert data is not None and (data == 3).all() and not data.flags.writeable
    arena.free(["w:0"])
    assert arena.read(extent) is None


@given(st.lists(st.integers(0, 40_000_000), min_size=1, max_size=5), st.integers(0, 20))
def test_sizes_of_segments_fit_and_recur(sizes, number):
    for size in sizes:
        made = segment_bytes(size, number)
        assert size <= made <= max(32 * MB, 1.25 * size)
        assert made >= MB


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from("wufs"), st.integers(0, 5)), max_size=60))
def test_no_two_living_blocks_share_memory(steps):
    """A client, the unit itself and a reader in any order: every living block keeps its bytes."""
    arena = Arena(NONCE, idle_s=0.0, limit=6 * MB)
    living: dict[str, tuple] = {}
    cursor, mapping, blocks = None, None, []
    value_of: dict[str, int] = {}
    views: list[tuple[np.ndarray, int]] = []

    def seal() -> None:
        nonlocal cursor, blocks
        if cursor is not None:
            arena.seal(cursor.lease.serial, blocks, "w")
        cursor, blocks = None, []

    for number, (step, argument) in enumerate(steps):
        block_id, nbytes, value = f"w:{number}", 150_000 * (1 + argument), number % 251
        value_of[block_id] = value
        if step == "w":  # a client writes
            if cursor is None or not cursor.fits(nbytes):
                seal()
                lease = arena.lease("w", MB)
                if lease is None:
                    continue
                cursor = Cursor(lease)
                mapping = map_for_writing(HERE, lease.fd, lease.number, lease.serial)
            extent = cursor.take(nbytes)
            blocks.append(block_id)
            np.frombuffer(mapping, np.uint8, nbytes, extent[2])[:] = value
            living[block_id] = extent, value
        elif step == "u":  # a message is written by the unit
            room = arena.write(block_id, nbytes)
            if room is not None:
                room[1][:] = value
                living[block_id] = room[0], value
        elif step == "f" and living:
            gone = list(living)[argument % len(living)]
            fd, serial, offset, size = living.pop(gone)[0]
            if argument % 2:
                views.append((map_for_reading(HERE, fd, serial)[offset : offset + size], value_of[gone]))
            arena.free([gone])
        elif step == "s":
            seal()
            arena.tidy()
        for extent, expected in living.values():
            data = arena.read(extent)
            assert data is not None and (data == expected).all()
        assert all((view == expected).all() for view, expected in views)
        if argument == 0:
            views.clear()
    seal()
    views.clear()
    arena.free(list(living))
    arena.tidy()
    arena.tidy()
    assert arena.stats()["segment_bytes"] in (0, arena.stats()["free_bytes"])
