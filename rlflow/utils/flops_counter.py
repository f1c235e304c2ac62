"""Floating-point operations of training, and the share of a device's peak that a run reaches (MFU).

Forward and backward (3 x the forward), with N multiply-adds a token and L the length of a row:

    FLOPs = 6 N tokens + 6 sum over rows and layers of width x pairs        pairs = L^2, or w (2 L - w) for L > w
    N     = layers + 2 V h

A causal row has L^2 / 2 attention pairs, two products each; a layer with a window of w keys has fewer. N follows the
convention of the field in counting the input embedding as if it were multiplied (hence 2 V h), so that figures can be
compared; a critic has neither. Recomputed activations do not count: MFU measures the model, not the way it is run.

The costs of the families are in `model_flops.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from rlflow.utils.model_flops import Cost, text_cost, vision_cost

logger = logging.getLogger(__name__)

# Peak dense bf16 operations a second, by a part of the device's name; longer names are looked up first.
_PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "MI300X": 1307e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "A40": 149.7e12,
    "L20": 119.5e12,
    "H20": 148e12,
    "910B": 354e12,
    "Ascend910": 354e12,
}
_UNITS = "BKMGTP"  # each a thousand times the one before


def get_device_flops(unit: str = "T", device_name: str | None = None) -> float:
    """Peak bf16 operations a second of a device.

    Args:
        unit: "B" (one), "K", "M", "G", "T" or "P".
        device_name: such as "NVIDIA H100 80GB HBM3"; None: the device of this process.

    Returns:
        inf where it is not known: for a CPU, and for a device that is not in the table.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit={unit!r} is unknown; use one of {', '.join(_UNITS)}")
    name = _device_name() if device_name is None else device_name
    key = next((key for key in sorted(_PEAK_FLOPS, key=lambda key: (-len(key), key)) if key in name), None)
    return math.inf if key is None else _PEAK_FLOPS[key] / 1000.0 ** _UNITS.index(unit)


def _device_name() -> str:
    from rlflow.utils.device import get_device_name

    if get_device_name() != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


class FlopsCounter:
    """FLOPs of a model by its transformers config; `known` is false for architectures without a formula.

    Args:
        hf_config: the config of the whole model.
        vocab_head: whether it ends in logits; false for a value model.
    """

    def __init__(self, hf_config: Any, vocab_head: bool = True) -> None:
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self._text = text_cost(text)
        self._vision = vision_cost(hf_config)
        self._vocab_head = vocab_head
        if not self.known:
            logger.info("no FLOPs formula for model_type %s: MFU is not reported", text.model_type)

    @property
    def known(self) -> bool:
        """Whether the text part has a formula."""
        return self._text is not None

    def train_flops(self, lengths: Sequence[int], images_seqlens: Sequence[int] = ()) -> float:
        """FLOPs of forward and backward; a forward alone is a third.

        Args:
            lengths: tokens of each row.
            images_seqlens: patches of each image (or video frame) of all rows.

        Returns:
            0 where a part of the model has no formula.
        """
        if self._text is None or (images_seqlens and self._vision is None):
            return 0.0
        vocabulary = 2 * self._text.vocabulary if self._vocab_head else 0
        flops = 6.0 * (self._text.layers + vocabulary) * sum(lengths) + 6.0 * _pairs(self._text, lengths)
        if images_seqlens and self._vision is not None:
            flops += 6.0 * self._vision.layers * sum(images_seqlens) + 12.0 * _image_pairs(self._vision, images_seqlens)
        return flops

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float, **kwargs: Any) -> tuple[float, float]:
        """(achieved TFLOP/s, peak TFLOP/s of this device).

        Achieved is 0 for a model without a formula, the peak inf for an unknown device: their ratio is 0, not wrong.

        Args:
            batch_seqlens: tokens of each row.
            delta_time: seconds.
            kwargs: `images_seqlens`, see `train_flops`; others are ignored.
        """
        flops = self.train_flops(batch_seqlens, kwargs.get("images_seqlens") or ())
        return (flops / delta_time / 1e12 if delta_time > 0 else 0.0), get_device_flops("T")


def _pairs(cost: Cost, lengths: Sequence[int]) -> float:
    """Sum of width x pairs over layers and causal rows; pairs = L^2, or w (2 L - w) behind a window of w keys."""
    totals: dict[int | None, float] = {}
    for _, window in cost.attention:
        if window not in totals:
            w = max(lengths, default=0) if window is None else window
            totals[window] = float(sum(min(n, w) * (2 * n - min(n, w)) for n in lengths))
    return sum(width * totals[window] for width, window in cost.attention)


def _image_pairs(cost: Cost, patches: Sequence[int]) -> float:
    """Sum of width x pairs over layers and images; a patch attends to all of its image, or of its window."""
    return sum(
        width * sum(n * (n if window is None else min(n, window)) for n in patches) for width, window in cost.attention
    )


def linear_work_per_token(hf_config: Any) -> int:
    """Work of a token's matrix products in units of one attention pair, for balancing rows.

    N / (2 x widths of all layers), with N including the output head: 6 x hidden size for layers of 12 h^2 (the usual
    transformer), which is also taken for an architecture without a formula. Windows are taken as full attention.
    """
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    cost = text_cost(text)
    if cost is None:
        return 6 * int(text.hidden_size)
    return max(1, round((cost.layers + cost.vocabulary) / (2 * sum(width for width, _ in cost.attention))))
