"""`main_ppo --plan` and `rlflow plan`: print the plan of a command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

BAD_INPUT = 2


def print_plan(arguments: Sequence[str], as_json: bool = False) -> int:
    """Print the plan of the overrides among `arguments`; the flags --plan and --json are taken out.

    Returns the exit code: 0, or 2 when the configuration cannot work (its problems are on stderr).
    """
    from rlflow.trainer.plan import make_plan
    from rlflow.trainer.plan.text import render_plan
    from rlflow.utils.errors import ConfigError, DataError
    from rlflow.utils.redact import redact_text, remember_arguments

    as_json = as_json or "--json" in arguments
    overrides = [text for text in arguments if text not in ("--plan", "--json")]
    remember_arguments(overrides)
    try:
        plan = make_plan(overrides)
    except (ConfigError, DataError) as error:
        sys.stderr.write(f"error: {redact_text(str(error))}\n")
        return BAD_INPUT
    # ASCII in JSON: whatever the terminal's encoding is.
    text = json.dumps(plan.as_dict(), indent=2, default=str) if as_json else render_plan(plan)
    sys.stdout.write(text + "\n")
    return 0
