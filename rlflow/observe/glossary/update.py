"""Is the update healthy: policy, gradient variance, critic."""

from __future__ import annotations

from rlflow.observe.glossary.entry import AS_NAMED, LAST, SUM, Entry

_OWN_LOSS = "only with losses that clip this way"

POLICY = (
    Entry(
        "actor/entropy",
        "mean entropy of the policy before the update",
        "nats",
        alarming="falls towards 0 early: exploration is gone; rises without end: the policy falls apart",
    ),
    Entry(
        "actor/entropy_loss",
        "the same during the update; only when it is computed (`entropy_coeff`, `calculate_entropy`)",
        "nats",
    ),
    Entry("actor/loss", "what was minimised: policy loss, entropy bonus and KL term together"),
    Entry("actor/pg_loss", "policy loss", alarming="says little by itself; NaN ends learning"),
    Entry(
        "actor/pg_clipfrac",
        "share of tokens that the loss clipped (their ratio, with `gspo` that of the sequence); with `dppo_*` those "
        "beyond the trust region, with `clip_cov` those taken out by their covariance",
        alarming="well above its usual level: steps are too large, or the batch is off-policy",
    ),
    Entry(
        "actor/pg_clipfrac_lower",
        f"share of tokens at which the dual clip acted; {_OWN_LOSS}, 0 with the others",
        alarming="steadily above 0",
    ),
    Entry(
        "actor/ppo_kl",
        "mean of old minus new log-prob over the updates of the step (`kl_cov`: of its absolute value)",
        "nats",
        alarming="grows from step to step",
    ),
    Entry(
        "actor/kl_loss",
        "KL to the reference in the loss; with `actor.use_kl_loss`",
        "nats",
        alarming="grows without bound",
    ),
    Entry("actor/kl_coef", "its coefficient"),
    Entry(
        "actor/reward_kl_penalty",
        "KL to the reference subtracted from the reward; with `algorithm.use_kl_in_reward`",
        "nats",
        alarming="grows without bound",
    ),
    Entry("actor/reward_kl_penalty_coeff", "its coefficient", combine=LAST),
    Entry(
        "actor/grad_norm",
        "gradient norm before clipping, mean over optimizer steps",
        alarming="jumps, or stays far above `optim.clip_grad`",
    ),
    Entry(
        "actor/skipped_steps",
        "optimizer steps left out because the gradient was not finite",
        "optimizer steps",
        SUM,
        "not 0",
    ),
    Entry(
        "actor/skipped_in_a_row",
        "the last of these that follow one another; only when there are any. `optim.max_skipped_steps` ends the run",
        "optimizer steps",
        alarming="grows: nothing is learned any more",
    ),
    Entry("actor/lr", "learning rate after the step", combine=LAST),
    Entry(
        "{actor,critic}/moe/{max_vio,min_vio,avg_vio}/{max,avg}",
        "mixture of experts: load x experts - 1 (0: even) of the most and the least asked expert of a layer, and its "
        "mean absolute value; the largest and the mean over layers (with `use_remove_padding`)",
        combine=AS_NAMED,
        alarming="max_vio grows: few experts do the work",
    ),
    Entry(
        "{actor,critic}/moe/aux_loss",
        "load-balancing loss of the Switch Transformer, not trained; with `output_router_logits` in the model's config",
        alarming="grows: its least value is the number of experts a token asks",
    ),
)

VARIANCE = (
    Entry("variance_proxy/proxy1_signal_strength", "squared norm of the batch's gradient; 0 when it is not known"),
    Entry(
        "variance_proxy/proxy2_total_power",
        "mean over trajectories of A^2 W, an estimate of the squared norm of one trajectory's gradient",
        alarming="grows while the score stands still: the update is mostly noise",
    ),
    Entry(
        "variance_proxy/proxy3_pure_noise",
        "variance of the batch's gradient: (proxy2 - proxy1) / (trajectories - 1), at least 0",
        alarming="far above proxy1: more trajectories a step, or a better baseline",
    ),
    Entry("variance_proxy/expected_a_squared", "mean squared advantage of a trajectory"),
    Entry(
        "variance_proxy/expected_w",
        "mean of W, the squared norm of a trajectory's score on the logits (with importance weights: weighted)",
        alarming="jumps: the policy became uncertain, or weights are large",
    ),
)

CRITIC = (
    Entry(
        "critic/values/{mean,max,min}",
        "its values before the update, tokens the policy wrote",
        combine=AS_NAMED,
        alarming="far from the range of the returns for long",
    ),
    Entry(
        "critic/vf_explained_var",
        "share of the returns' variance that the values explain: 1 all, 0 none",
        alarming="stays near or below 0",
    ),
    Entry("critic/{vf_loss,loss}", "its loss", alarming="grows"),
    Entry("critic/vf_clipfrac", "share of tokens whose value was clipped", alarming="well above its usual level"),
    Entry("critic/vpred_mean", "mean value during the update"),
    Entry("critic/grad_norm", "as for the actor", alarming="as for the actor"),
    Entry("critic/skipped_steps", "as for the actor", "optimizer steps", SUM, "not 0"),
    Entry("critic/skipped_in_a_row", "as for the actor", "optimizer steps", alarming="as for the actor"),
    Entry("critic/lr", "learning rate after the step", combine=LAST),
)
