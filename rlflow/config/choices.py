"""The values that a key with a choice takes."""

from __future__ import annotations

import importlib
from typing import Any

from rlflow.config.key_states import matches
from rlflow.config.worker import LOSS_AGG_MODES

_KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_DTYPES = ("bfloat16", "float32", "bf16", "fp32")
# What `rlflow.trainer.ppo.core_algos` registers, which cannot be asked without importing torch (a test compares).
ESTIMATORS = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
LOSSES = (
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "ppo",
    "sapo",
    "vanilla",
)
CHOICES: dict[str, tuple[str, ...]] = {
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "actor_rollout_ref.actor.policy_loss.loss_mode": LOSSES,
    "actor_rollout_ref.actor.strategy": ("fsdp", "fsdp2"),
    "actor_rollout_ref.rollout.load_format": ("dummy", "auto", "safetensors"),
    "actor_rollout_ref.rollout.mode": ("async",),
    "algorithm.adv_estimator": ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": _KL,
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "critic.strategy": ("fsdp", "fsdp2"),
    "reward.reward_manager.source": ("register", "importlib"),
    "trainer.best_mode": ("max", "min"),
    "trainer.device": ("cuda", "cpu"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "**.checkpoint.load_contents": ("model", "optimizer", "extra", "hf_model"),
    "**.checkpoint.save_contents": ("model", "optimizer", "extra", "hf_model"),
    "**.dtype": _DTYPES,
    "**.loss_agg_mode": LOSS_AGG_MODES,
    "**.optim.lr_scheduler_type": ("constant", "cosine"),
    "**.optim.nonfinite_grad": ("skip", "stop"),
}
# Names that code registers: a module and the registry in it. Looking one up imports that module.
REGISTRIES: dict[str, tuple[str, str]] = {
    "actor_rollout_ref.rollout.name": ("rlflow.workers.rollout.capabilities", "CAPABILITIES"),
}


def allowed_values(key: str, default: Any = None) -> tuple[str, ...]:
    """The values of a key that chooses among some; () for a key that takes any value of its type."""
    if key in REGISTRIES:
        module, name = REGISTRIES[key]
        return tuple(sorted(getattr(importlib.import_module(module), name)))
    for pattern, values in CHOICES.items():
        if matches(pattern, key):
            return values
    return ("true", "false") if isinstance(default, bool) else ()
