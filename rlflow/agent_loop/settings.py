"""The options agent loops read, taken from the config once per worker, and what follows from them per request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from rlflow.config.rollout import AgentLoopConfig, RolloutConfig, SamplingConfig

_SEED_BITS = 63
TRAIN, VAL = "train", "val"
# Column of a train prompt that wants a greedy session beside the sampled ones, for a baseline (ReMax).
BASELINE_COLUMN = "__greedy_baseline__"


@dataclass(frozen=True)
class AgentLoopSettings:
    """Typed view of `actor_rollout_ref.rollout` and `data`, as far as agent loops need it."""

    rollout: RolloutConfig
    apply_chat_template_kwargs: dict[str, Any]

    @classmethod
    def from_config(cls, config: Any) -> AgentLoopSettings:
        """Read a resolved DictConfig; keys it lacks get the defaults of `rlflow.config`."""
        from omegaconf import OmegaConf

        node = OmegaConf.select(config, "actor_rollout_ref.rollout")
        rollout = RolloutConfig(
            **_present(node, RolloutConfig),
            val_kwargs=SamplingConfig(**_present(_child(node, "val_kwargs"), SamplingConfig)),
            agent=AgentLoopConfig(**_present(_child(node, "agent"), AgentLoopConfig)),
        )
        kwargs = OmegaConf.select(config, "data.apply_chat_template_kwargs")
        template_kwargs = OmegaConf.to_container(kwargs, resolve=True) if OmegaConf.is_config(kwargs) else kwargs
        return cls(rollout, dict(template_kwargs or {}))  # type: ignore[arg-type]

    def sessions(self, row: dict[str, Any], validate: bool) -> int:
        """Sessions of a prompt: the row's `__rollout_n__`, else `rollout.n` or `val_kwargs.n`."""
        own = row.get("__rollout_n__")
        if own is not None:
            return int(own)
        return self.rollout.val_kwargs.n if validate else self.rollout.n

    def baseline_session(self, row: dict[str, Any], validate: bool) -> int | None:
        """Number of the greedy session whose score is the prompt's baseline, after the sampled ones; or None."""
        return None if validate or not row.get(BASELINE_COLUMN) else self.sessions(row, validate)

    def session_numbers(self, row: dict[str, Any], validate: bool) -> range:
        """All sessions that a prompt runs, its baseline's among them."""
        baseline = self.baseline_session(row, validate)
        return range(self.sessions(row, validate) if baseline is None else baseline + 1)

    def sampling_params(self, row: dict[str, Any], validate: bool) -> dict[str, Any]:
        """Sampling parameters of every request of a prompt's sessions; the seed is added per request.

        Greedy (temperature 0, top_p 1, top_k -1) when the row's `__do_sample__` is false in training, or
        `val_kwargs.do_sample` is false in validation, whatever the temperature.
        """
        rollout = self.rollout
        source: RolloutConfig | SamplingConfig = rollout.val_kwargs if validate else rollout
        greedy = not rollout.val_kwargs.do_sample if validate else row.get("__do_sample__") in (False, 0)
        params: dict[str, Any] = {
            "temperature": 0.0 if greedy else float(source.temperature),
            "top_p": 1.0 if greedy else float(source.top_p),
            "top_k": -1 if greedy else int(source.top_k),
            "repetition_penalty": float(rollout.repetition_penalty),
            "logprobs": bool(rollout.calculate_log_probs),
            "max_tokens": int(rollout.response_length),
        }
        if rollout.ignore_eos:
            params["ignore_eos"] = True
        return params


def request_seed(seed: int, uid: str, session_id: int, turn: int) -> int:
    """Seed of one request, in [0, 2**63): the same in every run and process, another for every turn and session."""
    digest = hashlib.blake2b(f"{seed}:{uid}:{session_id}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def _child(node: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.select(node, key) if node is not None else None


def _present(node: Any, cls: type) -> dict[str, Any]:
    """The single values `node` has for fields of the dataclass `cls`; groups and keys without a field are left out."""
    from omegaconf import OmegaConf

    if node is None:
        return {}
    names = [item.name for item in fields(cls) if item.name in node]
    values = {name: OmegaConf.select(node, name) for name in names if not OmegaConf.is_missing(node, name)}
    return {name: value for name, value in values.items() if value is not None and not OmegaConf.is_dict(value)}
