"""Options at places where verl has, or once had, them: they move to their place here, each with a notice.

Some places are no keys of the tree (`RENAMED`): an override for one is rewritten before it is read. The others are keys
that stand in the tree with "not given" as their default (`MOVED`, `OTHER_PLACES`, `OVER_ALL_RANKS`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rlflow.config.key_check import changed

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_MODEL, _SCORER = "actor_rollout_ref.model", "reward.reward_model"
# A key, or with a final dot all keys below a node, that the tree does not have.
RENAMED: dict[str, str] = {
    "critic.model.fsdp_config.": "critic.fsdp.",
    "critic.fsdp_config.": "critic.fsdp.",
    "critic.model.optim.": "critic.optim.",
    "custom_reward_function.reward_kwargs.": "reward.custom_reward_function.reward_kwargs.",
    "reward_model.reward_kwargs.": "reward.reward_kwargs.",
    "reward_model.sandbox_fusion.": "reward.sandbox_fusion.",
    "reward_model.overlong_buffer.": "reward.reward_kwargs.overlong_buffer_cfg.",
    f"{_ROLLOUT}.update_weights_bucket_megabytes": f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    f"{_ROLLOUT}.agent.agent_name": f"{_ROLLOUT}.agent.default_agent_loop",
    f"{_ROLLOUT}.multi_turn.max_turns": f"{_ROLLOUT}.multi_turn.max_assistant_turns",
    f"{_ROLLOUT}.skip_rollout": "skip.rollout.enable",
    f"{_ROLLOUT}.skip_dump_dir": "skip.rollout.dump_dir",
    f"{_ACTOR}.use_rollout_log_probs": "algorithm.rollout_correction.bypass_mode",
    "ray_init.": "ray_kwargs.ray_init.",
    "trainer.profile_steps": "global_profiler.steps",
    "trainer.val_generations_to_log_to_wandb": "trainer.log_val_generations",
}
_SERVED = "a reward model is served, not trained: reward.reward_model.rollout has its options"
# What old commands set and nothing reads any more: a key, or with a final dot all keys below a node -> why.
DROPPED: dict[str, str] = {
    **{
        f"reward_model.{name}": _SERVED
        for name in (
            *("strategy", "max_length", "micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz"),
            *("forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "profiler."),
            *("model.use_remove_padding", "model.use_fused_kernels", "model.use_shm", "model.fsdp_config."),
        )
    },
    "reward_model.model.input_tokenizer": "the reward model's own tokenizer and chat template make its input",
    "reward_model.launch_reward_fn_async": "rewards are always computed beside the rollout",
    "trainer.use_legacy_worker_impl": "there is one implementation of the workers",
}
# Keys of the legacy groups -> theirs in `reward`; those of reward_model.rollout keep their names.
MOVED: dict[str, str] = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward_model.enable": f"{_SCORER}.enable",
    "reward_model.enable_resource_pool": f"{_SCORER}.enable_resource_pool",
    "reward_model.n_gpus_per_node": f"{_SCORER}.n_gpus_per_node",
    "reward_model.nnodes": f"{_SCORER}.nnodes",
    "reward_model.model.path": f"{_SCORER}.model_path",
    "sandbox_fusion.url": "reward.sandbox_fusion.url",
    "sandbox_fusion.max_concurrent": "reward.sandbox_fusion.max_concurrent",
    "sandbox_fusion.memory_limit_mb": "reward.sandbox_fusion.memory_limit_mb",
}
_NO_PLACE = {
    "reward_model.model.external_lib": f"{_MODEL}.external_lib, which every worker imports",
    "reward_model.model.trust_remote_code": "a model that transformers knows",
}
# Two keys for one thing -> the one that is read.
OTHER_PLACES: dict[str, str] = {
    f"{_ACTOR}.grad_clip": f"{_ACTOR}.optim.clip_grad",
    f"{_ACTOR}.use_fused_kernels": f"{_MODEL}.use_fused_kernels",
    f"{_ACTOR}.use_remove_padding": f"{_MODEL}.use_remove_padding",
    f"{_ACTOR}.use_prefix_grouper": f"{_ACTOR}.fsdp_config.share_prompts",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.adapter_path": f"{_MODEL}.lora_adapter_path",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.model.lora.rank": "critic.model.lora_rank",
    "critic.model.lora.alpha": "critic.model.lora_alpha",
    "critic.model.lora.adapter_path": "critic.model.lora_adapter_path",
}
# Numbers of rows over all processes -> the number of each.
OVER_ALL_RANKS: dict[str, str] = {
    f"{_ACTOR}.ppo_micro_batch_size": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size": f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_micro_batch_size": "critic.forward_micro_batch_size_per_gpu",
}
# A switch -> what it stood for when it was on.
_SWITCHES: dict[str, tuple[str, ...]] = {
    "trainer.remove_previous_ckpt_in_save": ("trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=1"),
}
_KEY = re.compile(r"([+~]{0,2})([\w.@/-]+)(.*)", re.DOTALL)


def renamed(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides with keys of this tree, and a notice for each that was rewritten."""
    texts: list[str] = []
    notices: list[str] = []
    for text in overrides:
        match = _KEY.fullmatch(text)
        key = match[2] if match else ""
        old, gone = _entry(RENAMED, key), _entry(DROPPED, key)
        if gone is not None:
            notices.append(f"{key} has no effect: {DROPPED[gone]}")
        elif match and key in _SWITCHES:
            on = match[3].strip(" =").lower() == "true"
            texts += _SWITCHES[key] if on else ()
            notices.append(f"{key} is now {' '.join(_SWITCHES[key]) if on else 'left out: it is off'}")
        elif match and old is not None:
            new = RENAMED[old] + key[len(old) :]
            adding = match[1] or ("+" if new.startswith("reward.reward_kwargs.") else "")  # not in the tree by itself
            texts.append(f"{adding}{new}{match[3]}")
            notices.append(f"{key} is now {new}")
        else:
            texts.append(text)
    return texts, notices


def _entry(table: Iterable[str], key: str) -> str | None:
    """The entry of a table for a key: the key itself, or a node (with its final dot) above it."""
    return next((old for old in table if key == old or (old.endswith(".") and key.startswith(old))), None)


def move_old_keys(config: Any, problems: list[str]) -> list[str]:
    """Give what stands at old places of a composed tree to the keys that are read, in place.

    Sizes over all processes are divided by their number, so the tree must already fit the machine.

    Args:
        config: the `DictConfig`, interpolations unresolved.
        problems: gets a text for each option that is given at both places with different values, cannot be divided, or
            has no new place.

    Returns:
        A notice for each option that moved.
    """
    from omegaconf import OmegaConf, open_dict

    from rlflow.config.describe import ENGINES, keys_of

    if config.get("model_engine") not in ENGINES[:1]:
        return []  # the keys of another engine lead nowhere; the checks say so
    defaults = keys_of()
    given = dict(changed(OmegaConf.to_container(config, resolve=False), defaults))
    notices: list[str] = []
    with open_dict(config):
        for key, value in given.items():
            new, moved = _target(config, key, value, problems)
            if new is None:
                continue
            if new != key and new in given and given[new] != moved:
                problems.append(f"{key}={value} and {new}={given[new]}: You have set both.\n    try:    {new} alone")
                continue
            OmegaConf.update(config, key, defaults[key])
            OmegaConf.update(config, new, moved, force_add=True)
            each = "" if moved == value else f"={moved}" if new == key else f"={moved}, for each process"
            notices.append(f"{key}={value} is an old place: it counts as {new}{each}")
        _choose_importlib(config, given)
    return notices


def _target(config: Any, key: str, value: Any, problems: list[str]) -> tuple[str | None, Any]:
    """(new key, its value) of a key at an old place, (None, None) for any other."""
    if key in _NO_PLACE and value is not None:
        problems.append(f"{key}={value} has no place any more.\n    try:    {_NO_PLACE[key]}")
    if key.startswith("reward_model.rollout."):
        return key.replace("reward_model.rollout.", f"{_SCORER}.rollout.", 1), value
    if key in OVER_ALL_RANKS and value is not None:
        return OVER_ALL_RANKS[key], _for_each(config, key, value, problems)
    if key == f"{_ROLLOUT}.load_format" and str(value).startswith("dummy_"):
        return key, "dummy"
    new = MOVED.get(key) or OTHER_PLACES.get(key)
    return (None, None) if new is None else (new, value)


def _for_each(config: Any, key: str, value: Any, problems: list[str]) -> Any:
    """Rows of each process of a number of rows over all; processes that share rows count as one."""
    role, engine = config.critic, config.critic.fsdp
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if not key.startswith("critic."):
        role = config.actor_rollout_ref.ref if key.startswith(_REF) else config.actor_rollout_ref.actor
        engine = role.fsdp_config
        if key.startswith(_REF) and role.enable_resource_pool:
            ranks = role.n_gpus_per_node * role.nnodes
    groups = max(1, ranks // max(1, engine.ulysses_sequence_parallel_size))
    if isinstance(value, int) and value >= groups and value % groups == 0:
        return value // groups
    fitting = max(groups, round(value / groups) * groups) if isinstance(value, int) else groups
    problems.append(
        f"{key}={value} does not divide over {groups} processes (must be >= n_gpus: a row for each at least)."
        f"\n    try:    {OVER_ALL_RANKS[key]}={max(1, fitting // groups)} (rows of each), or {key}={fitting}"
    )
    return value


def _choose_importlib(config: Any, given: dict[str, Any]) -> None:
    """A class given by its file at the old place was asked for by that alone."""
    if given.get("reward_model.reward_loop_module_path") and not given.get("reward_model.reward_loop_source"):
        config.reward.reward_manager.source = "importlib"
