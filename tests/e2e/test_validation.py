"""A validation of a real run: a partial last batch, repeated prompts, several samples and outputs, and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlflow.observe.records import parse_trajectory

# Two outputs a session; prompt "fails" loses one session of its two.
AGENT_LOOP = """
from rlflow.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

@register("draft_and_final_for_test")
class DraftAndFinal(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        if kwargs["raw_prompt"][0]["content"] == "fails" and kwargs["session_id"] == 0:
            raise RuntimeError("this session fails")
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"])
        outputs = []
        for turn, tokens in enumerate((2, 4)):
            output = await self.server_manager.generate(
                request_id=f"{kwargs['uid']}_{kwargs['session_id']}",
                prompt_ids=prompt_ids,
                sampling_params={**sampling_params, "max_tokens": tokens},
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt_ids,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    response_logprobs=output.log_probs,
                    num_turns=2 + turn,
                    metrics=AgentLoopMetrics(),
                )
            )
        return outputs
"""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if ground_truth == "unscorable":
        raise ValueError("no idea")
    # What a user may return beside the score: numbers, text, nothing.
    info = {"score": float(len(ground_truth)), "acc": len(ground_truth) > 1, "pred": ground_truth, "note": "text"}
    info["odd"] = None if ground_truth == "7" else 2.0
    if ground_truth == "twelve":
        info["only_here"] = 5
    return info
"""


def write_validation(path: Path) -> None:
    questions = [
        ("1+6", "7", "a"),
        ("1+6", "7", "a"),
        ("6+6", "twelve", "b"),
        ("?", "unscorable", "b"),
        ("fails", "x", "c"),
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": question}],
            "data_source": source,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "test", "index": number},
        }
        for number, (question, truth, source) in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.timeout(200)
def test_nothing_is_dropped_and_nothing_is_nan(
    run_trainer: Callable[..., Any],
    tiny_overrides: list[str],
    read_metrics: Callable[[], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    write_validation(tmp_path / "val.parquet")
    (tmp_path / "loop.py").write_text(AGENT_LOOP)
    (tmp_path / "reward.py").write_text(REWARD)
    runner = run_trainer(
        [
            *tiny_overrides,
            f"actor_rollout_ref.model.external_lib={tmp_path}/loop.py",
            "actor_rollout_ref.rollout.agent.default_agent_loop=draft_and_final_for_test",
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            "data.val_batch_size=2",
            f"trainer.validation_data_dir={tmp_path}/val_dump",
            "trainer.log_val_generations=3",
            "trainer.trace.trajectories_per_step=7",
            "trainer.val_before_train=true",
            "trainer.val_only=true",
        ]
    )
    [line] = read_metrics()
    metrics = line["data"]
    assert line["step"] == 0 and runner.trainer.global_steps == 0
    assert all(value is not None and np.isfinite(value) for value in metrics.values())
    # Two prompts of source a with acc false, one of b with acc true and one without any valid sample, one of c.
    assert metrics["val-core/a/acc/mean@2"] == 0 and metrics["val-aux/a/reward/mean@2"] == 1.0
    assert metrics["val-core/b/acc/mean@2"] == 1 and metrics["val-aux/b/score/mean@2"] == 6.0
    assert metrics["val-aux/c/reward/mean@2"] == 1.0, "its other session failed, and still it is one of two"
    assert metrics["val-core/b/acc/maj@2/mean"] == 1 and metrics["val-core/a/acc/best@2/mean"] == 0
    assert metrics["val-aux/b/only_here/mean@2"] == 5 and metrics["val-aux/b/odd/worst@2/mean"] == 2
    assert not any("/note/" in name or "/pred/" in name or name.startswith("val-aux/a/odd") for name in metrics)
    assert metrics["val-aux/num_invalid"] == 2
    assert metrics["validation/rollout_failure/groups"] == metrics["validation/rollout_failure/sessions"] == 1
    assert metrics["val-aux/num_turns/mean"] == metrics["val-aux/num_turns/min"] == 3, "of the last outputs"

    rows = [json.loads(text) for text in (tmp_path / "val_dump" / "0.jsonl").read_text().splitlines()]
    assert len(rows) == (4 * 2 + 1) * 2, "five prompts, two samples of which one failed, two outputs"
    assert [row["uid"].rsplit("_", 1)[1] for row in rows] == ["0", "1"] * 9
    assert len({row["uid"].split("_")[0] for row in rows}) == 5, "a repeated prompt is a prompt of its own"
    columns = {"input", "output", "gts", "score", "step", "uid", "reward", "acc", "pred", "note", "odd", "only_here"}
    by_truth = {row["gts"]: row for row in rows}
    for row in rows:
        assert set(row) - {"invalid"} == columns
        assert row["reward"] == row["score"] == by_truth[row["gts"]]["score"]
    assert by_truth["7"]["odd"] is None and by_truth["7"]["only_here"] is None and by_truth["7"]["acc"] is False
    unscored = [row for row in rows if row["gts"] == "unscorable"]
    assert len(unscored) == 4
    assert all(row["score"] is None and "no idea" in row["invalid"] and row["acc"] is None for row in unscored)

    path = tmp_path / "checkpoints" / "trajectories" / "val_0.jsonl"
    records = [parse_trajectory(json.loads(text)) for text in path.read_text().splitlines()]
    assert len(records) == 4, "a second group of four rows would be over the limit of seven"
    for record in records:
        assert record is not None and record.partition == "val" and record.max_version == 0
        assert record.worker == "agent_loop_worker_0" and record.ended is not None
        assert len(record.series["rollout_log_probs"]) == len(record.response_ids) == len(record.response_tokens)
        assert "old_log_probs" not in record.series and record.lineage["responses"].writer == "agent_loop_worker_0"
