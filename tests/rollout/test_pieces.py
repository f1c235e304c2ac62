"""Answers in pieces: spans cover the tokens, log-probs are complete or absent, nothing of a piece is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.workers.rollout.base import RolloutError, TokenOutput
from rlflow.workers.rollout.pieces import checked, joined, joined_spans


def piece(tokens: int, version: int | None = 1, logs: bool = True, reason: str = "abort", **fields: Any) -> TokenOutput:
    return checked(
        TokenOutput(
            token_ids=list(range(tokens)),
            log_probs=[-0.5] * tokens if logs else None,
            stop_reason=reason,
            extra_fields={"global_steps": version, **fields},
        ),
        "s",
    )


def test_an_answer_without_spans_is_of_one_version() -> None:
    fields = piece(3, version=4).extra_fields
    assert fields["version_spans"] == [[4, 3]]
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (4, 4)
    assert piece(0).extra_fields["version_spans"] == []


@pytest.mark.parametrize(
    ("output", "match"),
    [
        (TokenOutput(token_ids=[1, 2], log_probs=[0.0]), "server s sent 2 tokens with 1 log-probs"),
        (TokenOutput(token_ids=[1, 2], extra_fields={"version_spans": [[1, 3]]}), r"2 tokens with version_spans=\[\["),
    ],
)  # fmt: skip
def test_what_does_not_belong_to_the_tokens_is_refused(output: TokenOutput, match: str) -> None:
    with pytest.raises(RolloutError, match=match):
        checked(output, "s")


def test_pieces_become_one_answer_with_everything_they_brought() -> None:
    first = piece(2, version=3, spec_num_draft_tokens=5, only_first=1, both="a")
    last = piece(3, version=4, reason="stop", spec_num_draft_tokens=2, both="b")
    first.num_preempted, last.num_preempted = 1, 2
    first.routed_experts, last.routed_experts = [[0]] * 6, [[1]] * 9  # prompt and tokens so far, each time
    whole = joined(joined(None, first), last)
    assert whole.token_ids == [0, 1, 0, 1, 2] and len(whole.log_probs or []) == 5 and whole.stop_reason == "stop"
    assert whole.num_preempted == 3 and whole.routed_experts == [[0]] * 6 + [[1]] * 3
    fields = whole.extra_fields
    assert fields["version_spans"] == [[3, 2], [4, 3]] and fields["global_steps"] == 4
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (3, 4)
    assert (fields["spec_num_draft_tokens"], fields["only_first"], fields["both"]) == (7, 1, "b")
    assert first.token_ids == [0, 1] and first.extra_fields["version_spans"] == [[3, 2]], "the piece is unchanged"


def test_a_piece_without_a_token_says_nothing_about_log_probs_or_versions() -> None:
    whole = joined(piece(0, version=9, logs=False), piece(2, version=10))
    assert whole.log_probs == [-0.5, -0.5] and whole.extra_fields["version_spans"] == [[10, 2]]
    assert whole.extra_fields["min_global_steps"] == 10
    assert joined(piece(2, logs=False), piece(1, logs=False)).log_probs is None
    with pytest.raises(RolloutError, match="another has none"):
        joined(piece(2), piece(1, logs=False))


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4), max_size=4))
def test_joined_spans_keep_the_version_of_each_token(parts: list[list[tuple[int, int]]]) -> None:
    def tokens(spans: Any) -> list[int]:
        return [version for version, count in spans for _ in range(count)]

    spans = joined_spans(*parts)
    assert tokens(spans) == [version for part in parts for version in tokens(part)]
    assert all(count for _, count in spans) and all(a[0] != b[0] for a, b in zip(spans, spans[1:], strict=False))
