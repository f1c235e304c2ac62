"""From logits to tokens, for a batch whose rows have different settings.

Invariants
    - A row's token depends on its own logits, settings, seed and position alone: its random number is a hash of
      (seed, position), never a draw from a generator shared with the rest of the batch.
    - Log-probabilities belong to the distribution that was sampled from: after temperature, top-k and top-p. Without
      truncation that is `log_softmax(logits / T)`. Greedy rows report `log_softmax(logits)`.
    - Maths is fp32 or better. The vocabulary is sorted only for rows that truncate it.

Order of operations: repetition penalty, temperature, top-k, top-p.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# The inverse CDF is found in two levels, so that sums stay short (exact) and no cumulative sum of the whole
# vocabulary is written.
_BLOCK = 256
# Candidates taken by a partial sort for top-p; rows that need more are sorted as a whole.
_CANDIDATES = 1024

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed uint64 [n], position int64 [n]); float64 [n].

    The finaliser of splitmix64 (Steele, Lea, Flood 2014) over the seed, then over seed and position.
    """
    z = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_A
    z = (z ^ (z >> np.uint64(27))) * _MIX_B
    return z ^ (z >> np.uint64(31))


class RowSettings:
    """Sampling settings of the slots, as arrays; `compile(n)` prepares those of the slots `0..n-1` for `sample`."""

    def __init__(self, slots: int) -> None:
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)  # 0 = all
        self.top_p = np.ones(slots, dtype=np.float32)
        self.penalty = np.ones(slots, dtype=np.float32)

    def put(self, slot: int, seed: int, temperature: float, top_k: int, top_p: float, penalty: float) -> None:
        """Settings of a new sequence. `temperature` 0 means greedy; `top_k` <= 0 means all."""
        self.seed[slot] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF)
        self.temperature[slot], self.top_k[slot] = temperature, max(top_k, 0)
        self.top_p[slot], self.penalty[slot] = top_p, penalty

    def move(self, source: int, target: int) -> None:
        """The sequence of slot `source` now lives in slot `target`."""
        for array in (self.seed, self.temperature, self.top_k, self.top_p, self.penalty):
            array[target] = array[source]

    def compile(self, n: int, vocab_size: int, device: torch.device) -> CompiledSettings:
        """What `sample` needs of the slots `0..n-1`."""
        greedy = self.temperature[:n] == 0
        scale = np.where(greedy, np.float32(1), 1 / np.maximum(self.temperature[:n], np.float32(1e-6)))
        top_k = np.where(self.top_k[:n] >= vocab_size, 0, self.top_k[:n])
        cuts = ~greedy & ((top_k > 0) | (self.top_p[:n] < 1))

        def rows(mask: np.ndarray) -> Tensor | None:
            return torch.from_numpy(np.flatnonzero(mask)).to(device) if mask.any() else None

        return CompiledSettings(
            seed=self.seed[:n].copy(),
            scale=torch.from_numpy(scale.astype(np.float32)).to(device)[:, None] if (scale != 1).any() else None,
            greedy=rows(greedy),
            cut=rows(cuts),
            cut_top_k=torch.from_numpy(top_k[cuts]).to(device),
            cut_top_p=torch.from_numpy(self.top_p[:n][cuts].astype(np.float64)).to(device),
            penalised=np.flatnonzero(self.penalty[:n] != 1).tolist(),
            penalty=self.penalty[:n].copy(),
        )


class CompiledSettings:
    """Settings of one composition of the batch; None and empty where no row asks for the feature."""

    __slots__ = ("cut", "cut_top_k", "cut_top_p", "greedy", "penalised", "penalty", "scale", "seed")

    def __init__(
        self,
        *,
        seed: np.ndarray,
        scale: Tensor | None,
        greedy: Tensor | None,
        cut: Tensor | None,
        cut_top_k: Tensor,
        cut_top_p: Tensor,
        penalised: list[int],
        penalty: np.ndarray,
    ) -> None:
        self.seed, self.scale, self.greedy = seed, scale, greedy
        self.cut, self.cut_top_k, self.cut_top_p = cut, cut_top_k, cut_top_p
        self.penalised, self.penalty = penalised, penalty


def sample(
    logits: Tensor, settings: CompiledSettings, positions: np.ndarray, seen: list[list[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Next token of each row.

    Args:
        logits: [n, vocab], any float type; an fp32 tensor may be overwritten.
        settings: of the same n rows.
        positions: int64 [n], position of the token to be sampled in its sequence.
        seen: tokens of each row so far; needed by rows with a repetition penalty.

    Returns:
        tokens int64 [n] and their log-probabilities fp32 [n].
    """
    logits = logits.float()
    if settings.penalised:
        assert seen is not None, "rows with a repetition penalty need their tokens"
        _penalise(logits, settings, seen)
    if settings.scale is not None:
        logits.mul_(settings.scale)
    probs = torch.softmax(logits, dim=-1)
    u = torch.from_numpy(uniform(settings.seed, positions)).to(logits.device)
    tokens = _inverse_cdf(probs, u)
    if settings.greedy is not None:
        tokens[settings.greedy] = logits[settings.greedy].argmax(dim=-1)
    log_probs = probs.gather(1, tokens[:, None])[:, 0].log()
    if settings.cut is not None:
        tokens[settings.cut], log_probs[settings.cut] = _sample_truncated(
            probs[settings.cut], settings.cut_top_k, settings.cut_top_p, u[settings.cut]
        )
    return tokens, log_probs


def _penalise(logits: Tensor, settings: CompiledSettings, seen: list[list[int]]) -> None:
    """Keskar et al. 2019: divide positive and multiply negative logits of tokens that occurred already."""
    for row in settings.penalised:
        ids = torch.tensor(seen[row], device=logits.device).unique()
        values, penalty = logits[row, ids], float(settings.penalty[row])
        logits[row, ids] = torch.where(values > 0, values / penalty, values * penalty)


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds `u`. probs [n, vocab], u float64 [n] -> int64 [n]."""
    vocab = probs.shape[1]
    whole = vocab - vocab % _BLOCK
    blocks = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    if whole < vocab:
        blocks = torch.cat([blocks, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    block, rest = _pick(blocks.double(), u * 1.0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).double().masked_fill(columns >= vocab, 0.0)
    # The two levels add the same numbers in different orders; `rest` is a share of the block, so that the last bits
    # cannot push it out of the block.
    index, _ = _pick(inside, rest)
    return block * _BLOCK + index


def _pick(weights: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Choose an entry of each row with probability proportional to `weights` [n, m] (float64), by `share` in [0, 1).

    Returns the index [n] and how far into the entry the share points, again in [0, 1). An entry of weight zero is
    never chosen.
    """
    cumulative = weights.cumsum(dim=1)
    target = share * cumulative[:, -1]
    # share < 1 and rounding to nearest can still give target == total; step back below it.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)[:, 0]
    below = cumulative.gather(1, index)[:, 0] - weight
    inside = ((target - below) / weight.clamp(min=1e-300)).clamp(0.0, 1.0 - 2.0**-53)
    return index[:, 0], inside


def _sample_truncated(probs: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Rows with top-k (0 = all) or top-p: sample among the likeliest tokens. probs [m, vocab] -> tokens, log-probs."""
    vocab = probs.shape[1]
    needs_mass = top_k == 0  # no top-k: the candidates must hold the mass top_p
    width = min(vocab, max(int(top_k.max()), _CANDIDATES if bool(needs_mass.any()) else 1))
    while True:
        values, ids = probs.topk(width, dim=-1)  # sorted
        values = values.double()
        held = values.sum(-1)
        if width == vocab or not bool((needs_mass & (held < top_p)).any()):
            break
        width = vocab
    rank = torch.arange(width, device=probs.device)
    values = values.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0.0)
    # top-p is a share of what top-k left; without top-k of the whole vocabulary.
    total = torch.where(needs_mass, probs.sum(-1, dtype=torch.float64), values.sum(-1))
    before = values.cumsum(-1) - values
    values = values.masked_fill((before >= top_p[:, None] * total[:, None]) & (rank > 0), 0.0)
    index, _ = _pick(values, u)
    chosen = values.gather(1, index[:, None])[:, 0]
    return ids.gather(1, index[:, None])[:, 0], (chosen.log() - values.sum(-1).log()).float()
