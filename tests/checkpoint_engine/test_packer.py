"""How many buckets are under way, and that memory under way is not written."""

from __future__ import annotations

import asyncio

import pytest
import rollout_tiny as tiny
import torch

from rlflow.checkpoint_engine.base import WeightReceipt, build_sender
from rlflow.checkpoint_engine.checksum import combine
from rlflow.checkpoint_engine.cores import half_of_the_cores
from rlflow.checkpoint_engine.segments import open_bucket
from rlflow.utils.device import cpu_cores
from rlflow.utils.errors import WeightSyncError


class SlowServer:
    """Reads a bucket some time after it was announced, and compares it with its digests."""

    def __init__(self, at_once, fails=False):
        self.at_once, self.fails = at_once, fails
        self.digests, self.bytes, self.running, self.most = [], 0, 0, 0

    def __getattr__(self, method):
        call = {"begin_update": self._begin, "load_bucket": self._load, "finish_update": self._finish}[method]
        return type("Method", (), {"remote": staticmethod(call)})

    async def _begin(self, version):
        return self.at_once

    async def _load(self, metas, path):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.02)
        if self.fails:
            raise WeightSyncError("broken")
        with open_bucket(path, metas):
            self.digests += [meta.digest for meta in metas]
        self.running -= 1
        size = sum(meta.size for meta in metas)
        self.bytes += size
        return size

    async def _finish(self, version, count, checksum):
        return WeightReceipt(version, len(self.digests), self.bytes, combine(self.digests))


def sender():
    config = tiny.config("unused", dtype="bfloat16").actor_rollout_ref.rollout
    config.checkpoint_engine.update_weights_bucket_megabytes = 0.01
    return build_sender(config, 0, 1)


def params():
    return ((f"t{i}", torch.full((100, 40 + i), float(i))) for i in range(12))


@pytest.mark.parametrize(("at_once", "most"), [(None, 1), (1, 1), (2, 2)])
def test_a_server_says_how_many_buckets_it_takes_at_once(at_once, most):
    server = SlowServer(at_once)
    receipt = asyncio.run(sender().send(params(), server, 1))
    assert server.most == most
    assert receipt.tensor_count == 12 and len(receipt.buckets) > 3


def test_memory_is_used_again_after_a_good_update_and_freed_after_a_bad_one():
    one = sender()
    asyncio.run(one.send(params(), SlowServer(2), 1))
    kept = list(one._spare)
    assert 1 <= len(kept) <= 3
    asyncio.run(one.send(params(), SlowServer(2), 2))
    assert set(one._spare) == set(kept)
    with pytest.raises(WeightSyncError, match="broken"):
        asyncio.run(one.send(params(), SlowServer(2, fails=True), 3))
    assert one._spare == [] and all(segment._fd == -1 for segment in kept)


def test_one_end_of_a_transfer_takes_half_of_the_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(cpu_cores())
    with half_of_the_cores():
        assert torch.get_num_threads() == max(1, cpu_cores() // 2)
    assert torch.get_num_threads() == cpu_cores()
    torch.set_num_threads(before)
