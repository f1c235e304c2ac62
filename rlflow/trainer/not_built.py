"""Jobs whose configuration is known and whose work is not in this version: they check the command line and say so."""

from __future__ import annotations

import sys
from collections.abc import Sequence

BAD_INPUT = 2


def refuse(job: str, config_name: str, instead: str, arguments: Sequence[str] | None = None) -> int:
    """Say what is wrong with the command line, and that the job is not in this version. Returns the exit code, 2."""
    from rlflow.config.command_line import read_command_line
    from rlflow.config.overrides import compose_config
    from rlflow.utils.errors import ConfigError

    try:
        line = read_command_line(sys.argv[1:] if arguments is None else arguments, config_name)
        if line.problems:
            raise ConfigError("\n".join(line.problems))
        compose_config(line.overrides, line.config)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
    sys.stderr.write(f"error: {job} is not in this version of rlflow.\n    try:    {instead}\n")
    return BAD_INPUT
