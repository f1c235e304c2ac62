"""Small tensor functions that algorithms and users' code share; often imported as `verl_F` or `F`.

    attention     soft-capped scores, masks of sliding windows
    masked        sums, means, variance and whitening under a mask
    logits        log-probabilities, entropy, sum of squared probabilities
    padding       sequences to one length, response masks
    schedules     learning rates
    distributed   the same statistics over the ranks of a process group

Needs torch only.
"""

from __future__ import annotations

from rlflow.utils.torch_functional.attention import soft_capped_attention, windowed_mask
from rlflow.utils.torch_functional.distributed import (
    allgather_dict_into_dict,
    allgather_dict_tensors,
    broadcast_dict_tensor,
    compute_grad_norm,
    distributed_masked_mean,
    distributed_mean_max_min_std,
    split_dict_tensor_into_batches,
)
from rlflow.utils.torch_functional.logits import (
    calculate_sum_pi_squared_from_logits,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    gather_from_labels,
    log_probs_from_logits_all_rmpad,
    log_probs_from_logits_response,
    log_probs_from_logits_response_rmpad,
    logprobs_from_logits,
    logprobs_from_logits_flash_attn,
    logprobs_from_logits_naive,
    logprobs_from_logits_v2,
    post_process_logits,
)
from rlflow.utils.torch_functional.masked import (
    at_least_fp32,
    clip_by_value,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from rlflow.utils.torch_functional.padding import (
    expand_as_nested,
    get_response_mask,
    get_unpad_data,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    remove_pad_token,
    tokenize_and_postprocess_data,
)
from rlflow.utils.torch_functional.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)

__all__ = [
    "allgather_dict_into_dict",
    "allgather_dict_tensors",
    "at_least_fp32",
    "broadcast_dict_tensor",
    "calculate_sum_pi_squared_from_logits",
    "clip_by_value",
    "compute_grad_norm",
    "distributed_masked_mean",
    "distributed_mean_max_min_std",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "expand_as_nested",
    "gather_from_labels",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_response_mask",
    "get_unpad_data",
    "get_wsd_schedule_with_warmup",
    "log_probs_from_logits_all_rmpad",
    "log_probs_from_logits_response",
    "log_probs_from_logits_response_rmpad",
    "logprobs_from_logits",
    "logprobs_from_logits_flash_attn",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "post_process_logits",
    "postprocess_data",
    "remove_pad_token",
    "soft_capped_attention",
    "split_dict_tensor_into_batches",
    "tokenize_and_postprocess_data",
    "windowed_mask",
]
