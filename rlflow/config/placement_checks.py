"""Checks of the reference's place: a pool of its own must exist, and its ranks must divide the rows of a mini-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlflow.config import problems as problem

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

REF = "actor_rollout_ref.ref"


def check_reference_place(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """`ref.enable_resource_pool`, where there is a reference."""
    if not c.ref.enable_resource_pool:
        return
    if not c.needs_ref:
        notices.append(
            f"{REF}.enable_resource_pool=true has no effect: no KL asks for a reference (actor.use_kl_loss, "
            "algorithm.use_kl_in_reward)"
        )
        return
    if c.model.uses_lora:
        notices.append(
            f"{REF}.enable_resource_pool=true has no effect: a policy that trains an adapter is its own reference, "
            "with the adapter off"
        )
        return
    found = problem.below(f"{REF}.nnodes", c.ref.nnodes, 1)
    found += problem.below(f"{REF}.n_gpus_per_node", c.ref.n_gpus_per_node, 1)
    ranks, rows = c.ref.n_gpus_per_node * c.ref.nnodes, c.actor.ppo_mini_batch_size * c.rollout.n
    share = max(1, c.ref.fsdp_config.ulysses_sequence_parallel_size)
    if not found and rows % max(1, ranks // share):
        shared = f", of which {share} share a row," if share > 1 else ""
        found.append(
            f"{REF}.n_gpus_per_node x nnodes = {ranks} ranks{shared} do not divide the {rows} rows of a mini-batch "
            "(actor.ppo_mini_batch_size x rollout.n): batches would be filled up with rows that train nothing.\n"
            f"    try:    {REF}.n_gpus_per_node=1 {REF}.nnodes=1, or a number of ranks that divides {rows}"
        )
    problems.extend(found)
