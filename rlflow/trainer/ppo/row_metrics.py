"""What the rows of a training step carry beside their tensors, as metrics.

- `reward_extra/{name}/mean`: numbers the reward function returned beside the score (`score` itself is `critic/score`),
  over the last outputs of sessions with a valid reward.
- `agent_loop/{part}/{mean,max,min}`: seconds a session spent in `generate_sequences`, `tool_calls`, `compute_score`;
  `agent_loop/slowest/{part}` the same of the session that took longest, with its `prompt_length` and `response_length`
  in tokens.
- `agent_loop/num_preempted/{mean,max,min}`: preemptions by the engine, when it counts them.
- `tool_call_counts/{mean,max,min}`: what agent loops set as `extra_fields["tool_call_counts"]`, when they do.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rlflow.trainer.ppo.dumps import column, reward_extras
from rlflow.trainer.ppo.replay_buffer import final_outputs
from rlflow.trainer.ppo.step_metrics import spread

TIMES = ("generate_sequences", "tool_calls", "compute_score")


def compute_row_metrics(keys: list[str], tags: list[dict[str, Any]], data: Any) -> dict[str, float]:
    """Metrics of the real rows of a step.

    Args:
        keys, tags: of these rows, without padding.
        data: TensorDict with, if there are any, `metrics` and `extra_fields`.
    """
    finals = final_outputs(keys)
    extras = reward_extras(data, tags)
    timings = column(data, "metrics", len(keys))
    fields = column(data, "extra_fields", len(keys))
    return {
        **_reward_extra([extras[row] for row in finals]),
        **_agent_loop([timings[row] for row in finals], [tags[row] for row in finals]),
        **_tool_calls([fields[row] for row in finals]),
    }


def _reward_extra(infos: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            if name != "score" and isinstance(value, (bool, int, float)) and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {f"reward_extra/{name}/mean": sum(found) / len(found) for name, found in values.items()}


def _tool_calls(fields: list[dict[str, Any] | None]) -> dict[str, float]:
    counts = [(field or {}).get("tool_call_counts") for field in fields]
    known = [float(count) for count in counts if isinstance(count, (int, float))]
    return spread("tool_call_counts", torch.tensor(known)) if known else {}


def _agent_loop(timings: list[dict[str, Any] | None], tags: list[dict[str, Any]]) -> dict[str, float]:
    known = [(timing, tag) for timing, tag in zip(timings, tags, strict=True) if timing]
    if not known:
        return {}
    metrics: dict[str, float] = {}
    for name in (*TIMES, "num_preempted"):
        values = [float(timing[name]) for timing, _ in known if timing.get(name, -1) >= 0]
        if values:
            metrics |= spread(f"agent_loop/{name}", torch.tensor(values))
    slowest, tag = max(known, key=lambda pair: sum(pair[0].get(name, 0.0) for name in TIMES))
    metrics |= {f"agent_loop/slowest/{name}": float(slowest.get(name, 0.0)) for name in TIMES}
    metrics["agent_loop/slowest/prompt_length"] = int(tag["prompt_len"])
    metrics["agent_loop/slowest/response_length"] = int(tag["response_len"])
    return metrics
