"""Writes run folders as a run would, with what can go wrong; by the schema that `rlflow.observe.records` reads."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_796_040_000.0
STEP_S = 20.0
GEN_S = 8.0
ROW_FIELDS = [
    "prompts",
    "responses",
    "input_ids",
    "position_ids",
    "response_mask",
    "uid",
    "rollout_log_probs",
    "rm_scores",
]
FORWARD = (["input_ids", "responses"], ["position_ids"])
UPDATE = ["input_ids", "responses", "response_mask", "old_log_probs", "advantages"]
STAGES: list[tuple[str, str, str, list[str], list[str], list[str]]] = [
    ("gen", "agent_loop", "generate_sequences", [], [], ROW_FIELDS),
    ("old_log_prob", "actor", "compute_log_prob", *FORWARD, ["old_log_probs", "entropy"]),
    ("ref", "ref", "compute_ref_log_prob", *FORWARD, ["ref_log_prob"]),
    ("adv", "controller", "compute_advantage", ["response_mask", "rm_scores"], [], ["advantages", "returns"]),
    ("update_actor", "actor", "update_actor", UPDATE, ["ref_log_prob"], []),
]
STAGE_S = {"old_log_prob": 2.0, "ref": 1.5, "adv": 0.2, "update_actor": 4.0, "update_weights": 0.6}
# What a model may say: markup, scripts, terminal escapes, bidirectional overrides, NUL, a lone surrogate.
HOSTILE = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror='window.pwned=2'>",
    "\x1b[31mred\x1b[0m \x07",
    "a\u202eevil\u202c b\u2066c\u2069",
    "NUL \x00 and \ud83d alone",
    "{{ 7*7 }} {% raw %} [bold]x[/bold]",
    "javascript:window.pwned=3",
    "\u2028line\u2029sep",
]
SENTENCES = [
    "Let me add the two numbers: 12 plus 30 is 42.\nSo the answer is 42.",
    "We have 7 apples and eat 2, which leaves 5. Antwort: fünf ✓ 数は五です 👩‍🚀",
    "First, multiply. Then subtract the remainder; the result is -3.",
]


class RunWriter:
    """A run folder, line by line.

    Args:
        folder: made when missing.
        seed: everything random follows from it.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        (folder / "trajectories").mkdir(parents=True, exist_ok=True)
        self.now = START

    # ----- lines --------------------------------------------------------------------------------------------------

    def event(self, event: str, step: int, *, time: float | None = None, **facts: Any) -> None:
        self.append("events.jsonl", {"event": event, "time": self.now if time is None else time, "step": step, **facts})

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(finite(line), ensure_ascii=False) + "\n")

    def start(self, total_steps: int, resumed_from: int | None = None) -> None:
        names = ("stage", "group", "method", "reads", "optional_reads", "writes")
        self.event(
            "run_started", resumed_from or 0, run_id="20261130-120000-abc123", rlflow="0.1.0", total_steps=total_steps,
            resumed_from=resumed_from, world_size=2, stages=[dict(zip(names, stage, strict=True)) for stage in STAGES],
        )  # fmt: skip

    # ----- a step -------------------------------------------------------------------------------------------------

    def step(
        self, step: int, uids: list[str], *, sessions: int = 3, dropped: str | None = None, tokens: int = 12
    ) -> None:
        """One whole step from `issued` to the new weights; `dropped` names a prompt all of whose sessions failed."""
        begin = self.now
        self.event("issued", step, partition="train", uids=uids, sessions=sessions, version=step - 1)
        gen_end = begin + GEN_S
        rows = []
        for number, uid in enumerate(uids):
            end = begin + GEN_S * (number + 1) / len(uids)
            failed = uid == dropped
            self.event(
                "finished", step, time=end, partition="train", uid=uid, status="failure" if failed else "finished",
                sessions_failed=sessions if failed else 0, reason="RewardError: its process died" if failed else None,
            )  # fmt: skip
            if not failed:
                rows += [self.row(uid, s, step, "train", begin, end, tokens) for s in range(sessions)]
        self.stage("gen", step, begin, gen_end, len(rows), ROW_FIELDS, [])
        if dropped:
            self.event("dropped", step, time=gen_end, uids=[dropped], reason="all sessions failed: RewardError")
        self.now = gen_end
        for stage, _, _, reads, optional, writes in STAGES[1:]:
            self.now += 0.05
            end = self.now + STAGE_S[stage]
            self.stage(stage, step, self.now, end, len(rows), writes, [*reads, *optional])
            for row in rows:
                row["lineage"].update({name: lineage(f"{stage}_worker_0", end, step - 1) for name in writes})
            self.now = end
        kept = [uid for uid in uids if uid != dropped]
        self.event("trained", step, uids=kept, rows=len(rows), version=step)
        end = self.now + STAGE_S["update_weights"]
        self.stage("update_weights", step, self.now, end, 0, [], [])
        self.now = end
        self.event("weights", step, version=step, tensors=21, bytes=1_048_576, seconds=0.6, replicas=1)
        advantages(rows)
        for row in rows:
            self.append(f"trajectories/{step}.jsonl", row)
        self.metrics(step, rows)
        self.now = begin + STEP_S

    def validate(self, step: int, prompts: int = 2) -> None:
        begin = self.now
        uids = [f"v{step}r{row}a0" for row in range(prompts)]
        self.event("issued", step, partition="val", uids=uids, sessions=1, version=step)
        rows = []
        for uid in uids:
            self.event(
                "finished", step, time=begin + 1.5, partition="val", uid=uid, status="finished", sessions_failed=0
            )
            row = self.row(uid, 0, step, "val", begin, begin + 1.5, 8)
            rows.append({name: value for name, value in row.items() if name not in TRAINED_ONLY})
        self.now = begin + 2
        self.stage("testing", step, begin, self.now, len(rows), [], [])
        metrics = {"val-core/tiny/sums/acc/mean@1": 0.25 + step / 100, "val-aux/num_turns/mean": 2.0}
        self.event("validated", step, metrics={"val-core/tiny/sums/acc/mean@1": 0.25 + step / 100})
        self.append("metrics.jsonl", {"step": step, "data": metrics})
        for row in rows:
            self.append(f"trajectories/val_{step}.jsonl", row)

    def stage(self, stage: str, step: int, start: float, end: float, rows: int, writes: Any, reads: Any) -> None:
        facts: dict[str, Any] = {"stage": stage, "start": start, "end": end, "rows": rows, "version": max(0, step - 1)}
        self.event("stage", step, time=end, **facts, reads=list(reads), writes=list(writes))

    # ----- a trajectory -------------------------------------------------------------------------------------------

    def row(
        self, uid: str, session: int, step: int, partition: str, begin: float, end: float, count: int
    ) -> dict[str, Any]:
        rng = self.random
        text = rng.choice(SENTENCES)
        pieces = pieces_of(text, count)
        rollout = [-abs(rng.gauss(0.4, 0.6)) for _ in pieces]
        old = [value + rng.gauss(0, 0.01) for value in rollout]
        started = begin + rng.random()
        reward = float(rng.random() < 0.4 + step / 120)
        prompt = ["<|user|>", "What", " is", f" {12 + session * 0}", "+", "30", "?", "\n", "<|assistant|>"]
        writer = f"agent_loop_worker_{session % 2}"
        fields = [name for name in ROW_FIELDS if name != "uid"]
        scores = [0.0] * (len(pieces) - 1) + [reward]
        return {
            "key": f"{uid}_{session}_0", "uid": uid, "session": session, "index": 0, "step": step,
            "partition": partition,
            "data_source": "tiny/sums", "ground_truth": "42", "is_final": True,
            "prompt_ids": list(range(len(prompt))), "response_ids": [rng.randrange(512) for _ in pieces],
            "prompt_text": "".join(prompt), "response_text": "".join(pieces),
            "prompt_tokens": prompt, "response_tokens": pieces,
            "response_mask": [int(not 3 <= n < 5) for n in range(len(pieces))],
            "rollout_log_probs": rollout, "old_log_probs": old, "ref_log_prob": [v - 0.02 for v in old],
            "entropy": [abs(rng.gauss(1.2, 0.5)) for _ in pieces], "rm_scores": scores,
            "reward": reward, "reward_extra_info": {"acc": reward, "note": "matched <b>42</b>"},
            "stop_reason": "stop" if reward else "length", "num_turns": 2, "min_version": max(0, step - 1),
            "max_version": max(0, step - 1), "worker": writer, "started": started,
            "ended": max(started + 0.5, end - rng.random()), "timings": {"generate": 2.5, "score": 0.125},
            "lineage": {name: lineage(writer, end, max(0, step - 1)) for name in fields},
        }  # fmt: skip

    def metrics(self, step: int, rows: list[dict[str, Any]]) -> None:
        rewards = [row["reward"] for row in rows if row["reward"] is not None] or [0.0]
        lengths = [float(len(row["response_ids"])) for row in rows]
        data = {
            "training/global_step": step, "training/epoch": 0,
            "critic/score/mean": sum(rewards) / len(rewards), "critic/score/max": max(rewards),
            "critic/score/min": min(rewards),
            "response_length/mean": sum(lengths) / len(lengths), "response_length/max": max(lengths),
            "response_length/min": min(lengths),
            "actor/entropy": 1.4 * math.exp(-step / 40) + self.random.gauss(0, 0.02),
            "actor/ppo_kl": abs(self.random.gauss(0, 1e-4)) * step, "actor/kl_loss": 2e-4 * step,
            "actor/pg_loss": self.random.gauss(0, 0.02), "actor/grad_norm": 0.8 + self.random.gauss(0, 0.1),
            "actor/lr": 1e-6, "training/rollout_log_probs_diff/mean": 1e-3, "training/rollout_log_probs_diff/max": 8e-3,
            "timing_s/gen": GEN_S, "timing_s/step": STEP_S, **{f"timing_s/{k}": v for k, v in STAGE_S.items()},
            "training/reward/invalid": sum(row["reward"] is None for row in rows), "perf/throughput": 512.5,
            "critic/vf_explained_var": float("nan"),
        }  # fmt: skip
        self.append("metrics.jsonl", {"step": step, "data": data})


TRAINED_ONLY = {"old_log_probs", "ref_log_prob", "entropy", "advantages", "returns"}


def lineage(writer: str, time: float, version: int) -> dict[str, Any]:
    return {"writer": writer, "time": time, "version": version}


def pieces_of(text: str, count: int) -> list[str]:
    """`count` tokens: words with their space in front, again and again."""
    words = [f" {word}" if n else word for n, word in enumerate(text.split(" "))]
    return [words[n % len(words)] for n in range(count)]


def advantages(rows: list[dict[str, Any]]) -> None:
    """Rewards relative to the group's mean and spread, as GRPO has them."""
    for uid in {row["uid"] for row in rows}:
        group = [row for row in rows if row["uid"] == uid]
        known = [row["reward"] for row in group if row["reward"] is not None]
        mean = sum(known) / len(known) if known else 0.0
        spread = math.sqrt(sum((r - mean) ** 2 for r in known) / len(known)) if known else 0.0
        for row in group:
            value = 0.0 if row["reward"] is None else (row["reward"] - mean) / (spread + 1e-6)
            row["advantages"] = [value * m for m in row["response_mask"]]
            row["returns"] = list(row["advantages"])


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def rewrite(path: Path, change: Any) -> None:
    """Apply `change(row)` to every row of a trajectory file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            change(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_run(folder: Path) -> Path:
    """A finished run: 3 steps x 2 prompts x 3 sessions, validation at 0 and 3.

    It was resumed after step 1; a prompt failed in step 2; step 3 has an invalid reward and hostile texts.
    """
    run = RunWriter(folder)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    run.start(3)
    run.validate(0)
    run.step(1, ["e0r0a0", "e0r1a0"])
    run.event("saved", 1, path=str(folder / "global_step_1"), best=False)
    run.now += 30
    run.event("resumed", 1, from_step=1, dropped_lines=7)
    run.start(3, resumed_from=1)
    run.step(2, ["e0r2a0", "e0r3a0"], dropped="e0r3a0")
    run.event("fault", 2, what="reward_worker_0", text="child process 4711 died: <killed by signal 9>")
    run.event("restart", 2, what="reward_worker_0")
    run.step(3, ["e0r4a0", "e0r5a0"])
    run.event("saved", 3, path=str(folder / "global_step_3"), best=True)
    run.validate(3)
    run.event("run_ended", 3, exit_code=0, reason="done")
    best = {"step": 3, "metric": "val-core/tiny/sums/acc/mean@1", "value": 0.55, "path": str(folder / "global_step_3")}
    (folder / "best_checkpoint.json").write_text(json.dumps(best), encoding="utf-8")

    def spoil(row: dict[str, Any]) -> None:
        if row["key"] == "e0r4a0_1_0":
            row.update(reward=None, invalid="the scorer took longer than reward.timeout_s=5")
            row["advantages"][0] = None
        if row["key"] == "e0r5a0_2_0":
            text = " ".join(HOSTILE)
            row.update(response_tokens=(HOSTILE * 2)[: len(row["response_ids"])], response_text=text)
            row.update(data_source="<b>src</b>", ground_truth=HOSTILE[0], stop_reason="<i>stop</i>")
            row["reward_extra_info"] = {"__proto__": HOSTILE[1], "pred": HOSTILE[4], "n": None}

    rewrite(folder / "trajectories" / "3.jsonl", spoil)
    return folder


def write_running(folder: Path) -> Path:
    """A run in the middle of step 2: one prompt over, one still running, and a last line cut in half."""
    run = RunWriter(folder)
    run.start(5)
    run.step(1, ["e0r0a0", "e0r1a0"])
    run.event("issued", 2, partition="train", uids=["e0r2a0", "e0r3a0"], sessions=3, version=1)
    run.now += 4
    run.event("finished", 2, partition="train", uid="e0r2a0", status="finished", sessions_failed=0)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "finished", "time": 17645')
    return folder


def write_long(folder: Path, steps: int = 50, prompts: int = 8, sessions: int = 8, tokens: int = 200) -> Path:
    """A long run: `steps` x `prompts` x `sessions` trajectories of `tokens` tokens."""
    run = RunWriter(folder)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    run.start(steps)
    run.validate(0)
    for step in range(1, steps + 1):
        first = (step - 1) * prompts
        run.step(step, [f"e0r{first + n}a0" for n in range(prompts)], sessions=sessions, tokens=tokens)
        if step % 10 == 0:
            run.validate(step)
    run.event("run_ended", steps, exit_code=0, reason="done")
    return folder


CONFIG = """\
trainer:
  total_training_steps: 3
  default_local_dir: out
  logger: [console]
algorithm:
  adv_estimator: grpo
data:
  train_batch_size: 2
  max_response_length: 12
actor_rollout_ref:
  model:
    path: "models/<tiny>"
  rollout:
    n: 3
    name: hf
"""
