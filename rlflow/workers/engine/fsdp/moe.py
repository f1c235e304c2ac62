"""How evenly a mixture-of-experts model uses its experts.

With f_e the share of a layer's assignments that went to expert e (of E) and P_e the mean probability of its router:
    violation   f_e E - 1                 0 for an even load, -1 for an expert that nobody asked
    aux loss    E k sum_e f_e P_e         Switch Transformer (arXiv:2101.03961, equations 4 to 6), k experts a token

Both are measured over a whole mini-batch on all ranks, so that they do not depend on how it was split; a prompt that
rows share counts as often as it is computed. The aux loss is
reported only, never trained: it is no sum over tokens, so that its gradient would depend on the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.utils.metric import AggregationType, Metric


def find_routers(hf_model: Any) -> list[tuple[nn.Module, int]]:
    """(router, place of its logits [tokens, experts] in what it returns) of each layer, in their order.

    Empty for a dense model, and for one that does not declare its routers to transformers.
    """
    recorder = (getattr(hf_model, "_can_record_outputs", None) or {}).get("router_logits")
    if not hasattr(recorder, "target_class"):
        return []
    target, place = recorder.target_class, int(recorder.index)  # type: ignore[union-attr]
    return [(module, place) for module in hf_model.modules() if isinstance(module, target)]


class RouterLoad:
    """Counts of a mini-batch, collected by hooks on the routers while `recording`.

    Args:
        routers: of `find_routers`.
        top_k: experts of a token.
        with_aux: also report the aux loss.
    """

    def __init__(self, routers: list[tuple[nn.Module, int]], top_k: int, with_aux: bool) -> None:
        self.top_k, self.with_aux = top_k, with_aux
        self._counted = 0
        self._sums: list[Tensor | None] = [None] * len(routers)
        for layer, (router, place) in enumerate(routers):
            router.register_forward_hook(self._hook(layer, place))

    @staticmethod
    def of(hf_model: Any) -> RouterLoad | None:
        """For a model with routers, else None."""
        routers = find_routers(hf_model)
        config = hf_model.config.get_text_config()
        top_k = getattr(config, "num_experts_per_tok", None)
        if not routers or not top_k:
            return None
        return RouterLoad(routers, int(top_k), bool(getattr(config, "output_router_logits", False)))

    @contextmanager
    def recording(self, tokens: int) -> Iterator[None]:
        """Count how the first `tokens` of each router are routed inside the block: what fills up a batch is routed too,
        but is no load. Activations that are computed again later are outside of it.
        """
        self._counted = tokens
        try:
            yield
        finally:
            self._counted = 0

    def _hook(self, layer: int, place: int) -> Any:
        def count(_: nn.Module, __: Any, output: Any) -> None:
            if self._counted:
                self._add(layer, output if isinstance(output, Tensor) else output[place])

        return count

    @torch.no_grad()
    def _add(self, layer: int, logits: Tensor) -> None:
        """Rows of the sums [2, experts]: assignments, and router probabilities."""
        probs = torch.softmax(logits.flatten(0, -2)[: self._counted].float(), dim=-1)
        chosen = probs.topk(self.top_k, dim=-1).indices.flatten()
        new = torch.stack([torch.bincount(chosen, minlength=probs.shape[-1]).to(probs.dtype), probs.sum(0)])
        old = self._sums[layer]
        self._sums[layer] = new if old is None else old + new

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """The counts since the last call as metrics, the same on all ranks. *Collective.*"""
        sums, self._sums = self._sums, [None] * len(self._sums)
        experts = next((part.shape[1] for part in sums if part is not None), 0)
        # A rank without rows has counted nothing; it must still know the shape.
        width = torch.tensor(experts, device=device)
        if dist.get_world_size() > 1:
            dist.all_reduce(width, op=dist.ReduceOp.MAX)
        empty = torch.zeros(2, int(width), dtype=torch.float64, device=device)
        total = torch.stack([empty if part is None else part.double() for part in sums])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        if not bool(total.any()):
            return {}
        values = load_values(total[:, 0], total[:, 1], self.top_k)
        if not self.with_aux:
            del values["moe/aux_loss"]
        mean = {name: Metric(AggregationType.MEAN, value) for name, value in values.items()}
        return mean | {n: Metric(AggregationType.MAX, values[n]) for n in values if n.endswith("/max")}


def load_values(assigned: Tensor, probs: Tensor, top_k: int) -> dict[str, float]:
    """Violations (their largest, smallest and mean absolute value in a layer; over layers) and the aux loss.

    Args:
        assigned: [layers, experts], tokens that chose an expert.
        probs: [layers, experts], sums of router probabilities over the same tokens.
        top_k: experts of a token.
    """
    experts = assigned.shape[1]
    tokens = assigned.sum(1, keepdim=True).clamp(min=1) / top_k
    vio = assigned / (tokens * top_k) * experts - 1
    layers = {"max": vio.amax(1), "min": vio.amin(1), "avg": vio.abs().mean(1)}
    values = {f"moe/{name}_vio/avg": float(value.mean()) for name, value in layers.items()}
    values |= {f"moe/{name}_vio/max": float(value.max()) for name, value in layers.items()}
    share, probability = assigned.sum(0) / tokens.sum(), probs.sum(0) / tokens.sum()
    return values | {"moe/aux_loss": float((share * probability).sum() * experts)}
