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
