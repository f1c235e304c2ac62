"""Is it learning: scores, advantages, validation; baselines of estimators; what sampling threw away."""

from __future__ import annotations

from rlflow.observe.glossary.entry import AS_NAMED, SUM, Entry

LEARNING = (
    Entry(
        "critic/score/{mean,max,min}",
        "score of a trajectory, as the reward function gave it",
        combine=AS_NAMED,
        alarming="flat for long: see below; `max` = `min`: every answer scores the same, so there is nothing to learn "
        "from; NaN: every response was empty or had no valid reward",
    ),
    Entry(
        "critic/rewards/{mean,max,min}",
        "the same minus the KL penalty, when `algorithm.use_kl_in_reward`",
        combine=AS_NAMED,
        alarming="far below the score: the penalty outweighs the reward",
    ),
    Entry(
        "critic/advantages/{mean,max,min}",
        "advantage of a token the policy wrote",
        combine=AS_NAMED,
        alarming="all 0: every group has equal scores",
    ),
    Entry("critic/returns/{mean,max,min}", "return of a token the policy wrote", combine=AS_NAMED),
    Entry(
        "training/reward/invalid",
        "samples of the step without a valid reward; they are masked",
        "samples",
        SUM,
        "more than a few: read the reasons in the log",
    ),
    Entry(
        "val-core/<source>/<variable>/<metric>",
        "the headline of a validation: `acc` where the scorer returns it, else `reward`; `mean@N`, and for N > 1 "
        "`best@N/mean`, `maj@N/mean` and their `std` at the largest N",
        alarming="falls while `critic/score/mean` rises: the reward is being gamed",
    ),
    Entry(
        "val-aux/num_invalid",
        "validation samples without a valid reward, left out of the means",
        "samples",
        SUM,
        "not 0",
    ),
    Entry("val-aux/num_turns/{mean,max,min}", "messages of a validation conversation", "messages", AS_NAMED),
    Entry("val-aux/<source>/<variable>/<metric>", "every other variable and N; `std@N` and `worst@N` too"),
    Entry("reward_extra/<name>/mean", "numbers that the scorer returned beside the score, in training"),
)

BASELINES = (
    Entry(
        "gdpo/<key>/{mean,std,max,min}",
        "one component of the reward, with `adv_estimator=gdpo`",
        combine=AS_NAMED,
        alarming="`std` 0: the component does not tell answers apart, and adds nothing to the advantage",
    ),
    Entry(
        "remax/baseline_score/{mean,max,min}",
        "score of the greedy answer to a prompt, with `adv_estimator=remax`",
        combine=AS_NAMED,
        alarming="far above `critic/score/mean`: sampling at this temperature is much worse than the policy",
    ),
)

SAMPLING = (
    Entry(
        "training/filter_groups/evicted_groups",
        "prompts dropped because the metric did not vary over their sessions; with `algorithm.filter_groups`",
        "prompts",
        SUM,
        "most of what was generated: too easy or too hard, and generation time is wasted",
    ),
    Entry("training/filter_groups/evicted_samples", "their trajectories", "trajectories", SUM, "the same"),
    Entry(
        "training/filter_groups/discarded_surplus_samples",
        "good trajectories that were generated in reserve and not needed",
        "trajectories",
        SUM,
        "near the batch size: lower `max_inflight_gen_batches`",
    ),
    Entry("training/filter_groups/refilled_prompts", "prompts asked for in place of others", "prompts", SUM),
    Entry(
        "training/off_policy/evicted_samples",
        "trajectories dropped because their weights were too old; async modes",
        "trajectories",
        SUM,
        "steadily above 0: generation cannot keep up with training",
    ),
    Entry(
        "training/off_policy/evicted_samples_staleness/{mean,max,min}",
        "weight versions that took part in the dropped ones; the mean over iterations weighs them by their number",
        "versions",
        AS_NAMED,
    ),
)
