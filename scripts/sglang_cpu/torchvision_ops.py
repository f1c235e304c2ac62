"""Lets torchvision's CUDA build be imported beside a CPU build of torch.

Its compiled operators cannot be loaded there, and while it is imported it describes two of them to torch, which then
fails with "operator torchvision::nms does not exist". A finder that finds nothing declares the two just before that
module loads. SGLang imports torchvision for vision models; text models call none of its operators.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

_DESCRIBES_OPERATORS = "torchvision._meta_registrations"
_OPERATORS = ("nms", "qnms")
_KEPT: list[Any] = []  # a torch library forgets its operators when it is collected


class _DeclareOperators(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == _DESCRIBES_OPERATORS and not _KEPT:
            _declare()


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for operator in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
