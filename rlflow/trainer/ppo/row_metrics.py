"""What the rows of a training step carry beside their tensors, as metrics.

- `reward_extra/{name}/mean`: numbers the reward function returned beside the score (`score` itself is `critic/score`),
  over the last outputs of sessions with a valid reward.
- `agent_loop/{part}/{mean,max,min}`: seconds a session spent in `generate_sequences`, `tool_calls`, `compute_score`;
  `agent_loop/slowest/{part}` the same of the session that took longest, with its `prompt_length` and `response_length`
  in tokens.
- `agent_loop/num_preempted/{mean,max,min}`: preemptions by the engine, when it counts them.
"""

from __future__ import annotations

import math
from typing import Any

from rlflow.trainer.ppo.dumps import column, reward_extras
from rlflow.trainer.ppo.replay_buffer import final_outputs

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
    return {
        **_reward_extra([extras[row] for row in finals]),
        **_agent_loop([timings[row] for row in finals], [tags[row] for row in finals]),
    }


def _reward_extra(infos: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            if name != "score" and isinstance(value, (bool, int, float)) and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    return {f"reward_extra/{name}/mean": sum(found) / len(found) for name, found in values.items()}


def _agent_loop(timings: list[dict[str, Any] | None], tags: list[dict[str, Any]]) -> dict[str, float]:
    known = [(timing, tag) for timing, tag in zip(timings, tags, strict=True) if timing]
    if not known:
        return {}
    metrics: dict[str, float] = {}
    for name in (*TIMES, "num_preempted"):
        values = [float(timing[name]) for timing, _ in known if timing.get(name, -1) >= 0]
        if values:
            metrics[f"agent_loop/{name}/mean"] = sum(values) / len(values)
            metrics[f"agent_loop/{name}/max"] = max(values)
            metrics[f"agent_loop/{name}/min"] = min(values)
    slowest, tag = max(known, key=lambda pair: sum(pair[0].get(name, 0.0) for name in TIMES))
    metrics |= {f"agent_loop/slowest/{name}": float(slowest.get(name, 0.0)) for name in TIMES}
    metrics["agent_loop/slowest/prompt_length"] = int(tag["prompt_len"])
    metrics["agent_loop/slowest/response_length"] = int(tag["response_len"])
    return metrics
