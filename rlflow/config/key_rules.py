"""The keys that are not honoured, and why; see `rlflow.config.key_states`."""

from __future__ import annotations

from rlflow.config.key_states import Rule, inert, unbuilt

_ROLLOUT = "actor_rollout_ref.rollout"
_SCORER = "reward.reward_model.rollout"
_OFF = "leave it at its default"
_MEDIA = "rows with images, video or audio are refused in this version"
_VLLM, _REAL = ("vllm",), ("vllm", "sglang")

# What a switch turns on is refused; what only that feature reads has no effect as long as it is off.
_FEATURES: tuple[Rule, ...] = (
    unbuilt("**.profiler.enable", "profiling", "leave it false; timing_s/* and perf/* metrics say what a step spends"),
    unbuilt("global_profiler.tool", "profiling", "leave it null; timing_s/* and perf/* metrics say what a step spends"),
    unbuilt("global_profiler.steps", "profiling", "leave it null"),
    inert("**.profiler.**", "profilers are not in this version"),
    inert("global_profiler.**", "profilers are not in this version"),
    unbuilt("**.qat.enable", "quantisation-aware training", "leave it false"),
    inert("**.qat.**", "quantisation-aware training is not in this version"),
    unbuilt("**.router_replay.mode", "replay of the experts' routing", "leave it disabled"),
    inert("**.router_replay.**", "replay of the experts' routing is not in this version"),
    unbuilt("**.mtp.enable*", "multi-token prediction", "leave it false"),
    inert("**.mtp.**", "multi-token prediction is not in this version"),
    unbuilt("**.disaggregation.enabled", "prefill and decode on different servers", "leave it false"),
    inert("**.disaggregation.**", "prefill and decode are not on different servers in this version"),
    unbuilt("**.tiled_mlp.enabled", "MLPs in pieces of rows", "leave it false; smaller micro-batches need less memory"),
    inert("**.tiled_mlp.**", "MLPs in pieces of rows are not in this version"),
    unbuilt("distillation.enabled", "distillation from teachers", "leave it false"),
    inert("distillation.**", "distillation from teachers is not in this version"),
    unbuilt("skip.*.enable", "replay of recorded rollouts", "leave it false"),
    inert("skip.**", "replay of recorded rollouts is not in this version"),
    unbuilt("reward.sandbox_fusion.url", "the sandbox service", "leave it null; scorers run in processes of their own"),
    inert("reward.sandbox_fusion.**", "the sandbox service is not in this version"),
)
_TRAINING: tuple[Rule, ...] = (
    inert("**.rollout_n", "rollout.n is the number of sessions a prompt"),
    *(
        inert(f"{engine}.{name}", "the worker fills it in from the sizes of its role and of the model")
        for engine in ("**.fsdp_config", "critic.fsdp")
        for name in ("use_dynamic_bsz", "*max_token_len_per_gpu", "*micro_batch_size_per_gpu", "use_remove_padding")
    ),
    unbuilt("**.megatron.**", "the Megatron engine", "the FSDP engine's keys (docs/from_verl.md)"),
    unbuilt("**.checkpoint.strict", "loading a part of a model", "leave it true"),
    unbuilt("**.checkpoint.mbridge_config", "the Megatron engine", _OFF),
    unbuilt("**.freeze_vision_tower", "models with a vision tower", "leave it false"),
    *(
        unbuilt(key, "determinism of one engine alone", f"{_ROLLOUT}.full_determinism=true, for the whole run")
        for key in ("**.fsdp_config.full_determinism", "critic.fsdp.full_determinism", f"{_SCORER}.full_determinism")
    ),
    inert("**.use_orig_params", "fully_shard always keeps the original parameters"),
    inert("**.pad_to_length*", "packed rows are never padded here, and results do not depend on it"),
    unbuilt("**.enable_activation_offload", "moving activations to host memory", "enable_gradient_checkpointing=true"),
    inert("**.fused_kernel_options.**", "flash-attn's kernel is taken where it runs, torch elsewhere"),
    unbuilt("**.use_liger", "Liger kernels", "leave it false; logits are computed in chunks already"),
    inert("**.use_shm", "files are read where they are"),
    inert("**.lora.freeze_*", "it belongs to the Megatron engine's adapters"),
    unbuilt("**.lora.target_modules", "the Megatron engine's adapters", "model.target_modules"),
    unbuilt("**.lora.exclude_modules", "the Megatron engine's adapters", "model.exclude_modules"),
    unbuilt("**.lora.dropout*", "dropout of adapters", _OFF),
    unbuilt("**.lora.type", "other adapters than LoRA", "leave it lora"),
    unbuilt("**.lora.dtype", "adapters of another precision", "leave it null"),
    unbuilt("**.lora.lora_A_init_method", "the Megatron engine's adapters", _OFF),
    unbuilt("**.lora.lora_B_init_method", "the Megatron engine's adapters", _OFF),
    unbuilt("**.lora.a2a_experimental", "the Megatron engine's adapters", _OFF),
    inert("algorithm.pf_ppo.**", "PF-PPO is not in this version"),
)
_DATA: tuple[Rule, ...] = (
    inert("data.reward_fn_key", "the scorer is chosen by the column data_source, which rows always have"),
    inert("data.tokenizer", "model.tokenizer_path names the tokenizer"),
    inert("data.trust_remote_code", "model.trust_remote_code says whether the tokenizer's own code may run"),
    inert("data.gen_batch_size", "prompts are sent out one by one, also as replacements"),
    inert("data.dataloader_num_workers", "the trainer reads prompts itself, without loader processes"),
    inert("data.filter_overlong_prompts_workers", "prompts are measured in one process, many at a time"),
    inert("data.truncation", "the session cuts a prompt that is too long at the left, with a warning"),
    inert("data.return_multi_modal_inputs", _MEDIA),
    inert("data.return_*", "a row always keeps its messages, and prompts are made of them"),
    inert("data.image_patch_size", _MEDIA),
    inert("data.mm_processor_kwargs.**", _MEDIA),
    unbuilt("data.tool_config_path", "tools", "leave it null"),
    unbuilt("data.function_tool_path", "tools", "leave it null"),
    unbuilt("data.continuous_token.enable", "continued conversations", "leave it false"),
    inert("data.continuous_token.**", "continued conversations are not in this version"),
)
_SAMPLING: tuple[Rule, ...] = (
    inert(f"{_ROLLOUT}.do_sample", "training always samples; a row's __do_sample__ column makes it greedy"),
    inert(f"{_ROLLOUT}.over_sample_rate", "no further sessions are started"),
    inert(f"{_ROLLOUT}.multi_stage_wake_up", "memory comes back in the order of the phases of a weight sync"),
    inert(f"{_ROLLOUT}.layered_summon", "weights are always gathered piece by piece"),
    inert(f"{_ROLLOUT}.gpu_memory_utilization", "the embedded engine reserves no memory", honoured_by=_REAL),
    inert(f"{_ROLLOUT}.enforce_eager", "the embedded engine has no CUDA graphs", honoured_by=_REAL),
    inert(f"{_ROLLOUT}.enable_prefix_caching", "this engine keeps no such cache", honoured_by=_REAL),
    inert(f"{_ROLLOUT}.enable_chunked_prefill", "this engine splits prefills as it needs", honoured_by=_VLLM),
    inert(f"{_ROLLOUT}.disable_log_stats", "this engine logs none", honoured_by=_VLLM),
    inert(f"{_ROLLOUT}.skip_tokenizer_init", "prompts always come as tokens", honoured_by=_VLLM),
    unbuilt(f"{_ROLLOUT}.scheduling_policy", "priorities with this engine", "leave it fcfs", honoured_by=_VLLM),
    unbuilt(f"{_ROLLOUT}.logprobs_mode", "other log-probs with this engine", _OFF, honoured_by=_VLLM),
    unbuilt(f"{_ROLLOUT}.cudagraph_capture_sizes", "this key", "engine_kwargs of the engine"),
    unbuilt(f"{_ROLLOUT}.expert_parallel_size", "expert parallelism", "leave it 1"),
    unbuilt(f"{_ROLLOUT}.quantization*", "low-precision weights", "leave it null"),
    unbuilt(f"{_ROLLOUT}.agent.custom_async_server.*", "a server class of your own", "rollout.name, a registered one"),
    unbuilt(f"{_ROLLOUT}.engine_kwargs.trtllm.**", "TensorRT-LLM", f"{_ROLLOUT}.name=vllm"),
    unbuilt(
        f"{_ROLLOUT}.multi_turn.enable",
        "sessions of several turns with tools",
        f"leave it false, or an agent loop of your own ({_ROLLOUT}.agent.agent_loop_config_path)",
    ),
    unbuilt(f"{_ROLLOUT}.multi_turn.*_path", "tools", "leave it null"),
    inert(f"{_ROLLOUT}.multi_turn.**", "sessions of several turns with tools are not in this version"),
    unbuilt(f"{_ROLLOUT}.trace.backend", "traces in a tracing service", "leave it null; trainer.trace keeps them"),
    inert(f"{_ROLLOUT}.trace.**", "traces in a tracing service are not in this version"),
    unbuilt(f"{_ROLLOUT}.enable_rollout_routing_replay", "replay of the experts' routing", "leave it false"),
    unbuilt(f"{_ROLLOUT}.moe_load_balance_metrics_interval", "metrics of the experts' load", "leave it 0"),
    unbuilt(f"{_ROLLOUT}.prometheus.enable", "metrics of engines for Prometheus", "transfer_queue.metrics.enabled"),
    inert(f"{_ROLLOUT}.prometheus.**", "metrics of engines for Prometheus are not in this version"),
    *(
        unbuilt(f"{_SCORER}.{name}_parallel_size", "a reward model on several devices a server", "leave it 1")
        for name in ("data", "expert", "pipeline_model")
    ),
    unbuilt(f"{_SCORER}.quantization*", "low-precision weights", "leave it null"),
    *(
        inert(f"{_SCORER}.{name}", "scores are read from a head; nothing is sampled")
        for name in ("temperature", "top_k", "top_p", "do_sample", "n", "ignore_eos", "seed")
    ),
    *(
        inert(f"{_SCORER}.{name}", "the embedded engine, which serves reward models, has no such thing")
        for name in (
            "gpu_memory_utilization",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "load_format",
            "layered_summon",
            "limit_images",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "disable_log_stats",
            "skip_tokenizer_init",
            "scheduling_policy",
            "multi_stage_wake_up",
        )
    ),
)
_RUN: tuple[Rule, ...] = (
    unbuilt("trainer.default_hdfs_dir", "checkpoints on HDFS", "trainer.default_local_dir on a shared file system"),
    unbuilt("trainer.del_local_ckpt_after_load", "deleting what a run resumed from", "trainer.max_actor_ckpt_to_keep"),
    inert("trainer.esi_redundant_time", "the V1 trainer does not read it"),
    inert("trainer.ray_wait_register_center_timeout", "trainer.call_timeout_s bounds every call of a worker group"),
    inert("trainer.v1.colocate_async.**", "only trainer_mode=colocate_async reads it"),
    inert("trainer.v1.separate_async.**", "only trainer_mode=separate_async reads it"),
    unbuilt("trainer.v1.sampler.sync_refill_failed_groups", "refilling failed groups", "leave it false"),
    unbuilt("transfer_queue.backend.MooncakeStore.**", "MooncakeStore", "transfer_queue.backend.SimpleStorage"),
)
RULES: tuple[Rule, ...] = (*_FEATURES, *_SAMPLING, *_TRAINING, *_DATA, *_RUN)
