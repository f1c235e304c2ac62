"""Policy losses as their papers write them, in float64 on dense [B, T], and the gradient of a Hugging Face model.

Nothing here comes from the package: `rlflow` is what is compared with it. `new` is the log-prob with gradient; the
options are those of `OPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

LOW = HIGH = 0.2
DUAL = 3.0
# Options of single losses, so that each has something to do on a batch of a few tokens.
OPTIONS: dict[str, dict[str, object]] = {
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.25, "ppo_kl_coef": 1.0},
    "dro": {"dro_beta": 0.5},
}
BYPASS = {
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": "0.8_1.25",
    "rollout_is": "token",
    "rollout_is_threshold": 1.1,
}

Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def token_mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def row_mean(losses: Tensor, mask: Tensor) -> Tensor:
    """seq-mean-token-mean."""
    per_row = (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    return per_row.sum() / (mask.sum(-1) > 0).sum()


def clip(ratio: Tensor, adv: Tensor) -> Tensor:
    return torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - LOW, 1 + HIGH))


def vanilla(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    clipped = clip((new - old).exp(), adv)
    return token_mean(torch.where(adv < 0, torch.minimum(-adv * DUAL, clipped), clipped), mask)


def dppo_tv(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    step = new.exp() - old.exp()
    valid = torch.where(adv > 0, step <= HIGH, step >= -LOW)
    return token_mean(-adv * ((new - old).exp().clamp(max=DUAL) * valid).detach() * new, mask)


def dppo_kl(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    p, q = new.exp(), old.exp()
    kl = q * (old - new) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    valid = torch.where(adv > 0, (kl <= HIGH) | (p <= q), (kl <= LOW) | (p >= q))
    return token_mean(-adv * ((new - old).exp().clamp(max=DUAL) * valid).detach() * new, mask)


def gspo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    of_row = (((new - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    return row_mean(clip((new - new.detach() + of_row.detach()).exp(), adv), mask)


def sapo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    tau = torch.where(adv > 0, 1.0, 1.05).to(new)
    return row_mean(-adv * torch.sigmoid(tau * ((new - old).exp() - 1)) * 4 / tau, mask)


def gpg(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return token_mean(-adv * new, mask)


def _covariance(new: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    new = new.detach()
    return ((adv - (adv * mask).sum() / mask.sum()) * (new - (new * mask).sum() / mask.sum())).masked_fill(
        mask == 0, -math.inf
    )


def clip_cov(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    ratio = (new - old).exp()
    cov = _covariance(new, adv, mask)
    unclipped = -adv * ratio.clamp(1 - LOW, 1 + HIGH) <= -adv * ratio
    dropped = (cov > 0.0) & (cov < 100.0) & unclipped  # the share is 1: all candidates
    return token_mean(clip(ratio, adv) * ~dropped, mask)


def kl_cov(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    count = max(1, int(int(mask.sum()) * 0.25))
    chosen = torch.zeros_like(mask, dtype=torch.bool).flatten()
    chosen[_covariance(new, adv, mask).flatten().topk(count).indices] = True
    return token_mean(-adv * (new - old).exp() + chosen.view_as(mask) * (new - old).abs(), mask)


def geo_mean(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    sign, tokens = adv.sign(), mask.sum(-1).clamp(min=1)
    x = sign * torch.minimum(sign * (new - old), sign * (new - old).clamp(-LOW, HIGH))
    ratio = ((x * mask).sum(-1) / tokens).exp()
    return (-(adv * mask).sum(-1) / tokens * ratio).sum() / (mask.sum(-1) > 0).sum()


def dro(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return token_mean(-(new * adv - 0.25 * (new - old).square()), mask)


def cispo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return token_mean(-(new - old).exp().clamp(1 - LOW, 1 + HIGH).detach() * adv * new, mask)


def _survivors(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """Tokens whose ratio rollout / current is within the bounds of BYPASS."""
    ratio = (old - new.detach()).exp()
    return mask * ((ratio >= 0.8) & (ratio <= 1.25))


def bypass_ppo_clip(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    kept = _survivors(new, old, mask)
    return (
        vanilla(new, old, adv, kept) * kept.sum() / mask.sum()
    )  # the loss alone knows what survives; the count is of all tokens


def bypass_reinforce(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    weights = (new - old).exp().clamp(max=1.1).detach()
    return token_mean(-adv * new * weights * _survivors(new, old, mask), mask)


LOSSES: dict[str, Formula] = {
    "vanilla": vanilla, "ppo": vanilla, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "gspo": gspo, "sapo": sapo, "gpg": gpg,
    "clip_cov": clip_cov, "kl_cov": kl_cov, "geo_mean": geo_mean, "dro": dro, "cispo": cispo,
    "bypass_mode:ppo_clip": bypass_ppo_clip, "bypass_mode:reinforce": bypass_reinforce,
}  # fmt: skip


class Policy:
    """The tiny model in float64, with any weights of its kind."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder).double().eval()

    def load(self, weights: dict[str, Tensor]) -> None:
        unknown = self.model.load_state_dict({name: value.double() for name, value in weights.items()}, strict=False)
        assert not unknown.unexpected_keys and set(unknown.missing_keys) <= {"lm_head.weight"}, "tied"

    def log_probs(self, prompts: list[Tensor], responses: list[Tensor]) -> Tensor:
        """[B, T] with gradient, zeros behind each row."""
        rows = []
        for prompt, response in zip(prompts, responses, strict=True):
            logits = self.model(torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(1, response.unsqueeze(1)).squeeze(1))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        loss.backward()
        return {name: value.grad.clone() for name, value in self.model.named_parameters()}

    @torch.no_grad()
    def greedy(self, prompt: Tensor, tokens: int) -> list[int]:
        ids = self.model.generate(
            prompt.unsqueeze(0), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=tokens
        )
        return ids[0, len(prompt) :].tolist()
