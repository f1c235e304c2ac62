"""The hash that seeded sampling makes its noise of. Needs no SGLang."""

from __future__ import annotations

import torch

from rlflow.workers.rollout.sglang.scheduler import murmur_hash32


def _murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, byte for byte after its reference, for whole blocks of four."""
    state = 0
    for start in range(0, len(data), 4):
        k = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        k = ((k << 15) | (k >> 17)) * 0x1B873593 & 0xFFFFFFFF
        state ^= k
        state = ((state << 13) | (state >> 19)) & 0xFFFFFFFF
        state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state ^= state >> shift
        state = state * factor & 0xFFFFFFFF
    return state


def test_it_is_murmurhash3_of_seed_position_and_token():
    seeds = torch.tensor([0, 5, 2**62 + 17], dtype=torch.int64)
    positions, columns = torch.tensor([0, 9, 1000]), torch.arange(7)
    table = murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert table.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        head = seed.to_bytes(8, "little") + position.to_bytes(4, "little")
        expected = [_murmur3(head + column.to_bytes(4, "little")) for column in columns.tolist()]
        assert table[row].tolist() == expected


def test_the_noise_is_uniform_enough_to_sample_with():
    table = murmur_hash32(torch.arange(50), torch.arange(50) % 7, torch.arange(1000))
    share = table.to(torch.float64) / 2**32
    assert abs(float(share.mean()) - 0.5) < 0.01 and abs(float(share.std()) - 12**-0.5) < 0.01
