"""FLOPs of a dense decoder, and peaks by device name."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MambaConfig

from rlflow.utils.flops_counter import FlopsCounter, get_device_flops


def test_a_dense_decoder_by_hand():
    config = LlamaConfig(
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=10,
    )
    params = 2 * (3 * 8 * 16 + 8 * (8 + 4 + 4 + 8)) + 2 * 10 * 8
    expected = 6 * params * 5 + 6 * (9 + 4) * 2 * 4 * 2
    counter = FlopsCounter(config)
    assert counter.train_flops([3, 2]) == expected
    achieved, _ = counter.estimate_flops([3, 2], 2.0)
    assert achieved == pytest.approx(expected / 2 / 1e12)


def test_an_unknown_architecture_or_device_reports_nothing():
    assert not FlopsCounter(MambaConfig()).known
    assert get_device_flops("Some Future Chip") is None
    assert get_device_flops("NVIDIA H200") == 989e12
    assert get_device_flops("NVIDIA GB200") == 2.5e15
    assert get_device_flops("NVIDIA L40S") == 362.05e12
    assert get_device_flops("NVIDIA H20") == 148e12
