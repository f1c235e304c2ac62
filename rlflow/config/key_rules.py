"""The keys that are not honoured, and why; see `rlflow.config.key_states`."""

from __future__ import annotations

from rlflow.config.key_states import Rule, inert

RULES: tuple[Rule, ...] = (
    inert("data.reward_fn_key", "the scorer is chosen by the column data_source, which rows always have"),
)
