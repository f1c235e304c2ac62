"""Shared memory between real processes: who sees what, and when it may be used for something else."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rlflow.transfer_queue.segment import (
    HEADER_BYTES,
    Segment,
    SegmentGoneError,
    UnitAddress,
    map_for_reading,
    map_for_writing,
)

NONCE = bytes(range(16))
HERE = UnitAddress("node", os.getpid(), NONCE)


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A segment in use, full of sevens."""
    segment = Segment(NONCE, 1, 1 << 20)
    segment.start(5)
    segment.bytes_at(HEADER_BYTES, 1 << 20)[:] = 7
    yield segment
    segment.close()


def test_a_reader_may_write_into_what_it_got_and_nobody_sees_it(segment):
    mine, other = map_for_reading(HERE, segment.fd, 5), map_for_reading(HERE, segment.fd, 5)
    mine[HEADER_BYTES] = 9
    assert other[HEADER_BYTES] == segment.bytes_at(HEADER_BYTES, 1)[0] == 7


def test_a_segment_is_not_used_anew_while_a_view_of_it_lives(segment):
    view = map_for_reading(HERE, segment.fd, 5)[HEADER_BYTES + 100 : HEADER_BYTES + 200]
    assert not segment.retire()
    assert (view == 7).all()
    del view
    assert segment.retire()
    with pytest.raises(SegmentGoneError):
        map_for_reading(HERE, segment.fd, 5)
    segment.start(6)
    with pytest.raises(SegmentGoneError):
        map_for_reading(HERE, segment.fd, 5)
    assert map_for_reading(HERE, segment.fd, 6)[HEADER_BYTES] == 7


def test_a_segment_that_is_being_freed_counts_as_gone(segment):
    fcntl.flock(segment.fd, fcntl.LOCK_EX)
    with pytest.raises(SegmentGoneError, match="being freed"):
        map_for_reading(HERE, segment.fd, 5)


def test_a_forked_child_keeps_the_views_it_inherited(segment):
    view = map_for_reading(HERE, segment.fd, 5)
    to_parent, from_child = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(to_parent, 1)
        os._exit(0)
    del view
    try:
        assert not segment.retire()
    finally:
        os.write(from_child, b"x")
        os.waitpid(child, 0)
    assert segment.retire()
    os.close(to_parent)
    os.close(from_child)


def test_what_is_no_segment_of_the_unit_is_recognised_at_once(segment, tmp_path):
    reader, writer = os.pipe()
    with (tmp_path / "short").open("wb") as short, (tmp_path / "long").open("wb") as long:
        long.write(b"x" * 10_000)
        long.flush()
        for fd in (reader, short.fileno(), long.fileno(), 9999):
            with pytest.raises(SegmentGoneError):
                map_for_reading(HERE, fd, 5)
    for address in (HERE._replace(nonce=bytes(16)), HERE._replace(pid=2**22)):
        with pytest.raises(SegmentGoneError):
            map_for_reading(address, segment.fd, 5)
        with pytest.raises(SegmentGoneError):
            map_for_writing(address, segment.fd, 1, 5)
    with pytest.raises(SegmentGoneError):
        map_for_writing(HERE, segment.fd, 2, 5)
    os.close(reader)
    os.close(writer)


def test_memory_is_given_back_although_a_writer_has_it_mapped():
    segment = Segment(NONCE, 1, 1 << 20)
    segment.start(1)
    mapping = map_for_writing(HERE, segment.fd, 1, 1)
    seen = os.dup(segment.fd)
    assert os.fstat(seen).st_blocks * 512 >= 1 << 20  # reserved before it was touched
    segment.close()
    assert os.fstat(seen).st_blocks == 0
    mapping.close()
    os.close(seen)


OWNER = """
import os, sys, time
from rlflow.transfer_queue.segment import HEADER_BYTES, Segment
segment = Segment(bytes(range(16)), 1, 1 << 20)
segment.start(3)
segment.bytes_at(HEADER_BYTES, 1 << 20)[:] = 8
print(segment.fd, flush=True)
time.sleep(60)
"""


def test_views_outlive_the_unit_and_nothing_else_does():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    fd = int(owner.stdout.readline())
    address = HERE._replace(pid=owner.pid)
    mapping = map_for_writing(address, fd, 1, 3)
    mapping[HEADER_BYTES] = 4
    view = map_for_reading(address, fd, 3)
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    assert view[HEADER_BYTES] == 4
    assert (view[HEADER_BYTES + 1 :] == 8).all()
    with pytest.raises(SegmentGoneError):
        map_for_reading(address, fd, 3)


def test_too_many_open_files_are_no_crash(segment):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held: list[np.ndarray] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, hard))
    try:
        with pytest.raises(SegmentGoneError):
            for _ in range(highest + 8):
                held.append(map_for_reading(HERE, segment.fd, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(held) < highest + 8
    held.clear()
    assert segment.retire()


def test_opening_a_segment_costs_microseconds(segment):
    start = time.perf_counter()
    for _ in range(200):
        map_for_reading(HERE, segment.fd, 5)
    assert (time.perf_counter() - start) / 200 < 2e-3
