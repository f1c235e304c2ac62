"""Checks of how ranks share weights, rows and tokens; and the number of parts that a batch is split into."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rlflow.workers.rollout.capabilities import CAPABILITIES

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"


def split_over(config: Any, needs_ref: bool, needs_critic: bool) -> int:
    """Parts of equally many rows that every engine of a run can take as they are.

    Args:
        config: the resolved tree.
        needs_ref: there is a reference policy.
        needs_critic: there is a critic.
    """
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    engines = [config.actor_rollout_ref.actor.fsdp_config]
    engines += [config.actor_rollout_ref.ref.fsdp_config] if needs_ref else []
    engines += [config.critic.fsdp] if needs_critic else []
    return math.lcm(*(max(1, ranks // engine.ulysses_sequence_parallel_size) for engine in engines))


def check_parallel(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Ulysses, HSDP and offloading of every engine."""
    ranks = c.trainer.n_gpus_per_node * c.trainer.nnodes
    engines: list[tuple[str, Any, Any, bool, int]] = [
        (f"{ACTOR}.fsdp_config", c.actor.fsdp_config, c.actor, c.model.use_remove_padding, ranks)
    ]
    if c.loads_ref:
        its_ranks = c.ref.n_gpus_per_node * c.ref.nnodes if c.ref.enable_resource_pool else ranks
        engines.append((f"{REF}.fsdp_config", c.ref.fsdp_config, c.ref, c.model.use_remove_padding, its_ranks))
    if c.needs_critic:
        engines.append(("critic.fsdp", c.critic.fsdp, c.critic, c.critic.model.use_remove_padding, ranks))
    for key, engine, role, packs, size in engines:
        if size > 0:  # else another check has said it
            problems.extend(_sequence(key, engine, role, packs, size))
            problems.extend(_shards(key, engine.fsdp_size, size))
        if engine.grad_offload and not engine.param_offload:
            problems.append(
                f"{key}.grad_offload=true without param_offload: gradients live where their parameters are.\n"
                f"    try:    {key}.param_offload=true"
            )
    problems.extend(_replicas(c, ranks))


def _replicas(c: TypedConfig, ranks: int) -> list[str]:
    """A rollout replica takes whole groups of the run's devices; the embedded engine takes one each."""
    rollout = c.rollout
    sizes = {name: getattr(rollout, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "data")}
    wrong = [name for name, size in sizes.items() if size < 1]
    if wrong:
        return [
            f"{ROLLOUT}.{name}_parallel_size={sizes[name]} must be at least 1.\n"
            f"    try:    {ROLLOUT}.{name}_parallel_size=1"
            for name in wrong
        ]
    devices = math.prod(sizes.values())
    row = CAPABILITIES.get(rollout.name)  # an unknown engine has been named by another check
    if row is None or not row.tensor_parallel or ranks < 1 or ranks % devices == 0:
        return []
    tensor, others = sizes["tensor_model"], devices // sizes["tensor_model"]
    fitting = max((n for n in range(1, ranks + 1) if n <= tensor and ranks % (n * others) == 0), default=1)
    return [
        f"{ROLLOUT}.tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={sizes['pipeline_model']} x "
        f"data_parallel_size={sizes['data']} = {devices} devices a replica, which does not divide the {ranks} of "
        f"trainer.n_gpus_per_node x nnodes.\n    try:    {ROLLOUT}.tensor_model_parallel_size={fitting}"
    ]


def _sequence(key: str, engine: Any, role: Any, packs: bool, ranks: int) -> list[str]:
    size, outer = engine.ulysses_sequence_parallel_size, role.ulysses_sequence_parallel_size
    inner_name = f"{key}.ulysses_sequence_parallel_size"
    outer_name = f"{key.rpartition('.')[0]}.ulysses_sequence_parallel_size"
    if outer not in (1, size):
        return [
            f"{outer_name}={outer} and {inner_name}={size} differ.\n    try:    leave the second unset: it follows the "
            "first"
        ]
    name = outer_name if outer == size else inner_name  # the one that was set
    if size < 1 or ranks % size:
        fitting = max((n for n in range(1, ranks + 1) if ranks % n == 0 and n <= size), default=1)
        return [f"{name}={size} does not divide {_ranks(key, ranks)}.\n    try:    {name}={fitting}"]
    if size > 1 and not packs:
        role_name, model = (
            ("critic", "critic.model") if key == "critic.fsdp" else ("actor/ref", "actor_rollout_ref.model")
        )
        return [
            f"{name}={size}: When using sequence parallelism for {role_name}, you must enable `use_remove_padding`: "
            f"packed rows are what is split.\n    try:    {model}.use_remove_padding=true"
        ]
    return []


def _shards(key: str, size: int, ranks: int) -> list[str]:
    if size == -1 or size >= ranks or (size > 0 and ranks % size == 0):
        return []
    fitting = max((n for n in range(1, ranks + 1) if ranks % n == 0 and n <= size), default=-1)
    return [f"{key}.fsdp_size={size} does not divide {_ranks(key, ranks)}.\n    try:    {key}.fsdp_size={fitting}"]


def _ranks(key: str, ranks: int) -> str:
    return f"the {ranks} ranks of the {'reference' if key.startswith(REF) else 'run'}"
