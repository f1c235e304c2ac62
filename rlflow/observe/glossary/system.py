"""Lengths and balance, failures, time, throughput and memory."""

from __future__ import annotations

from rlflow.observe.glossary.entry import AS_NAMED, LAST, MAX, MIN, SUM, Entry

LENGTHS = (
    Entry("response_length/{mean,max,min}", "length of a response", "tokens", AS_NAMED),
    Entry(
        "response_length/clip_ratio",
        "share of responses that reached `data.max_response_length`",
        alarming="high: the limit shapes the reward",
    ),
    Entry("response_length_non_aborted/{mean,max,min}", "the same without empty responses", "tokens", AS_NAMED),
    Entry("response_length_non_aborted/clip_ratio", "the same without empty responses"),
    Entry("response/aborted_ratio", "share of empty responses", alarming="not 0"),
    Entry("prompt_length/{mean,max,min}", "length of a prompt", "tokens", AS_NAMED),
    Entry(
        "prompt_length/clip_ratio",
        "share of prompts at `data.max_prompt_length`",
        alarming="not 0: prompts are cut off at the left",
    ),
    Entry("training/num_turns/{mean,max,min}", "messages of a conversation", "messages", AS_NAMED),
    Entry("num_turns/{mean,max,min}", "the same from `compute_data_metrics`, for scripts", "messages", AS_NAMED),
    Entry(
        "tool_call_counts/{mean,max,min}",
        "tool calls of a session, where the agent loop counts them (`extra_fields`)",
        "calls",
        AS_NAMED,
    ),
    Entry("global_seqlen/{min,max}", "load of a rank before balancing, the lowest and highest", "tokens", AS_NAMED),
    Entry("global_seqlen/minmax_diff", "their difference", "tokens"),
    Entry("global_seqlen/mean", "mean load of a rank", "tokens"),
    Entry(
        "global_seqlen/balanced_min",
        "lowest load of a rank after balancing",
        "tokens",
        MIN,
        "far from `balanced_max`: a few rows are much longer than the rest",
    ),
    Entry("global_seqlen/balanced_max", "highest load of a rank after balancing", "tokens", MAX),
)

FAILURES = (
    Entry(
        "training/rollout_failure/groups",
        "prompts of which a session failed; only when there are some",
        "prompts",
        SUM,
        "not 0: the journal's `finished` lines have the reason",
    ),
    Entry("training/rollout_failure/sessions", "sessions that failed", "sessions", SUM, "the same"),
    Entry(
        "training/rollout_failure/evicted_samples",
        "prompts all of whose sessions failed, replaced by others",
        "prompts",
        SUM,
        "the same",
    ),
    Entry(
        "supervisor/replicas_serving",
        "rollout replicas that take requests at the end of the step",
        "replicas",
        LAST,
        "fewer than were started",
    ),
    Entry(
        "supervisor/replicas_lost",
        "rollout replicas that died or hung",
        "replicas",
        SUM,
        "not 0: the journal's `replica_lost` lines have the cause",
    ),
    Entry("supervisor/restarts", "replicas that were started again", "replicas", SUM, "the same"),
    Entry("supervisor/downtime_s", "time from a loss to serving again, summed over replicas", "s", SUM, "not 0"),
    Entry("validation/rollout_failure/groups", "the same in a validation", "prompts", SUM, "the same"),
    Entry("validation/rollout_failure/sessions", "the same in a validation", "sessions", SUM, "the same"),
)

TIME = (
    Entry("timing_s/step", "the step from issue to weight sync; validation and reporting come after it", "s", SUM),
    Entry(
        "timing_s/<stage>",
        "time of a stage: `gen`, `reward`, `old_log_prob`, `ref`, `values`, `adv`, `update_critic`, `update_actor`, "
        "`update_weights`, `save_checkpoint`, `testing`, `dump_rollout_generations`",
        "s",
        SUM,
        "`gen` far above the rest: a few long answers hold everyone up",
    ),
    Entry(
        "timing_per_token_ms/<stage>",
        "the same a token (response tokens for `gen`, else all tokens of the batch)",
        "ms",
        SUM,
    ),
    Entry(
        "agent_loop/{generate_sequences,tool_calls,compute_score}/{mean,max,min}",
        "time of a session by activity",
        "s",
        AS_NAMED,
        "`compute_score` near `generate_sequences`: the scorer is the bottleneck",
    ),
    Entry(
        "agent_loop/slowest/{generate_sequences,tool_calls,compute_score}",
        "the same of the session that took longest",
        "s",
        LAST,
    ),
    Entry("agent_loop/slowest/{prompt_length,response_length}", "its lengths", "tokens", LAST),
    Entry(
        "agent_loop/num_preempted/{mean,max,min}",
        "preemptions by the engine, where it counts them",
        "preemptions",
        AS_NAMED,
        "not 0: the cache is too small",
    ),
    Entry("perf/time_per_step", "equal to `timing_s/step`", "s", SUM),
    Entry("perf/total_num_tokens", "prompt and response tokens of the step", "tokens", SUM),
    Entry("perf/throughput", "those, a second and device", "tokens/s"),
    Entry(
        "perf/mfu/<role>",
        "share of the devices' peak that the update reached; only where the device and the model are known",
        alarming="falls: batches too small, or ranks wait for one another",
    ),
    Entry(
        "{actor,critic}/perf/max_memory_allocated_gb",
        "peak device memory that tensors took; of the process itself on a CPU",
        "GiB",
        MAX,
        "near the device's memory",
    ),
    Entry("{actor,critic}/perf/max_memory_reserved_gb", "peak that the allocator held", "GiB", MAX, "the same"),
    Entry(
        "{actor,critic}/perf/cpu_memory_used_gb",
        "used memory of the host",
        "GiB",
        MAX,
        "grows from step to step",
    ),
    Entry("training/global_step", "where the run is", "steps", LAST),
    Entry("training/epoch", "epochs that are done; counts from 0", "epochs", LAST),
)
