"""The user's classes and functions that a configuration names are there, before anything starts.

Their source is read, not executed: importing them is the business of the process that runs them. What the source
cannot tell (compiled modules, names made at run time) passes here and is found there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.utils.errors import ConfigError
from rlflow.utils.source_names import SourceNames, find_source, read_names
from rlflow.utils.spelling import nearest

if TYPE_CHECKING:
    from rlflow.config.checks import TypedConfig


def check_user_names(c: TypedConfig, problems: list[str], notices: list[str]) -> None:
    """Reward function, reward manager, agent loops, data set, sampler: each problem goes to `problems`."""
    function = c.reward.custom_reward_function
    if function.path:
        _in_file("reward.custom_reward_function", function.path, function.name, "function", problems)
    _check_reward_manager(c, problems)
    for key, node in (
        ("data.custom_cls", c.data.custom_cls),
        ("trainer.v1.sampler.custom_sampler", c.trainer.v1.sampler.custom_sampler),
    ):
        if node.path and node.name:
            _in_file(key, node.path, node.name, "class", problems)
        elif node.path or node.name:
            problems.append(
                f"{key} needs both path and name; path={node.path or 'null'}, name={node.name or 'null'}.\n"
                f"    try:    {key}.path=/path/to/file.py {key}.name=ClassName"
            )
    manager = c.rollout.agent.agent_loop_manager_class
    if manager:
        _dotted("actor_rollout_ref.rollout.agent.agent_loop_manager_class", manager, problems)
    _check_agent_loops(c, problems)


def _check_reward_manager(c: TypedConfig, problems: list[str]) -> None:
    manager = c.reward.reward_manager
    if manager.source == "importlib":
        if manager.module.path:
            _in_file("reward.reward_manager.module", manager.module.path, manager.name, "class", problems, "name")
        return
    from rlflow.reward_loop.reward_manager.registry import known_names

    _choose("reward.reward_manager.name", manager.name, known_names(), problems)
    if manager.name == "dapo":
        from rlflow.reward_loop.reward_manager.dapo import OverlongPenalty

        try:
            OverlongPenalty.from_kwargs(c.reward.reward_kwargs, c.data.max_response_length)
        except ConfigError as error:
            problems.append(str(error))


def _check_agent_loops(c: TypedConfig, problems: list[str]) -> None:
    from rlflow.agent_loop.registry import known_names, read_entries

    node = "actor_rollout_ref.rollout.agent"
    names, complete = known_names(), True
    if c.rollout.agent.agent_loop_config_path:
        try:
            entries = read_entries(c.rollout.agent.agent_loop_config_path)
        except (ConfigError, FileNotFoundError) as error:
            problems.append(
                f"{node}.agent_loop_config_path={c.rollout.agent.agent_loop_config_path}: {error}\n"
                "    try:    a YAML list such as [{name: my_loop, _target_: my_package.my_module.MyLoop}]"
            )
            return
        names |= set(entries)
        for name, entry in entries.items():
            source = _dotted(f"{node}.agent_loop_config_path, entry {name!r}: _target_", entry["_target_"], problems)
            # The module is imported with its loop, and what it registers becomes known then.
            names |= source.registered if source is not None else set()
            complete &= source is not None
    if complete:
        _choose(f"{node}.default_agent_loop", c.rollout.agent.default_agent_loop, names, problems)


def _choose(key: str, value: str, names: Iterable[str], problems: list[str]) -> None:
    known = sorted(names)
    if value not in known:
        near = nearest(value, known) or known[0]
        problems.append(
            f"{key}={value} is unknown.\n    try:    {key}={near} (known: {', '.join(known)}), or import the module "
            "that registers it by actor_rollout_ref.model.external_lib"
        )


def _dotted(key: str, fqn: object, problems: list[str]) -> SourceNames | None:
    """Check `package.module.Class`; returns what its module defines, None when that cannot be told."""
    module, _, name = str(fqn).rpartition(".")
    if not module:
        problems.append(f"{key}={fqn} is no dotted name.\n    try:    package.module.Class")
        return None
    try:
        file = find_source(module)
    except ModuleNotFoundError as error:
        problems.append(
            f"{key}={fqn}: {error}.\n    try:    a module that Python finds here (PYTHONPATH, working directory)"
        )
        return None
    return None if file is None else _in_source(key, str(fqn), file, name, "class", problems)


def _in_file(key: str, path: str, name: str, kind: str, problems: list[str], name_key: str = "") -> None:
    """Check `name` in a file, or in a module given as pkg://."""
    if path.startswith("pkg://"):
        module = path.removeprefix("pkg://").strip("/").replace("/", ".")
        try:
            file = find_source(module)
        except ModuleNotFoundError as error:
            problems.append(f"{key}.path={path}: {error}.\n    try:    an absolute path, or pkg://package.module")
            return
        if file is None:
            return
    else:
        file = Path(path.removeprefix("file://")).expanduser()
        if not file.is_file():
            # The check of the reward function's file says so too, with a better hint.
            if key != "reward.custom_reward_function":
                problems.append(
                    f"{key}.path={path}: no such file.\n    try:    an absolute path, or pkg://package.module"
                )
            return
    where = f"{key.rpartition('.')[0]}.{name_key}" if name_key else f"{key}.name"
    _in_source(where, name, file, name, kind, problems)


def _in_source(key: str, value: str, file: Path, name: str, kind: str, problems: list[str]) -> SourceNames | None:
    try:
        names = read_names(file)
    except (SyntaxError, OSError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        problems.append(f"{key}={value}: {file}{line} cannot be read as Python: {error}\n    try:    correct the file")
        return None
    if name not in names:
        offered = sorted(n for n in (names.classes if kind == "class" else names.functions) if not n.startswith("_"))
        near = nearest(name, offered)
        problems.append(
            f"{key}={value}: {file} defines no {name}.\n    try:    "
            + (f"{near} " if near else "")
            + f"(it defines {', '.join(offered) or f'no public {kind}'})"
        )
        return None
    return names
