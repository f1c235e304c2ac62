"""Which stage of a step reads and writes which fields of the TransferQueue.

Worker methods declare it with `@register(reads=, writes=)`; the agent loop and the controller's advantage stage declare
it here. From one table come the check at start-up that somebody writes every field before it is read, the `stages` of
the journal (and so "who reads this field next" in `rlflow trace`), and the table in the docs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlflow.agent_loop.rows import ROW_FIELDS
from rlflow.single_controller.base.decorator import MAGIC_ATTR
from rlflow.utils.errors import ContractError

# stage -> (the role whose workers do it, their method), in the order of a step.
WORKER_STAGES = {
    "old_log_prob": ("actor", "compute_log_prob"),
    "ref": ("ref", "compute_ref_log_prob"),
    "values": ("critic", "compute_values"),
    "update_critic": ("critic", "update_critic"),
    "update_actor": ("actor", "update_actor"),
}
ORDER = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


@dataclass(frozen=True)
class StageFields:
    """What one stage reads and writes; names of fields.

    Fields:
        group: the role whose workers compute it, "controller" or "agent_loop".
        method: what is called.
        optional_reads: read where they are there.
    """

    stage: str
    group: str
    method: str
    reads: tuple[str, ...] = ()
    optional_reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


def stage_table(
    worker_classes: dict[str, type],
    *,
    with_log_probs: bool = True,
    reward_after: bool = False,
    kl_in_reward: bool = False,
    sum_pi_squared: bool = False,
    corrected: tuple[str, ...] = (),
    bypassed: bool = False,
    fused: bool = False,
    estimator_needs: tuple[str, ...] = (),
    estimator_reads: tuple[str, ...] | None = None,
) -> list[StageFields]:
    """The stages of a step in their order.

    Args:
        worker_classes: role ("actor", "ref", "critic") -> class of its workers; a role that is missing has no stages.
        with_log_probs: whether the rollout reports log-probs.
        reward_after: a colocated reward model scores the batch after sampling, nobody while sessions run.
        kl_in_reward: whether the controller subtracts a KL penalty from the reward.
        sum_pi_squared: whether the log-prob pass is asked for it.
        corrected: fields that rollout correction writes after the log-prob pass.
        bypassed: the rollout's log-probs are copied; there is no log-prob pass.
        fused: the policy's update gives the old log-probs; there is no log-prob pass.
        estimator_needs: fields that the advantage estimator cannot do without.
        estimator_reads: fields that the advantage stage reads where they are there; None: all there can be.
    """
    left_out = (() if with_log_probs else ("rollout_log_probs",)) + (("rm_scores",) if reward_after else ())
    stages = {
        "gen": StageFields(
            "gen", "agent_loop", "generate_sequences", writes=tuple(f for f in ROW_FIELDS if f not in left_out)
        ),
        "adv": _advantage_stage(kl_in_reward, estimator_needs, estimator_reads),
    }
    if reward_after:
        stages["reward"] = _reward_stage()
    for stage, (role, method) in WORKER_STAGES.items():
        if role in worker_classes:
            stages[stage] = _worker_stage(stage, role, method, worker_classes[role])
    if bypassed:
        stages["old_log_prob"] = StageFields(
            "old_log_prob",
            "controller",
            "copy_rollout_log_probs",
            reads=("rollout_log_probs",),
            writes=("old_log_probs",),
        )
    elif "old_log_prob" in stages:
        stages["old_log_prob"] = _log_prob_stage(stages["old_log_prob"], sum_pi_squared, corrected)
    if fused:
        del stages["old_log_prob"]
    if "update_actor" in stages:
        stages["update_actor"] = _update_stage(stages["update_actor"], fused)
    return [stages[stage] for stage in ORDER if stage in stages]


def _reward_stage() -> StageFields:
    from rlflow.trainer.ppo.colocated_rewards import OPTIONAL_READS, READS, WRITES

    return StageFields("reward", "controller", "compute_rm_score", READS, OPTIONAL_READS, WRITES)


def _worker_stage(stage: str, role: str, method: str, worker_class: type) -> StageFields:
    declared = getattr(getattr(worker_class, method), MAGIC_ATTR)
    return StageFields(
        stage,
        role,
        method,
        reads=declared["reads"] or (),
        optional_reads=declared["optional_reads"] or (),
        writes=(*(declared["writes"] or ()), *(declared["optional_writes"] or ())),
    )


def _log_prob_stage(declared: StageFields, sum_pi_squared: bool, corrected: tuple[str, ...]) -> StageFields:
    """The log-prob pass of the workers, and what the controller makes of it for rollout correction."""
    writes = tuple(name for name in declared.writes if name != "sum_pi_squared" or sum_pi_squared)
    reads = ("response_mask", "rollout_log_probs") if corrected else ()
    return replace(declared, reads=(*declared.reads, *reads), writes=(*writes, *corrected))


def _update_stage(declared: StageFields, fused: bool) -> StageFields:
    """The policy's update, which reads the old log-probs or gives them."""
    given = declared.writes
    if fused:
        return replace(declared, optional_reads=tuple(name for name in declared.optional_reads if name not in given))
    old = tuple(name for name in given if name in declared.optional_reads)
    return replace(
        declared,
        reads=(*declared.reads, *old),
        optional_reads=tuple(name for name in declared.optional_reads if name not in old),
        writes=(),
    )


def _advantage_stage(
    kl_in_reward: bool, estimator_needs: tuple[str, ...], estimator_reads: tuple[str, ...] | None
) -> StageFields:
    from rlflow.trainer.ppo.advantage import OPTIONAL_FIELDS

    reads = OPTIONAL_FIELDS if estimator_reads is None else estimator_reads
    return StageFields(
        "adv",
        "controller",
        "compute_advantage",
        reads=("response_mask", "rm_scores", *estimator_needs),
        optional_reads=tuple(name for name in reads if name not in estimator_needs),
        writes=("advantages", "returns", *(("token_level_rewards",) if kl_in_reward else ())),
    )


def check_stage_table(stages: Sequence[StageFields]) -> None:
    """Every field that a stage needs is written by an earlier one.

    Raises:
        ContractError: names stage, field, and what is there.
    """
    written: set[str] = set()
    for stage in stages:
        missing = [name for name in stage.reads if name not in written]
        if missing:
            raise ContractError(
                f"stage {stage.stage} ({stage.group}.{stage.method}) reads {', '.join(missing)}, which no earlier "
                f"stage writes. Written before it: {', '.join(sorted(written)) or 'nothing'}. Declare the field in the "
                "@register(writes=...) of the method that makes it, or list it under optional_reads."
            )
        written.update(stage.writes)


def markdown_table(stages: Sequence[StageFields]) -> str:
    """Fields by stages for the docs: w = written, r = read, (r) = read where it is there."""
    fields = list(dict.fromkeys(f for s in stages for f in (*s.writes, *s.reads, *s.optional_reads)))
    lines = [
        "| field | " + " | ".join(s.stage for s in stages) + " |",
        "|---|" + "---|" * len(stages),
    ]
    lines += [f"| `{field}` | " + " | ".join(use_of(stage, field) for stage in stages) + " |" for field in fields]
    return "\n".join(lines)


def use_of(stage: StageFields, field: str) -> str:
    """What a stage does with a field: "w", "r", "(r)" where it is there, both, or nothing."""
    marks = ["w"] if field in stage.writes else []
    marks += ["r"] if field in stage.reads else ["(r)"] if field in stage.optional_reads else []
    return " ".join(marks)
