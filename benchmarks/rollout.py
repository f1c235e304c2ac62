"""Speed of the embedded rollout engine beside vLLM and `transformers`' own `generate`, in one run on one machine.

    python benchmarks/rollout.py --model ~/models/SmolLM2-135M-Instruct --threads 1 2
    python benchmarks/rollout.py --model ... --vllm-python ~/.cache/rlflow/engines/vllm/bin/python --check
    python benchmarks/rollout.py --model ... --server          # also through Ray: balancer, client, server; weight sync

All sides get the same prompts (about 55 tokens, chat template), the same number of new tokens, sample at temperature 1
with log-probs (`generate` without) and use the same threads, each in a process of its own that does nothing while
another is measured. Rounds alternate, so that a change in the machine's load hits all; the best round of each counts,
and all rounds are shown. vLLM (`--vllm-python`: the Python of an environment that has it) runs as its CPU users run it:
threads bound to cores, no compilation, and it forgets its prefix cache between rounds.

`distinct`: that many different prompts. `n=8`: an eighth as many, eight samples of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

from rlflow.workers.rollout.base import SamplingParams

SAMPLES = 8
GOALS = {"distinct": 0.75, "n=8": 1.0}  # of vLLM's tokens/s
TOPICS = (
    "the sea", "a train", "two numbers", "an old clock", "winter", "a small garden", "the moon", "a letter",
    "a bridge", "bread", "the wind", "a chess game", "a river", "music", "a mountain path", "rain",
)  # fmt: skip


def say(text: str) -> None:
    """One line of the report."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts that differ in words and a little in length."""
    out = []
    for i in range(count):
        extra = " Keep it short." * (i % 3)
        text = f"Question {i}: write something about {TOPICS[i % len(TOPICS)]} and the number {i * 37 % 101}.{extra}"
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        out.append(list(ids))
    return out


class Transformers:
    """`generate` on one left-padded batch."""

    def __init__(self, path: str, dtype: str, pad_id: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self.name = f"transformers generate, {dtype}"
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.pad_id = pad_id

    def run(self, batch: list[list[int]], samples: int, new_tokens: int) -> int:
        """Generate `samples` continuations of each prompt; returns the number of new tokens."""
        width = max(map(len, batch))
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                num_return_sequences=samples, min_new_tokens=new_tokens, max_new_tokens=new_tokens,
                pad_token_id=self.pad_id,
            )  # fmt: skip
        return out.shape[0] * (out.shape[1] - width)

    def detail(self) -> str:
        """Nothing to add."""
        return ""


class Engine:
    """The engine itself, without Ray."""

    def __init__(self, config: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from rlflow.workers.rollout.hf.engine import HFEngine
        from rlflow.workers.rollout.hf.limits import engine_limits
        from rlflow.workers.rollout.hf.model import load_model

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        node = config.actor_rollout_ref
        with ThreadPoolExecutor(max_workers=1) as pool:  # as the server does
            model = pool.submit(load_model, node.model, node.rollout, torch.device("cpu")).result()
        self.name = f"rlflow engine, {node.rollout.dtype} weights, {str(model.dtype).removeprefix('torch.')} arithmetic"
        self.engine = HFEngine(model, engine_limits(node.rollout, model, 1), version=0)

    def run(self, batch: list[list[int]], samples: int, new_tokens: int) -> int:
        """As `Transformers.run`."""
        params = [SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=True, seed=i) for i in range(samples)]
        futures = [
            self.engine.submit(p, params[s], request_id=f"{i}_{s}") for i, p in enumerate(batch) for s in range(samples)
        ]
        return sum(len(f.result().token_ids) for f in futures)

    def detail(self) -> str:
        """Averages over all rounds."""
        c = self.engine.counters
        prefill = c.prefill_tokens / c.prefill_s if c.prefill_s else 0
        return f"prefill {prefill:.0f} tok/s, decode step {1e3 * c.decode_s / max(c.decode_steps, 1):.0f} ms on average"


class OwnProcess:
    """A side in a process of its own: its OpenMP threads would get in the way of the other sides'."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _make_side, (make, args))
        self.name: str = self._pool.submit(_side_name).result()

    def run(self, batch: list[list[int]], samples: int, new_tokens: int) -> int:
        """As `Transformers.run`."""
        return self._pool.submit(_side_run, batch, samples, new_tokens).result()

    def detail(self) -> str:
        """As the side's."""
        return self._pool.submit(_side_detail).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


class VLLM:
    """vLLM in its own environment; see `rollout_sides/vllm_process.py`."""

    def __init__(self, python: str, dtype: str, args: argparse.Namespace) -> None:
        threads = int(os.environ["OMP_NUM_THREADS"])
        options = {
            "model": args.model, "dtype": dtype, "max_num_seqs": args.requests, "max_model_len": 128 + args.new_tokens,
        }  # fmt: skip
        cores = sorted(os.sched_getaffinity(0))[:threads]
        bind = ",".join(map(str, cores))
        env = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": bind, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        env = {key: value for key, value in env.items() if key != "PYTHONPATH"} | {"VLLM_LOGGING_LEVEL": "ERROR"}
        script = Path(__file__).with_name("rollout_sides") / "vllm_process.py"
        self._process = subprocess.Popen(  # noqa: S603 - the caller's own Python
            [python, str(script), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True,
        )  # fmt: skip
        self.name = self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("vLLM's process ended; its error is above")
        return json.loads(line)

    def run(self, batch: list[list[int]], samples: int, new_tokens: int) -> int:
        """As `Transformers.run`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": batch, "samples": samples, "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        return self._answer()["tokens"]

    def detail(self) -> str:
        """Nothing to add."""
        return ""

    def close(self) -> None:
        """End the process and those below it: they hold nothing that is worth a wait."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


_side: Any = None


def _make_side(make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    global _side
    _side = make(*args)


def _side_name() -> str:
    return _side.name


def _side_run(*args: Any) -> int:
    return _side.run(*args)


def _side_detail() -> str:
    return _side.detail()


class Server:
    """The same through the client, the balancer and a server process."""

    def __init__(self, config: Any) -> None:
        import ray

        from rlflow.workers.rollout.llm_server import LLMServerManager

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        self.name = "rlflow client -> balancer -> server"
        self.config = config
        self.manager = LLMServerManager.create(config)
        self.client = self.manager.get_client()

    def run(self, batch: list[list[int]], samples: int, new_tokens: int) -> int:
        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(
                    self.client.generate(
                        f"{i}_{s}",
                        prompt_ids=p,
                        sampling_params={"max_tokens": new_tokens, "ignore_eos": True, "logprobs": True, "seed": s},
                    )
                    for i, p in enumerate(batch)
                    for s in range(samples)
                )
            )

        return sum(len(output.token_ids) for output in asyncio.run(all_of_them()))

    def sync(self, path: str, rounds: int) -> None:
        """Time weight syncs from this process to the server."""
        from transformers import AutoModelForCausalLM

        from rlflow.checkpoint_engine.base import build_sender

        params = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        sender = build_sender(self.config.actor_rollout_ref.rollout, 0, 1)
        replica = self.manager.get_replicas()[0]
        for version in range(1, rounds + 1):
            asyncio.run(replica.abort_all_requests())
            receipt = asyncio.run(sender.send(iter(params.items()), replica.server_handle, version))
            asyncio.run(replica.resume_generation())
            say(
                f"weight sync: {receipt.total_bytes / 1e6:.0f} MB, {receipt.tensor_count} tensors, "
                f"{receipt.seconds:.2f} s"
            )


def configuration(args: argparse.Namespace) -> Any:
    """What the rollout room reads of a whole configuration."""
    from omegaconf import OmegaConf

    from rlflow.config import HFModelConfig, RolloutConfig

    hf = {"kv_cache_gb": args.kv_cache_gb, "compute_dtype": args.compute_dtype}
    rollout = RolloutConfig(
        name="hf", dtype=args.dtype, prompt_length=128, response_length=args.new_tokens, max_num_seqs=args.requests,
        load_format="auto", engine_kwargs={"hf": hf},
    )  # fmt: skip
    node = OmegaConf.to_container(OmegaConf.structured(rollout))
    model = OmegaConf.to_container(OmegaConf.structured(HFModelConfig(path=args.model)))
    # One server on a device of its own: standalone mode.
    node |= {"nnodes": 1, "n_gpus_per_node": 1}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": node, "model": model}, "trainer": {"n_gpus_per_node": 1}})


def measure(sides: list[Any], batch: list[list[int]], samples: int, args: argparse.Namespace) -> dict[str, float]:
    """Alternate the sides; best tokens/s of each."""
    speeds: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(args.rounds):
        for side in sides:
            started = time.perf_counter()
            tokens = side.run(batch, samples, args.new_tokens)
            speeds[side.name].append(tokens / (time.perf_counter() - started))
    for name, values in speeds.items():
        say(f"  {name:62s} {max(values):7.0f} tok/s   rounds: {' '.join(f'{v:.0f}' for v in values)}")
    return {name: max(values) for name, values in speeds.items()}


def one_thread_count(batch: list[list[int]], config: Any, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Build the sides, measure both kinds of work, end the sides; tokens/s by kind and side, and the ratios."""
    load = os.getloadavg()[0]
    say(f"{args.requests} requests, prompts of {min(map(len, batch))}-{max(map(len, batch))} tokens, "
        f"{args.new_tokens} new tokens, {os.environ['OMP_NUM_THREADS']} threads, load average {load:.1f}")  # fmt: skip
    plain = [args.dtype, "float32"] if args.also_float32 else [args.dtype]
    engine = OwnProcess(Engine, config)
    sides: list[Any] = [OwnProcess(Transformers, args.model, dtype, args.pad_id) for dtype in plain]
    rivals = [VLLM(args.vllm_python, dtype, args) for dtype in args.vllm_dtypes] if args.vllm_python else []
    sides = [engine, *sides, *rivals]
    results: dict[str, dict[str, float]] = {}
    try:
        for side in sides:  # kernels, memory and caches of all sides are warm before the first round
            side.run(batch[:SAMPLES], 1, 2)
        works = {"distinct": (batch, 1), "n=8": (batch[: args.requests // SAMPLES], SAMPLES)}
        for label in args.works:
            part, samples = works[label]
            say(f"{label}: {len(part)} prompts x {samples}")
            speeds = results[label] = measure(sides, part, samples, args)
            for side in sides[1:]:
                say(f"  engine / {side.name} = {speeds[engine.name] / speeds[side.name]:.2f}")
            if rivals:
                speeds["engine / fastest vllm"] = speeds[engine.name] / max(speeds[side.name] for side in rivals)
        say(f"engine: {engine.detail()}; load average {os.getloadavg()[0]:.1f}")
    finally:
        for side in sides:
            side.close()
    return results


def missed_goals(results: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Goals against the fastest vLLM of the same run, by thread count."""
    return [
        f"{label}, {threads} threads: {speeds['engine / fastest vllm']:.2f} x vllm, goal {GOALS[label]:.2f}"
        for threads, kinds in results.items()
        for label, speeds in kinds.items()
        if speeds.get("engine / fastest vllm", GOALS[label]) < GOALS[label]
    ]


def main() -> None:
    """Parse, warm up, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a causal LM with a chat template")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16", help="type of the weights, both sides")
    parser.add_argument("--compute-dtype", default=None, help="arithmetic of the engine; default: what it chooses")
    parser.add_argument("--also-float32", action="store_true", help="a second baseline: generate in float32")
    parser.add_argument("--threads", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--vllm-python", help="Python of an environment with vllm: measured beside ours")
    parser.add_argument("--vllm-dtypes", nargs="+", default=["bfloat16", "float32"], help="a side for each")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    parser.add_argument("--works", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-cache-gb", type=float, default=2.0)
    parser.add_argument("--server", action="store_true", help="also through a server process, and a weight sync")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    args.model = str(Path(args.model).expanduser())

    from transformers import AutoTokenizer
    from transformers.utils import logging as hf_logging

    hf_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    batch = prompts(tokenizer, args.requests)
    config = configuration(args)
    args.pad_id = tokenizer.pad_token_id or 0
    results: dict[str, Any] = {}
    for threads in args.threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # the sides' processes inherit it
        results[str(threads)] = one_thread_count(batch, config, args)
    if args.server:
        server = Server(config)
        say("through the server, distinct:")
        measure([server], batch, 1, args)
        server.sync(args.model, 3)
        server.manager.shutdown()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2))
    if args.check and (missed := missed_goals(results)):
        raise SystemExit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
