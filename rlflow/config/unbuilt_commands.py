"""Commands for a training engine or a trainer that is not in this version, read as if they were written for ours.

So that they get one answer: which keys have a counterpart, which have none, and everything else that is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.config.command_line import ASYNC_TREES
from rlflow.config.overrides import CONFIG_NAME, OverrideProblem

ENGINES = ("megatron", "veomni", "torchtitan", "mindspeed")
_TREES = {"ppo_megatron_trainer": "megatron"}
# Names below an engine's node -> those of FSDP's; a name that starts with two dots belongs to the role above it.
_COUNTERPARTS = {
    "param_offload": "param_offload",
    "optimizer_offload": "optimizer_offload",
    "dtype": "dtype",
    "context_parallel_size": "..ulysses_sequence_parallel_size",
    "ulysses_parallel_size": "..ulysses_sequence_parallel_size",
}
_OPTIM = {"lr_decay_style": "lr_scheduler_type"}


_MODE, _MODES = "trainer.v1.trainer_mode", ("separate_async", "colocate_async")
# Keys, and nodes with a final dot, that only the asynchronous trainers' trees have or give another meaning.
_ASYNC_KEYS = ("async_training.", "rollout.", "actor_rollout_ref.hybrid_engine", _MODE)


def read_as_built(overrides: Sequence[str], config_name: str) -> tuple[list[str], str, list[OverrideProblem]]:
    """The command for the FSDP engine and the synchronous trainer.

    Returns:
        (overrides, name of the tree, a problem for each change that says what was changed); all as given, and no
        problem, where the command asks for neither.
    """
    texts, problem = as_sync(overrides, config_name)
    texts, config_name, other = as_fsdp(texts, CONFIG_NAME if config_name in ASYNC_TREES else config_name)
    return texts, config_name, [one for one in (problem, other) if one is not None]


def as_sync(overrides: Sequence[str], config_name: str) -> tuple[list[str], OverrideProblem | None]:
    """The overrides for the synchronous trainer, and the problem when they asked for another one."""
    keys = {text: text.partition("=")[0].lstrip("+~") for text in overrides}
    modes = [text.partition("=")[2].strip() for text, key in keys.items() if key == _MODE]
    asks = config_name in ASYNC_TREES or any(key.startswith("async_training.") for key in keys.values())
    if not asks and not (modes and modes[-1] in _MODES):
        return list(overrides), None
    without = [
        text
        for text, key in keys.items()
        if any(key == one or (one.endswith(".") and key.startswith(one)) for one in _ASYNC_KEYS)
    ]
    named = [keys[text] for text in without if keys[text] != _MODE]
    left_out = f", without {', '.join(dict.fromkeys(named))}" if named else ""
    what = f"{_MODE}={modes[-1]}" if modes else f"{(named or [config_name])[0]}"
    tree = f"--config-name={CONFIG_NAME} " if config_name in ASYNC_TREES else ""
    return [text for text in overrides if text not in without], OverrideProblem(
        f"{what} asks for an asynchronous trainer: it is not in this version.\n    set in: command line\n"
        f"    try:    {tree}{_MODE}=sync{left_out}",
        (_MODE, *named),
    )


def as_fsdp(overrides: Sequence[str], config_name: str) -> tuple[list[str], str, OverrideProblem | None]:
    """The command for the FSDP engine.

    Returns:
        (overrides, name of the tree, the problem that says what was changed). Without another engine both are as
        given and the problem is None.
    """
    choices = [text for text in overrides if text.partition("=")[0].lstrip("+") == "model_engine"]
    engine = choices[-1].partition("=")[2].strip() if choices else _TREES.get(config_name, "")
    if engine not in ENGINES:
        return list(overrides), config_name, None
    kept, instead, without = [], [], []
    for text in overrides:
        other = _for_fsdp(text, engine)
        if other == text:
            kept.append(text)
        elif other:
            instead.append(other)
        elif text not in choices:
            without.append(text.partition("=")[0].lstrip("+"))
    advice = ["model_engine=dp", *instead]
    if config_name in _TREES:
        config_name = CONFIG_NAME
        advice.insert(0, f"--config-name={CONFIG_NAME}")
    left_out = f", without {', '.join(dict.fromkeys(without))}" if without else ""
    where = "command line" if choices else "--config-name"
    return (
        [*kept, *instead],
        config_name,
        OverrideProblem(
            f"model_engine={engine}: that training engine is not in this version; FSDP shards each model over all "
            f"processes (docs/from_verl.md).\n    set in: {where}\n    try:    {' '.join(advice)}{left_out}",
            ("model_engine",),
        ),
    )


def _for_fsdp(text: str, engine: str) -> str | None:
    """An override with FSDP's key and value, as it is where it means the same there; None: FSDP has no such thing."""
    written, sign, value = text.partition("=")
    key = written.lstrip("+~")
    node, found, name = key.partition(f".{engine}.")
    if found:
        other = _COUNTERPARTS.get(name)
        slot = "fsdp" if node == "critic" else "fsdp_config"
        if other is None:
            return None
        return f"{node}{other[1:]}={value}" if other.startswith("..") else f"{node}.{slot}.{other}={value}"
    if "@" in key or key == "model_engine" or (key.endswith(".strategy") and value == engine):
        return None
    node, found, name = key.partition(".optim.")
    if found and not _known(key):
        return f"{node}.optim.{_OPTIM[name]}={value}" if name in _OPTIM else None
    return text


def _known(key: str) -> bool:
    from rlflow.config.describe import keys_of

    tree = keys_of()
    parts = key.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts)))
    return key in tree or any(tree.get(node) == {} for node in above)  # an empty group takes any option
