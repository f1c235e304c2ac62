"""What an agent loop returns."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlflow.utils.errors import ContractError


class AgentLoopMetrics(BaseModel):
    """Where a session's time went, in seconds; `num_preempted` counts engine preemptions, -1 = unknown."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """One trajectory: a prompt and what followed it.

    Fields:
        prompt_ids: tokens before the first one the model wrote.
        response_ids: everything after; the model's tokens and those of tools.
        response_mask: 1 for the model's tokens, 0 for observations; as long as response_ids.
        response_logprobs: log-probability of each token under the policy that sampled it, 0.0 for observations.
        reward_score: set by loops that score themselves; reward workers are then not asked.
        num_turns: messages of the conversation, user and assistant.
        extra_fields: anything JSON-like; stored with the row, handed to the reward function in extra_info.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None

    def check(self, response_length: int, loop_name: str) -> None:
        """Raise `ContractError` when the parts do not fit each other or the response is over its budget."""
        n = len(self.response_ids)
        if len(self.response_mask) != n:
            raise ContractError(
                f"agent loop {loop_name}: response_mask has {len(self.response_mask)} entries for {n} response tokens"
            )
        if self.response_logprobs is not None and len(self.response_logprobs) != n:
            raise ContractError(
                f"agent loop {loop_name}: response_logprobs has {len(self.response_logprobs)} entries for {n} "
                "response tokens; observations count, with 0.0"
            )
        if n > response_length:
            raise ContractError(
                f"agent loop {loop_name}: a response of {n} tokens is over rollout.response_length={response_length}; "
                "cut response_ids, response_mask and response_logprobs to it"
            )
        if not self.prompt_ids:
            raise ContractError(f"agent loop {loop_name}: prompt_ids is empty; a model needs a token to start from")

    def as_dict(self) -> dict[str, Any]:
        """The stored fields of the row that follow from this output.

        Tensors: prompts [p], responses [r], response_mask [r] int64; rollout_log_probs [r] float32 when there are
        log-probs; rm_scores [r] float32 when there is a score, which sits on the last token the model wrote (on the
        last token when it wrote none; nowhere in an empty response). Objects: num_turns, metrics (dict), extra_fields.
        """
        import torch

        fields: dict[str, Any] = {
            "prompts": torch.tensor(self.prompt_ids, dtype=torch.int64),
            "responses": torch.tensor(self.response_ids, dtype=torch.int64),
            "response_mask": torch.tensor(self.response_mask, dtype=torch.int64),
            "num_turns": self.num_turns,
            "metrics": self.metrics.model_dump(),
            "extra_fields": dict(self.extra_fields),
        }
        if self.response_logprobs is not None:
            fields["rollout_log_probs"] = torch.tensor(self.response_logprobs, dtype=torch.float32)
        if self.reward_score is not None:
            scores = torch.zeros(len(self.response_ids), dtype=torch.float32)
            if self.response_ids:
                scores[score_position(self.response_mask)] = self.reward_score
            fields["rm_scores"] = scores
        return fields


def score_position(response_mask: list[int]) -> int:
    """Where a score stands in a response of at least one token: on the last one that the model wrote, else at the
    end.
    """
    written = [i for i, mask in enumerate(response_mask) if mask]
    return written[-1] if written else len(response_mask) - 1
