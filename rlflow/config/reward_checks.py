"""Checks of `reward.reward_model`: what can be known before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.config import problems as problem
from rlflow.config.reward_heads import head_problem

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig

NODE = "reward.reward_model"


def check_reward_model(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """The model, its place, and what cannot be combined with it."""
    model = c.reward.reward_model
    if not model.enable:
        without_effect = ["enable_resource_pool=true"] if model.enable_resource_pool else []
        without_effect += [f"model_path={model.model_path}"] if model.model_path else []
        if without_effect:
            set_keys = ", ".join(f"{NODE}.{item}" for item in without_effect)
            notices.append(f"{set_keys}: no model scores, because {NODE}.enable is false")
        return
    _check_model(model.model_path, problems)
    _check_servers(model.rollout, problems)
    if model.enable_resource_pool:
        problems.extend(problem.below(f"{NODE}.nnodes", model.nnodes, 1))
        problems.extend(problem.below(f"{NODE}.n_gpus_per_node", model.n_gpus_per_node, 1))
    else:
        _check_colocated(c, problems)
    _check_names(c, problems)
    manager = c.reward.reward_manager
    if not c.reward.custom_reward_function.path and (manager.source, manager.name) == ("register", "dapo"):
        problems.append(
            "reward.reward_manager.name=dapo shapes the score of a reward function; a reward model is asked without "
            "it.\n    try:    reward.custom_reward_function.path=... (it may ask the model), or "
            "reward.reward_manager.name=naive"
        )


def _check_names(c: TypedConfig, problems: list[str]) -> None:
    """Where the model alone scores, `score` is the only number beside the reward."""
    manager, agent = c.reward.reward_manager, c.rollout.agent
    users_own = c.reward.custom_reward_function.path or agent.agent_loop_config_path or agent.agent_loop_manager_class
    if users_own or (manager.source, manager.name) != ("register", "naive"):
        return
    asked = {"algorithm.gdpo_reward_keys": list(c.algorithm.gdpo_reward_keys or [])}
    if c.algorithm.filter_groups.enable and c.algorithm.filter_groups.metric:
        asked["algorithm.filter_groups.metric"] = [c.algorithm.filter_groups.metric]
    for key, names in asked.items():
        unknown = [name for name in names if name != "score"]
        if unknown:
            problems.append(
                f"{key} asks for {', '.join(unknown)}, and a reward model says one number, `score`.\n"
                f"    try:    {key}={'[score]' if key.endswith('keys') else 'score'}, or a "
                "reward.custom_reward_function.path that returns the others (it may ask the model)"
            )


def _check_model(path: str | None, problems: list[str]) -> None:
    key = f"{NODE}.model_path"
    if not path:
        problems.append(f"{key} is not set, and {NODE}.enable=true needs a model.\n    try:    {key}=/path/to/model")
        return
    if problem.is_missing_folder(path):
        problems.append(
            f"{key}={path}: no config.json there, so it is not a Hugging Face model folder.\n"
            "    try:    a folder made by save_pretrained, or a hub id"
        )
        return
    config = _model_config(path)
    if config is not None:
        found = head_problem(path, config.get("architectures") or [], _num_labels(config))
        problems.extend([found] if found else [])


def _model_config(path: str) -> dict[str, Any] | None:
    """The config of a model in a local folder; None for one on the hub, or where nothing can be told."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _num_labels(config: dict[str, Any]) -> int:
    """As transformers reads it: two unless the config names its labels."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) and labels else int(config.get("num_labels") or 2)


def _check_servers(rollout: Any, problems: list[str]) -> None:
    node = f"{NODE}.rollout"
    if rollout.name != "hf":
        problems.append(problem.choice(f"{node}.name", rollout.name, ["hf"], "serves no reward models in this version"))
    if rollout.dtype not in ("bfloat16", "float32", "bf16", "fp32"):
        problems.append(problem.choice(f"{node}.dtype", rollout.dtype, ("bfloat16", "float32")))
    at_least = [
        ("prompt_length", rollout.prompt_length, 1),
        ("response_length", rollout.response_length, 1),
        ("max_model_len", 1 if rollout.max_model_len is None else rollout.max_model_len, 1),
        ("max_num_seqs", rollout.max_num_seqs, 1),
        ("max_num_batched_tokens", rollout.max_num_batched_tokens, 1),
        ("request_timeout_s", rollout.request_timeout_s, 1e-9),
    ]
    for name, value, low in at_least:
        problems.extend(problem.below(f"{node}.{name}", value, low))


def _check_colocated(c: TypedConfig, problems: list[str]) -> None:
    """What needs scores while sessions run cannot wait for a model that scores after them."""
    own_pool = f"{NODE}.enable_resource_pool=true (with nnodes and n_gpus_per_node)"
    if c.algorithm.filter_groups.enable:
        problems.append(
            f"algorithm.filter_groups.enable=true drops groups while sampling, when a colocated reward model has not "
            f"scored them yet.\n    try:    {own_pool}, or algorithm.filter_groups.enable=false"
        )
    if c.algorithm.adv_estimator == "remax":
        problems.append(
            f"algorithm.adv_estimator=remax needs the score of a greedy session at its end, and a colocated reward "
            f"model scores later.\n    try:    {own_pool}, or algorithm.adv_estimator=rloo"
        )
