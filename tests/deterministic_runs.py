"""Runs of the tiny model with `rollout.full_determinism`, and what is compared of two of them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlflow.observe.journal import read_lines

_composing = threading.Lock()
# Figures of the clock and of memory; everything else of two runs must be equal.
MEASURED = re.compile(r"timing_|(.*/)?perf/|weight_sync/(seconds|\w+_s)$|agent_loop/")

REWARD = """
import random, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    time.sleep(random.SystemRandom().uniform(0, 0.02))
    score = float(len(solution_str) % 3)
    return {"score": score, "acc": float(score > 0)}
"""

# Two turns with a tool between them. The pauses make arrivals differ from run to run.
LOOPS = """
import asyncio, random

from rlflow.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

@register("two_turns_for_test")
class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        chance = random.SystemRandom()
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        ids, mask, log_probs = [], [], []
        for turn in range(2 if kwargs["session_id"] else 1):
            await asyncio.sleep(chance.uniform(0, 0.03))
            output = await self.server_manager.generate(
                request_id=f"talk {chance.random()}",
                prompt_ids=prompt + ids,
                sampling_params={**sampling_params, "max_tokens": 6},
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            if turn == 0 and kwargs["session_id"]:
                ids, mask, log_probs = ids + [70, 71], mask + [0, 0], log_probs + [0.0, 0.0]
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids, response_mask=mask, response_logprobs=log_probs,
            num_turns=4, metrics=AgentLoopMetrics(),
        )
"""


def write_inputs(folder: Path, prompts: int) -> None:
    """Data of different lengths, a reward and an agent loop."""
    for name, count in (("train", prompts), ("val", 3)):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{'1+' * (number % 5)}{number}"}],
                "data_source": "tiny/sums",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number)},
                "extra_info": {"split": name, "index": number},
            }
            for number in range(count)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "loops.py").write_text(LOOPS)


def overrides(inputs: Path, model: Path, run: Path) -> list[str]:
    """Command line of a short deterministic run that uses all that could make two runs differ."""
    return [
        f"data.train_files={inputs}/train.parquet",
        f"data.val_files={inputs}/val.parquet",
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.external_lib=[{inputs}/loops.py]",
        f"reward.custom_reward_function.path={inputs}/reward.py",
        f"trainer.default_local_dir={run}",
        f"trainer.rollout_data_dir={run}/rollouts",
        f"trainer.validation_data_dir={run}/validation",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[console]",
        "trainer.project_name=tiny",
        "trainer.experiment_name=run",
        "trainer.stall_timeout_s=120",
        "trainer.val_before_train=false",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=64",
        "data.max_response_length=14",
        "data.seed=3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.full_determinism=true",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns_for_test",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=160",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    ]


def start(*commands: list[str]) -> None:
    """Run as the launcher does, on the Ray of this process; several command lines at the same time."""
    from rlflow.trainer.main_ppo import prepare_config, run_ppo

    with _composing:  # Hydra has one state a process
        configs = [prepare_config(overrides) for overrides in commands]
    with ThreadPoolExecutor(len(configs)) as pool:
        for ended in [pool.submit(run_ppo, config) for config in configs]:
            ended.result()


def record(run: Path, step: int) -> dict[str, Any]:
    """All of a run that must repeat: {what: value}; checkpoint files by their hashes."""
    folder = run / f"global_step_{step}"
    found: dict[str, Any] = {
        path.relative_to(run).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    for line in read_lines(run / "metrics.jsonl"):
        numbers = {name: value for name, value in line["data"].items() if not MEASURED.match(name)}
        assert numbers and f"metrics of step {line['step']}" not in found
        found[f"metrics of step {line['step']}"] = numbers
    for kind in ("rollouts", "validation"):
        for path in sorted((run / kind).glob("*.jsonl")):
            found[f"{kind} {path.name}"] = path.read_text()
    for path in sorted((run / "trajectories").glob("*.jsonl")):
        for line in read_lines(path):
            found[f"trajectory {path.stem} {line['key']}"] = without_clock(line)
    best = json.loads((run / "best_checkpoint.json").read_text())
    found["best"] = {name: value for name, value in best.items() if name != "path"}
    return found


def without_clock(trajectory: dict[str, Any]) -> dict[str, Any]:
    """A trajectory's record without the times in it."""
    lineage = {field: {**by, "time": None} for field, by in trajectory["lineage"].items()}
    timed = ("started", "ended", "timings")
    return {name: value for name, value in trajectory.items() if name not in timed} | {"lineage": lineage}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of what is not equal; for numbers with their values."""
    told = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            told += [f"{name}: {key} {one.get(key)} {other.get(key)}" for key in sorted(one.keys() | other.keys())
                     if one.get(key) != other.get(key)]  # fmt: skip
        else:
            told.append(f"{name}" + ("" if one and other else " is missing"))
    return told
