"""What some advantage estimators need beside scores and log-probs, gathered from the rows of a batch.

remax                      reward_baselines: score of the greedy session of the row's prompt (its tag)
gdpo                       components: the numbers its reward function returned under `gdpo_reward_keys`
optimal token baselines    sum_pi_squared: a field that the log-prob pass writes when it is asked to
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import rlflow.transfer_queue as tq
from rlflow.config.algorithm_checks import OPTIMAL_TOKEN_BASELINES
from rlflow.trainer.ppo.advantage import OPTIONAL_FIELDS, READ_FIELDS
from rlflow.trainer.ppo.batching import partition_of, real_rows
from rlflow.trainer.ppo.core_algos import get_adv_estimator_fn, get_outcome_fn
from rlflow.trainer.ppo.dumps import reward_extras
from rlflow.trainer.ppo.metric_utils import spread
from rlflow.trainer.ppo.replay_buffer import final_outputs, uid_of
from rlflow.trainer.ppo.reward_values import reward_number
from rlflow.transfer_queue import KVBatchMeta

KEYS = "algorithm.gdpo_reward_keys"


def wants_sum_pi_squared(config: Any) -> bool:
    """Whether the log-prob pass is to write `sum_pi_squared`."""
    asked = config.actor_rollout_ref.actor.calculate_sum_pi_squared
    return bool(asked or config.algorithm.adv_estimator in OPTIMAL_TOKEN_BASELINES)


def optional_fields(config: Any) -> tuple[str, ...]:
    """What the advantage stage of a run reads, where it is there, beside scores and mask: the fields of its estimator
    (all there can be for one of the user's), those of a KL penalty in the reward, and `values` for their metrics.
    """
    name = config.algorithm.adv_estimator
    wanted = {"values"}
    if get_outcome_fn(get_adv_estimator_fn(name)) is None:
        wanted |= set(READ_FIELDS.get(name, OPTIONAL_FIELDS))
    if config.algorithm.use_kl_in_reward:
        wanted |= {"old_log_probs", "ref_log_prob"}
    return tuple(field for field in OPTIONAL_FIELDS if field in wanted)


def reward_baselines(batch: KVBatchMeta, metrics: dict[str, Any]) -> Tensor:
    """The greedy score of each row's prompt, fp32 [B]; NaN without one. Adds `remax/baseline_score/*`, over prompts."""
    scores = {batch.keys[row]: batch.tags[row].get("reward_baseline") for row in real_rows(batch)}
    of_prompt = {uid_of(key): float(score) for key, score in scores.items() if score is not None}
    metrics.update(spread("remax/baseline_score", torch.tensor(list(of_prompt.values()))))
    return torch.tensor([of_prompt.get(uid_of(key), math.nan) for key in batch.keys])


def reward_components(batch: KVBatchMeta, names: list[str], metrics: dict[str, Any]) -> dict[str, Tensor]:
    """The rewards of each row by name, fp32 [B] each; NaN for padding and for rows with an invalid reward.

    Adds `gdpo/{name}/{mean,std,max,min}` over the last outputs of sessions with a valid reward (std: population).

    Raises:
        RewardError: a row whose reward function returned no finite number under a name.
    """
    real = real_rows(batch)
    keys, tags = [batch.keys[row] for row in real], [batch.tags[row] for row in real]
    infos = reward_extras(tq.kv_batch_get(keys, partition_of(batch), ["extra_fields"]), tags)
    rows = list(zip(keys, tags, infos, strict=True))
    counted = [row for row in final_outputs(keys) if not tags[row].get("invalid")]
    components = {}
    for name in names:
        own = [math.nan if tag.get("invalid") else reward_number(info, name, key, KEYS) for key, tag, info in rows]
        values = torch.full((len(batch),), math.nan)
        values[torch.tensor(real)] = torch.tensor(own)
        components[name] = values
        shown = torch.tensor([own[row] for row in counted])
        std = shown.std(correction=0).item() if counted else math.nan
        metrics.update({**spread(f"gdpo/{name}", shown), f"gdpo/{name}/std": std})
    return components
