"""Answers in pieces: which weights wrote which token, and one answer out of several.

    version_spans   [[version, tokens], ...] in `extra_fields`: the first `tokens` tokens are of `version`, and so on

Invariants
    - The spans of an answer cover its tokens exactly; neighbours differ in their version.
    - Log-probs are there for every token of an answer or for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlflow.workers.rollout.base import RolloutError, TokenOutput

SPANS = "version_spans"
_COUNTERS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")


def checked(output: TokenOutput, server_id: str) -> TokenOutput:
    """The answer of a server with its spans and version range filled in.

    Raises:
        RolloutError: log-probs or spans do not match the tokens; names the server.
    """
    tokens = len(output.token_ids)
    if output.log_probs is not None and len(output.log_probs) != tokens:
        raise RolloutError(
            f"Rollout server {server_id} sent {tokens} tokens with {len(output.log_probs)} log-probs; they cannot be "
            "told apart. This is a defect of its adapter."
        )
    fields = output.extra_fields
    if fields.get(SPANS) is None:
        version = fields.get("global_steps")
        fields[SPANS] = [[version, tokens]] if tokens and version is not None else []
    elif sum(count for _, count in fields[SPANS]) != tokens:
        raise RolloutError(f"Rollout server {server_id} sent {tokens} tokens with version_spans={fields[SPANS]}.")
    _note_range(fields)
    return output


def joined(before: TokenOutput | None, piece: TokenOutput) -> TokenOutput:
    """`before` continued by `piece`: both as `checked` returns them.

    Later extra fields win, but for counters, which are summed, and the spans, which are joined. Routing rows of the
    continued prompt are those of `before`; `piece` adds only the rows of its own tokens.

    Raises:
        RolloutError: one of them has log-probs, the other has none.
    """
    if before is None:
        return piece.model_copy(deep=True)
    fields = {**before.extra_fields, **piece.extra_fields}
    for name in _COUNTERS:
        if name in before.extra_fields and name in piece.extra_fields:
            fields[name] = before.extra_fields[name] + piece.extra_fields[name]
    fields[SPANS] = joined_spans(before.extra_fields[SPANS], piece.extra_fields[SPANS])
    _note_range(fields)
    preempted = [p for p in (before.num_preempted, piece.num_preempted) if p is not None]
    return TokenOutput(
        token_ids=before.token_ids + piece.token_ids,
        log_probs=_joined_log_probs(before, piece),
        routed_experts=_joined_routing(before, piece),
        stop_reason=piece.stop_reason,
        num_preempted=sum(preempted) if preempted else None,
        extra_fields=fields,
    )


def joined_spans(*parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Spans one after the other; neighbours of one version become one."""
    spans: list[list[Any]] = []
    for version, count in (span for part in parts for span in part if span[1]):
        if spans and spans[-1][0] == version:
            spans[-1][1] += count
        else:
            spans.append([version, count])
    return spans


def _joined_log_probs(before: TokenOutput, piece: TokenOutput) -> list[float] | None:
    # An answer without a token says nothing about whether its engine sends log-probs.
    parts = [part for part in (before, piece) if part.token_ids] or [piece]
    values = [part.log_probs for part in parts]
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise RolloutError("One piece of an interrupted generation has log-probs, another has none.")
    return [value for part in values for value in part or []]


def _joined_routing(before: TokenOutput, piece: TokenOutput) -> Any:
    new = len(piece.token_ids)
    if before.routed_experts is None or piece.routed_experts is None or not new:
        return before.routed_experts if before.routed_experts is not None else piece.routed_experts
    if hasattr(before.routed_experts, "shape"):
        import numpy as np

        return np.concatenate([before.routed_experts, piece.routed_experts[-new:]])
    return [*before.routed_experts, *piece.routed_experts[-new:]]


def _note_range(fields: dict[str, Any]) -> None:
    versions = [version for version, _ in fields[SPANS] if version is not None]
    if versions:
        fields["min_global_steps"], fields["max_global_steps"] = min(versions), max(versions)
    else:  # no token says which weights were used
        fields.setdefault("min_global_steps", fields.get("global_steps"))
        fields.setdefault("max_global_steps", fields.get("global_steps"))
