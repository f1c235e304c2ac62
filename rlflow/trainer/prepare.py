"""From a command line to a configuration that can run: composed, fitted to the machine, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def prepare_config(arguments: Sequence[str], notice: Callable[[str], None]) -> Any:
    """The checked `DictConfig` of a command line; `notice` is told what was changed, and what deserves a line.

    Raises:
        ConfigError: all problems, each with where it was set and what to try.
    """
    from rlflow.config.checks import validate_config
    from rlflow.config.command_line import read_command_line
    from rlflow.config.machine import clamp_to_machine
    from rlflow.config.old_keys import move_old_keys
    from rlflow.config.overrides import OverrideProblem, compose_what_can_be
    from rlflow.config.targets import drop_targets
    from rlflow.config.trackers import fit_default_trackers
    from rlflow.config.unbuilt_commands import read_as_built
    from rlflow.trainer.name_checks import check_user_names
    from rlflow.utils.device import auto_set_device, cpu_cores
    from rlflow.utils.verl_environment import add_external_modules, adopt_verl_variables

    line = read_command_line(arguments)
    overrides, tree, unbuilt = read_as_built(line.overrides, line.config)
    config, unusable = compose_what_can_be(overrides, tree)
    early = [OverrideProblem(text) for text in line.problems] + unbuilt
    late: list[str] = []
    typed = drop_targets(config, late)
    auto_set_device(config)
    changes = (typed, clamp_to_machine(config, cpu_cores()), fit_default_trackers(config, overrides))
    moved = (*adopt_verl_variables(), add_external_modules(config), *move_old_keys(config, late))
    for text in filter(None, (*line.notices, *changes, *moved)):
        notice(text)
    for text in validate_config(
        config, check_user_names, overrides=overrides, unusable=[*early, *unusable], found=late
    ):
        notice(text)
    return config
