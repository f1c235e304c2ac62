"""A request in vLLM's terms, and vLLM's answer in ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.utils.errors import ContractError
from rlflow.workers.rollout.base import SamplingParams, TokenOutput

# What vLLM understands beyond `SamplingParams`; passed on as it is.
MORE_SAMPLING = ("min_p", "min_tokens", "presence_penalty", "frequency_penalty", "logit_bias")

# vLLM's finish reasons that mean the same under another name; anything unknown is kept as it is.
_STOP_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
# vLLM draws from a generator that takes signed 64-bit seeds.
_SEED_BITS = 63


def read_sampling(params: Mapping[str, Any], *, ignore_eos: bool) -> tuple[SamplingParams, dict[str, Any]]:
    """The common part of a request's parameters, and vLLM's own. `ContractError` for others."""
    own = {key: params[key] for key in MORE_SAMPLING if params.get(key) is not None}
    common = {key: value for key, value in params.items() if key not in MORE_SAMPLING}
    return SamplingParams.from_dict(common, ignore_eos=ignore_eos), own


def engine_sampling(
    params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], own: Mapping[str, Any] | None = None
) -> Any:
    """`vllm.SamplingParams` of a request.

    Args:
        stop_ids: the model's end-of-sequence tokens.
        own: parameters among `MORE_SAMPLING`.

    Raises:
        ContractError: vLLM refuses a value.
    """
    from vllm import SamplingParams as EngineSampling
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    try:
        return EngineSampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            repetition_penalty=params.repetition_penalty,
            logprobs=0 if params.logprobs else None,  # 0 = of the sampled token only
            max_tokens=max_tokens,
            # They are ours to say: without a tokenizer vLLM knows none, and with one it may know fewer.
            stop_token_ids=sorted(frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stop_ids)),
            ignore_eos=True,
            seed=None if params.seed is None else params.seed % 2**_SEED_BITS,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **(own or {}),
        )
    except (TypeError, ValueError, VLLMClientError) as error:
        raise ContractError(f"vLLM refuses sampling_params: {error}") from error


def token_output(answer: Any, *, wants_log_probs: bool, version: int | None) -> TokenOutput:
    """vLLM's final `RequestOutput` as a `TokenOutput`; tokens and log-probs are equally many."""
    completion = answer.outputs[0]
    tokens = list(completion.token_ids)
    log_probs = None
    if wants_log_probs:
        rows = completion.logprobs or []
        # An abort may come between a token and its log-prob.
        tokens = tokens[: len(rows)]
        log_probs = [float(row[token].logprob) for row, token in zip(rows, tokens, strict=False)]
    raw = str(completion.finish_reason)
    return TokenOutput(
        token_ids=tokens,
        log_probs=log_probs,
        stop_reason=_STOP_REASONS.get(raw, raw),
        extra_fields=version_fields(raw, version, len(tokens)),
    )


def aborted_before_start(version: int | None, *, wants_log_probs: bool) -> TokenOutput:
    """The answer to a request that was aborted while it waited."""
    return TokenOutput(
        token_ids=[],
        log_probs=[] if wants_log_probs else None,
        stop_reason="abort",
        extra_fields=version_fields("abort", version, 0),
    )


def version_fields(raw: str, version: int | None, tokens: int) -> dict[str, Any]:
    """`extra_fields` of an answer: a request sees one version, because an update ends all requests."""
    return {"global_steps": version, "raw_stop_reason": raw, "version_spans": [[version, tokens]] if tokens else []}
