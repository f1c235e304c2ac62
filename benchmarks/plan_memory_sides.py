"""One process of `plan_memory.py`: a real worker or a real rollout server, and the memory it took.

    python benchmarks/plan_memory_sides.py trainer|server out.json key=value ...

The worker makes log-probs of a mini-batch and two optimizer steps on it; the server generates a step's answers.
Written is {"imports": resident bytes after the imports, "peak": the highest since the process started}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

VOCAB_LOW = 100  # below are special tokens


def status(name: str) -> int:
    """A size of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def tokens(count: int, vocab: int) -> torch.Tensor:
    """Random ids."""
    return torch.randint(VOCAB_LOW, vocab, (count,))


def rows_of(config: Any, vocab: int) -> Any:
    """A mini-batch of rows that are as long as they may be; those of a prompt share it."""
    from rlflow.utils import tensordict_utils as tu

    rollout, mini = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.ppo_mini_batch_size
    fields: dict[str, list[torch.Tensor]] = {}
    for _ in range(mini):
        prompt = tokens(rollout.prompt_length, vocab)
        for _ in range(rollout.n):
            response = tokens(rollout.response_length, vocab)
            noise = torch.randn(len(response))
            row = {
                "input_ids": torch.cat([prompt, response]),
                "responses": response,
                "values": noise,
                "returns": -noise,
            }
            row |= {"response_mask": torch.ones_like(response), "advantages": noise, "old_log_probs": noise - 9}
            for name, value in row.items():
                fields.setdefault(name, []).append(value)
    return tu.get_tensordict({name: tu.nested_from_list(values) for name, values in fields.items()})


def train(config: Any, vocab: int) -> None:
    """The life of a trainer process: log-probs, an update, another one with the optimizer's states there."""
    from rlflow.config.critic import need_critic
    from rlflow.single_controller.base import WorkerContext
    from rlflow.utils import tensordict_utils as tu
    from rlflow.workers.critic_worker import CriticWorker
    from rlflow.workers.engine_workers import ActorRolloutRefWorker

    actor = ActorRolloutRefWorker(config.actor_rollout_ref, "actor", context=WorkerContext.single())
    critic = None
    if need_critic(config):
        response = config.actor_rollout_ref.rollout.response_length
        critic = CriticWorker(config.critic, context=WorkerContext.single(), response_length=response)
        critic.init_model()
    actor.init_model()
    data = rows_of(config, vocab)
    options = {"mini_batch_size": len(data), "global_batch_size": len(data), "temperature": 1.0}
    for _ in range(2):
        actor.compute_log_prob(tu.get_keys(data, ["input_ids", "responses"]))
        if critic is not None:
            critic.update_critic(tu.assign_non_tensor_whole(data.copy(), dict(options)))
        actor.update_actor(tu.assign_non_tensor_whole(data.copy(), dict(options)))


async def serve(config: Any, vocab: int) -> None:
    """All answers of a step at once."""
    from rlflow.workers.rollout.hf.server import HFServer

    rollout = config.actor_rollout_ref.rollout
    rollout.load_format = "auto"
    server = HFServer(rollout, config.actor_rollout_ref.model, 0)
    params = {"max_tokens": rollout.response_length, "ignore_eos": True, "temperature": 1.0}
    prompts = [tokens(rollout.prompt_length, vocab).tolist() for _ in range(config.data.train_batch_size)]
    calls = [
        server.generate(prompt, params, request_id=f"{number}_{session}")
        for number, prompt in enumerate(prompts)
        for session in range(rollout.n)
    ]
    await asyncio.gather(*calls)


def main(side: str, out: str, overrides: list[str]) -> None:
    """Run one side and end the process."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 - what loading imports

    import rlflow.workers.critic_worker
    import rlflow.workers.engine.fsdp.engine
    import rlflow.workers.engine_workers
    import rlflow.workers.rollout.hf.server  # noqa: F401 - the imports of the process, which are not counted
    from rlflow.config.overrides import compose_config

    config = compose_config(overrides)
    vocab = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path).vocab_size
    imports = status("VmRSS")
    if side == "trainer":
        train(config, vocab)
    else:
        asyncio.run(serve(config, vocab))
    Path(out).write_text(json.dumps({"imports": imports, "peak": status("VmHWM")}), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the server's thread has no end of its own


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
