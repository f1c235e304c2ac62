"""Which ranks exchange weights when a model goes from the training layout to the generation layout.

    training   p x t x d          rank = (pi * d + delta) * t + tau
    generation p_g x t_g x d_g x d,  d_g = (p * t) / (p_g * t_g)

With a = t / t_g and b = p / p_g, the rank (pi, delta, tau) has in generation the place pi_g = pi // b, tau_g = tau // a
and the number m = (pi % b) * a + tau % a among the d_g ranks (its *micro-DP group*) that hold the same part.

    1-4-2 -> 1-2-2-2, 8 ranks        ranks 0 1 2 3 | 4 5 6 7
    training tensor parallel               {0 1 2 3} {4 5 6 7}
    generation tensor parallel             {0 2} {1 3} {4 6} {5 7}
    micro-DP                               {0 1} {2 3} {4 5} {6 7}

The placement is that of HybridFlow (Sheng et al. 2024, section 5.3). A rank's training part lies inside its generation
part, so one all-gather within each micro-DP group completes the weights, and dropping the foreign pieces undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

Piece = tuple[int, int]
"""(pipeline stage, tensor-parallel slice) of the training layout: the unit of which all parts are made."""


@dataclass(frozen=True)
class HybridBytes:
    """What a change of layout costs, for a model whose weights split evenly; bytes.

    Attributes:
        received: by each rank, within its micro-DP group.
        total: by all ranks together.
        peak: of weights that a rank holds while it generates.
        full_gather: what a rank would receive if every rank gathered the whole model (FSDP's full gather).
        training_group_gather: the same within the training tensor x pipeline group only.
    """

    received: float
    total: float
    peak: float
    full_gather: float
    training_group_gather: float


@dataclass(frozen=True)
class HybridGroups:
    """The groups of a change of layout; every list of groups partitions the ranks.

    Attributes:
        gen_tp, gen_pp: ranks of each generation tensor / pipeline-parallel group, in the order of their place.
        micro_dp: ranks that hold the same part in generation, in the order of their number m.
        replica_of: replica of each rank; each of the d * d_g replicas is one whole model.
        train_piece: what each rank holds in training.
        gen_pieces: what each rank holds in generation.
        recv_pieces: per rank, (source rank, piece) of what it lacks. Own and received pieces, ordered by the source's
            number m, are the buffer of the all-gather.
    """

    p: int
    t: int
    d: int
    p_g: int
    t_g: int
    gen_tp: tuple[tuple[int, ...], ...]
    gen_pp: tuple[tuple[int, ...], ...]
    micro_dp: tuple[tuple[int, ...], ...]
    replica_of: tuple[int, ...]
    train_piece: tuple[Piece, ...]
    gen_pieces: tuple[tuple[Piece, ...], ...]
    recv_pieces: tuple[tuple[tuple[int, Piece], ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.p * self.t * self.d

    @property
    def d_g(self) -> int:
        """Size of a micro-DP group."""
        return (self.p * self.t) // (self.p_g * self.t_g)

    @property
    def micro_dp_of(self) -> list[int]:
        """Number of the micro-DP group of each rank."""
        number = {rank: i for i, group in enumerate(self.micro_dp) for rank in group}
        return [number[rank] for rank in range(self.world_size)]

    def slot_of(self, rank: int) -> tuple[int, int]:
        """(pi_g, tau_g): the place of a rank in its replica."""
        pi, tau = self.train_piece[rank]
        return pi // (self.p // self.p_g), tau // (self.t // self.t_g)

    def bytes(self, model_bytes: int) -> HybridBytes:
        """The formulas of the module for `model_bytes` of weights in the generation dtype."""
        train, gen = self.p * self.t, self.p_g * self.t_g
        received = model_bytes * (train - gen) / (train * gen)
        return HybridBytes(
            received=received,
            total=received * self.world_size,
            peak=model_bytes / gen,
            full_gather=model_bytes * (self.world_size - 1) / self.world_size,
            training_group_gather=model_bytes * (train - 1) / train,
        )


def plan_hybrid_groups(p: int, t: int, d: int, p_g: int, t_g: int) -> HybridGroups:
    """Groups for training with p pipeline stages x t tensor slices x d replicas and generation with p_g x t_g.

    Raises:
        ValueError: a size below one, or p_g does not divide p, or t_g does not divide t.
    """
    sizes = {"p": p, "t": t, "d": d, "p_g": p_g, "t_g": t_g}
    if bad := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"parallel sizes must be at least 1, got {bad}")
    if p % p_g or t % t_g:
        raise ValueError(
            f"generation with pipeline {p_g} x tensor {t_g} needs parts that training with pipeline {p} x tensor {t} "
            f"does not have: p_g must divide p, and t_g must divide t. Choose such sizes, or let every rank gather the "
            f"whole model"
        )
    a, b = t // t_g, p // p_g
    d_g = a * b
    pieces = tuple((pi, tau) for pi in range(p) for _ in range(d) for tau in range(t))

    def rank_at(pi_g: int, tau_g: int, delta: int, m: int) -> int:
        pi, tau = pi_g * b + m // a, tau_g * a + m % a
        return (pi * d + delta) * t + tau

    micro_dp = tuple(
        tuple(rank_at(pi_g, tau_g, delta, m) for m in range(d_g))
        for pi_g, tau_g, delta in product(range(p_g), range(t_g), range(d))
    )
    peers = {rank: group for group in micro_dp for rank in group}
    ranks = range(p * t * d)
    return HybridGroups(
        **sizes,
        gen_tp=tuple(
            tuple(rank_at(pi_g, tau_g, delta, m) for tau_g in range(t_g))
            for delta, m, pi_g in product(range(d), range(d_g), range(p_g))
        ),
        gen_pp=tuple(
            tuple(rank_at(pi_g, tau_g, delta, m) for pi_g in range(p_g))
            for delta, m, tau_g in product(range(d), range(d_g), range(t_g))
        ),
        micro_dp=micro_dp,
        replica_of=tuple((rank // t % d) * d_g + peers[rank].index(rank) for rank in ranks),
        train_piece=pieces,
        gen_pieces=tuple(tuple(pieces[peer] for peer in peers[rank]) for rank in ranks),
        recv_pieces=tuple(tuple((peer, pieces[peer]) for peer in peers[rank] if peer != rank) for rank in ranks),
    )
