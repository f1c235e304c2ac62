"""What client and balancer cost: requests to servers that answer at once, over Ray, with no model anywhere.

    python benchmarks/rollout_requests.py [--requests 1000] [--servers 4] [--repeats 5] [--limit 2.0] [--out FILE]

Two shapes: all requests at once (the sessions of a step), and conversations whose turns follow each other. Prints a
line of figures for each, as JSON into --out; exit code 1 when the median of the first is above --limit seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT, ANSWER, TURNS = 256, 128, 10
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
    "max_tokens": 128,
}


class StubServer:
    """Answers at once with as many tokens as a short answer has."""

    def __init__(self, rank: int) -> None:
        from rlflow.workers.rollout.base import TokenOutput

        fields = {"global_steps": 1, "rank": rank, "version_spans": [[1, ANSWER]]}
        self._output = TokenOutput(
            token_ids=[7] * ANSWER, log_probs=[-0.5] * ANSWER, stop_reason="length", extra_fields=fields
        )

    async def generate(self, *_: Any, **__: Any) -> Any:
        """The answer."""
        return self._output


def client_of(servers: int) -> Any:
    """A client of that many stub servers behind a real balancer."""
    import ray
    from omegaconf import OmegaConf

    from rlflow.workers.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient

    rollout = {
        "name": "hf",
        "ignore_eos": False,
        "prompt_length": PROMPT,
        "response_length": ANSWER,
        "max_model_len": None,
        "request_timeout_s": 120.0,
    }
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    actor: Any = ray.remote(StubServer)
    handles = [actor.options(num_cpus=0, max_concurrency=1000).remote(rank) for rank in range(servers)]
    balancer: Any = ray.remote(GlobalRequestLoadBalancer)
    return LLMServerClient(
        config,
        balancer.options(num_cpus=0, max_concurrency=10_000).remote(
            {f"replica_{rank}": handle for rank, handle in enumerate(handles)}
        ),
    )


async def at_once(client: Any, requests: int) -> tuple[float, Counter[int]]:
    """Seconds, and answers by server."""
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(client.generate(f"r{i}", prompt_ids=[5] * PROMPT, sampling_params=SAMPLING) for i in range(requests))
    )
    return time.perf_counter() - started, Counter(output.extra_fields["rank"] for output in outputs)


async def in_turns(client: Any, requests: int) -> tuple[float, Counter[int]]:
    """The same number of requests as conversations of `TURNS` turns."""

    async def talk(name: str) -> list[Any]:
        return [await client.generate(name, prompt_ids=[5] * PROMPT, sampling_params=SAMPLING) for _ in range(TURNS)]

    started = time.perf_counter()
    talks = await asyncio.gather(*(talk(f"t{i}") for i in range(requests // TURNS)))
    assert all(len({output.extra_fields["rank"] for output in outputs}) == 1 for outputs in talks), "not sticky"
    seconds = time.perf_counter() - started
    return seconds, Counter(output.extra_fields["rank"] for outputs in talks for output in outputs)


def measure(options: SimpleNamespace | argparse.Namespace) -> list[dict[str, Any]]:
    """A line of figures for each shape."""
    client = client_of(options.servers)
    asyncio.run(at_once(client, 100))  # workers are up
    lines = []
    for shape in (at_once, in_turns):
        runs = [asyncio.run(shape(client, options.requests)) for _ in range(options.repeats)]
        seconds = [run[0] for run in runs]
        lines.append(
            {
                "shape": shape.__name__,
                "requests": options.requests,
                "servers": options.servers,
                "median_s": round(statistics.median(seconds), 3),
                "min_s": round(min(seconds), 3),
                "max_s": round(max(seconds), 3),
                "us_per_request": round(1e6 * statistics.median(seconds) / options.requests),
                "by_server": dict(sorted(runs[-1][1].items())),
            }
        )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Measure, print, compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, default=2.0, help="seconds for all requests at once")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, address="local")
    try:
        lines = measure(options)
    finally:
        ray.shutdown()
    for line in lines:
        sys.stdout.write(json.dumps(line) + "\n")
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0 if lines[0]["median_s"] <= options.limit else 1


if __name__ == "__main__":
    sys.exit(main())
