"""Do rollout and trainer agree: distance of their log-probs, weight versions, and the correction for it."""

from __future__ import annotations

from rlflow.observe.glossary.entry import AS_NAMED, LAST, MAX, MIN, SUM, Entry

AGREEMENT = (
    Entry(
        "training/rollout_log_probs_diff/{mean,max}",
        "absolute difference of log-probs, tokens the policy wrote",
        "nats",
        AS_NAMED,
        "the mean grows over steps, or jumps after a weight sync",
    ),
    Entry("training/rollout_probs_diff_{mean,max,std}", "the same for probabilities", combine=AS_NAMED),
    Entry(
        "training/rollout_probs_diff_valid",
        "1 when there was a token to compare, else 0 (the others are NaN then)",
        combine=LAST,
        alarming="0",
    ),
    Entry(
        "training/rollout_actor_probs_pearson_corr",
        "correlation of the two probabilities; NaN when one of them does not vary",
        alarming="clearly below 1",
    ),
    Entry(
        "training/off_policy/trajectory_spans/{mean,max,min}",
        "weight versions that took part in a trajectory; 1 in sync mode",
        "versions",
        AS_NAMED,
        "above 1 in sync mode",
    ),
    Entry(
        "training/off_policy/trajectory_staleness/{mean,max,min}",
        "versions between the newest weights and those that finished the trajectory; 0 in sync mode",
        "versions",
        AS_NAMED,
        "above 0 in sync mode",
    ),
    Entry(
        "training/off_policy/trajectory_staleness_worst/{mean,max,min}",
        "the same for the weights that began it",
        "versions",
        AS_NAMED,
        "the same",
    ),
    Entry("weight_sync/version", "version that the servers hold after the step", "version", LAST, "not the step"),
    Entry(
        "weight_sync/{tensor_count,replicas}",
        "what each server confirmed, and how many did",
        combine=LAST,
        alarming="changes between steps",
    ),
    Entry("weight_sync/bytes", "the same in bytes", "bytes", LAST, "changes between steps"),
    Entry("weight_sync/seconds", "time of the sync", "s", SUM),
    Entry(
        "weight_sync/{pause,prepare,transfer,verify,commit,resume}_s",
        "of it: requests end, both ends get ready, the bytes, receipts, every replica confirms, requests are admitted",
        "s",
        SUM,
        "one of them near its rollout.checkpoint_engine.*_timeout_s",
    ),
    Entry(
        "weight_sync/canary_error",
        "mean difference of the canary prompt's log-probs, server against actor; worst replica",
        "nats",
        LAST,
        "grows, or near rollout.checkpoint_engine.canary_tolerance",
    ),
    Entry("weight_sync/lora_modules", "layers that compute with the adapter that was sent", "modules", LAST, "changes"),
    Entry("weight_sync/base_bytes", "base weights that were sent before the adapter", "bytes", LAST),
    Entry("weight_sync/{buckets,files}", "pieces in which a broadcast or the disk carried the weights", combine=LAST),
)

CORRECTION = (
    Entry("rollout_corr/{training_ppl,rollout_ppl}", "perplexity of a response under the trainer, the rollout engine"),
    Entry("rollout_corr/{training_log_ppl,rollout_log_ppl}", "their logarithms", "nats"),
    Entry(
        "rollout_corr/{kl,k3_kl}",
        "KL of the rollout policy to the trainer's: mean of -u, and the k3 estimate, mean of exp(u) - u - 1",
        "nats",
        alarming="grows over steps: the two no longer are the same policy",
    ),
    Entry(
        "rollout_corr/{log_ppl_diff,log_ppl_abs_diff}",
        "difference of mean log-probs of a response, rollout minus trainer, and its absolute value",
        "nats",
        alarming="away from 0",
    ),
    Entry("rollout_corr/log_ppl_diff_max", "largest of these differences", "nats", MAX),
    Entry("rollout_corr/log_ppl_diff_min", "smallest of them", "nats", MIN),
    Entry("rollout_corr/ppl_ratio", "mean of exp(difference)", alarming="away from 1"),
    Entry(
        "rollout_corr/{chi2_token,chi2_seq}",
        "chi-square divergence, per token and per sequence: variance of the importance weights",
        alarming="above 1: a few samples decide the update",
    ),
    Entry(
        "rollout_corr/rollout_is_{mean,std}",
        "importance weight of a token as applied",
        alarming="mean far from 1, std above 1",
    ),
    Entry("rollout_corr/rollout_is_max", "largest weight", combine=MAX),
    Entry("rollout_corr/rollout_is_min", "smallest weight", combine=MIN),
    Entry(
        "rollout_corr/rollout_is_eff_sample_size",
        "share of tokens that the weighted ones are worth: 1 / mean((w / mean w)^2)",
        alarming="below about 0.3",
    ),
    Entry(
        "rollout_corr/rollout_is_ratio_fraction_{high,low}",
        "share of raw weights above the upper, below the lower threshold (without one: 1 / upper)",
        alarming="more than a few percent",
    ),
    Entry("rollout_corr/rollout_is_oob_ratio", "share of weights outside `lower_upper`, which became 0"),
    Entry("rollout_corr/rollout_is_batch_norm_factor", "mean weight that all were divided by"),
    Entry("rollout_corr/rollout_is_seq_{mean,std,fraction_high,fraction_low}", "the same of the mean weight of a row"),
    Entry("rollout_corr/rollout_is_seq_{max,max_deviation}", "largest of these, and largest distance to 1", "", MAX),
    Entry("rollout_corr/rollout_is_seq_min", "smallest of these", combine=MIN),
    Entry(
        "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
        "share of tokens, of rows, that rejection sampling masked",
        alarming="above 0.3: most of the work is thrown away",
    ),
    Entry(
        "rollout_corr/rollout_rs_<option>_{masked_fraction,seq_masked_fraction}",
        "the same by one option (`token_k1`, `seq_sum_k3`, ...)",
    ),
    Entry(
        "rollout_corr/rollout_rs_<option>_{max,seq_max,seq_max_deviation}",
        "statistic that the option bounds, largest; largest distance of a row's mean to 0",
        combine=MAX,
    ),
    Entry("rollout_corr/rollout_rs_<option>_{min,seq_min}", "statistic that the option bounds, smallest", combine=MIN),
    Entry(
        "rollout_corr/rollout_rs_<option>_{mean,std,seq_mean,seq_std}",
        "statistic that the option bounds; k1 in log space",
    ),
    Entry(
        "rollout_corr/rollout_rs_<option>_{fraction_high,fraction_low,seq_fraction_high,seq_fraction_low}",
        "share beyond the upper, the lower threshold",
    ),
)
