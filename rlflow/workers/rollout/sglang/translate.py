"""Requests and answers between rlflow's vocabulary and SGLang's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlflow.workers.rollout.base import STOP_REASONS, RolloutError, SamplingParams, TokenOutput


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    """Whether tokens are sampled from a part of the vocabulary, so that its log-probs are not the model's."""
    return params.temperature > 0 and (params.top_p < 1 or 0 < params.top_k < vocab_size)


def sampling_arguments(
    params: SamplingParams, max_tokens: int, *, eos_token_ids: Collection[int], vocab_size: int, seed: int
) -> dict[str, Any]:
    """SGLang's sampling parameters.

    Every value is given, so that the model's own generation config decides nothing. `top_k` is always a number of
    tokens: SGLang reports the log-probs of a truncated distribution only for a finite one.
    """
    stop = set(params.stop_token_ids)
    if not params.ignore_eos:
        stop |= set(eos_token_ids)
    return {
        "max_new_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if 0 < params.top_k < vocab_size else (vocab_size if params.top_p < 1 else -1),
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": sorted(stop),
        # With it SGLang would ignore `stop_token_ids` as well; see `SGLangServer._run`.
        "ignore_eos": params.ignore_eos and not stop,
        "sampling_seed": seed,
    }


def log_probs_of(answer: Mapping[str, Any], params: SamplingParams, vocab_size: int) -> list[float]:
    """Log-probs of the sampled tokens, under the distribution they were sampled from.

    SGLang's `output_token_logprobs` know of the temperature and of penalties, not of top-k and top-p.

    Raises:
        RolloutError: not as many as tokens, or of other tokens.
    """
    tokens, meta = answer["output_ids"], answer["meta_info"]
    if is_truncated(params, vocab_size):
        values = [float(value) for value in meta.get("output_token_sampling_logprobs") or ()]
        named = tokens
    else:
        rows = meta.get("output_token_logprobs") or ()
        values, named = [float(row[0]) for row in rows], [row[1] for row in rows]
    if len(values) != len(tokens) or list(named) != list(tokens):
        raise RolloutError(
            f"SGLang returned {len(values)} log-probs for {len(tokens)} tokens of request {meta.get('id')} (finish "
            f"reason {meta.get('finish_reason')}). The sample cannot be trained on."
        )
    return values


def prompt_log_probs_of(answer: Mapping[str, Any], token_ids: list[int]) -> list[float]:
    """Log-prob of every prompt token but the first; `RolloutError` when they are not those of `token_ids`."""
    rows = answer["meta_info"].get("input_token_logprobs") or ()
    if [row[1] for row in rows] != token_ids:
        raise RolloutError(f"SGLang returned {len(rows)} prompt log-probs for a prompt of {len(token_ids)} tokens.")
    return [float(row[0]) for row in rows[1:]]


def stop_reason_of(answer: Mapping[str, Any]) -> tuple[str, str]:
    """(one of STOP_REASONS, what SGLang called it).

    Raises:
        RolloutError: a reason that is none of them.
    """
    reason = answer["meta_info"].get("finish_reason") or {}
    kind = str(reason.get("type"))
    if kind not in STOP_REASONS:
        raise RolloutError(f"SGLang ended request {answer['meta_info'].get('id')} with the unknown reason {reason}.")
    detail = reason.get("matched", reason.get("message"))
    return kind, kind if detail is None else f"{kind}: {detail}"


def version_spans_of(answer: Mapping[str, Any]) -> list[list[int]]:
    """[[weight version, tokens], ...] in order, covering all tokens."""
    spans = answer["meta_info"].get("weight_versions") or ()
    found = [[int(span["version"]), span["end"] - span["start"]] for span in spans if span["end"] > span["start"]]
    covered = sum(count for _, count in found)
    if covered != len(answer["output_ids"]):
        raise RolloutError(
            f"SGLang named the weight version of {covered} of {len(answer['output_ids'])} tokens: {list(spans)}."
        )
    return found


def token_output(
    tokens: list[int],
    log_probs: list[float],
    params: SamplingParams,
    reason: str,
    raw: str,
    spans: list[list[int]],
    version: int | None,
) -> TokenOutput:
    """rlflow's answer. `version`: of the present weights, for an answer without tokens."""
    return TokenOutput(
        token_ids=tokens,
        log_probs=log_probs if params.logprobs else None,
        stop_reason=reason,
        extra_fields={
            "global_steps": spans[-1][0] if spans else version,
            "raw_stop_reason": raw,
            "version_spans": _joined(spans),
        },
    )


def _joined(spans: list[list[int]]) -> list[list[int]]:
    """Neighbours of one version become one span."""
    result: list[list[int]] = []
    for version, count in spans:
        if result and result[-1][0] == version:
            result[-1][1] += count
        else:
            result.append([version, count])
    return result
