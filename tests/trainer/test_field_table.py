"""The table of stages and fields, from the declarations of the real workers."""

from __future__ import annotations

import pytest

from rlflow.single_controller.base import Worker, mesh, register
from rlflow.trainer.ppo.field_table import check_stage_table, markdown_table, stage_table
from rlflow.utils.errors import ContractError
from rlflow.workers.engine_workers import ActorRolloutRefWorker


def test_the_declarations_of_the_built_in_workers_fit_together() -> None:
    stages = stage_table({"actor": ActorRolloutRefWorker, "ref": ActorRolloutRefWorker}, kl_in_reward=True)
    check_stage_table(stages)
    assert [stage.stage for stage in stages] == ["gen", "old_log_prob", "ref", "adv", "update_actor"]
    table = markdown_table(stages)
    row = next(line for line in table.splitlines() if line.startswith("| `old_log_probs`"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["", "w", "", "(r)", "r"]


def test_a_fused_update_writes_what_the_log_prob_pass_would() -> None:
    stages = {stage.stage: stage for stage in stage_table({"actor": ActorRolloutRefWorker}, fused=True)}
    check_stage_table(list(stages.values()))
    assert "old_log_prob" not in stages
    assert stages["update_actor"].writes == ("old_log_probs", "entropy")
    assert "old_log_probs" not in (*stages["update_actor"].reads, *stages["update_actor"].optional_reads)
    apart = {stage.stage: stage for stage in stage_table({"actor": ActorRolloutRefWorker})}
    assert "old_log_probs" in apart["update_actor"].reads and apart["update_actor"].writes == ()


def test_the_table_knows_what_a_run_adds_and_what_its_estimator_needs() -> None:
    workers = {"actor": ActorRolloutRefWorker}
    needs = ("old_log_probs", "sum_pi_squared")
    corrected = ("rollout_is_weights", "response_mask")
    stages = stage_table(workers, sum_pi_squared=True, corrected=corrected, estimator_needs=needs)
    check_stage_table(stages)
    log_prob = stages[1]
    assert log_prob.writes == ("old_log_probs", "entropy", "sum_pi_squared", *corrected)
    assert {"rollout_log_probs", "response_mask"} <= set(log_prob.reads)
    assert "sum_pi_squared" not in stage_table(workers)[1].writes
    with pytest.raises(ContractError, match="adv.*reads sum_pi_squared"):
        check_stage_table(stage_table(workers, estimator_needs=needs))
    with pytest.raises(ContractError, match="old_log_prob.*reads rollout_log_probs"):
        check_stage_table(stage_table(workers, corrected=corrected, with_log_probs=False))


def test_in_bypass_mode_the_controller_copies_log_probs() -> None:
    stages = stage_table({"actor": ActorRolloutRefWorker}, bypassed=True)
    check_stage_table(stages)
    assert (stages[1].stage, stages[1].group, stages[1].writes) == ("old_log_prob", "controller", ("old_log_probs",))


def test_a_field_that_nobody_writes_is_named_before_anything_runs() -> None:
    class Asking(Worker):
        @register(
            dispatch_mode=mesh("actor"), reads=("input_ids", "router_logits"), writes=("old_log_probs", "entropy")
        )
        def compute_log_prob(self, data): ...

        @register(dispatch_mode=mesh("actor"), reads=("advantages",))
        def update_actor(self, data): ...

    with pytest.raises(ContractError, match=r"old_log_prob.*reads router_logits") as problem:
        check_stage_table(stage_table({"actor": Asking}))
    assert "optional_reads" in str(problem.value)
