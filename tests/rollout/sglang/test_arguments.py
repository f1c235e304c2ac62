"""What SGLang is started with. Needs no SGLang."""

from __future__ import annotations

import pytest
import rollout_tiny as tiny

from rlflow.utils.errors import ConfigError
from rlflow.workers.rollout.sglang.arguments import engine_arguments, engine_environment


def _arguments(path, device="cpu", own_devices=False, **rollout):
    node = tiny.config(path, **{"name": "sglang", "tensor_model_parallel_size": 1, **rollout}).actor_rollout_ref
    return engine_arguments(node.rollout, node.model, device=device, own_devices=own_devices)


def test_a_cpu_gets_the_plain_torch_attention(model_path):
    """The default for a CPU needs kernels that are not published for it."""
    arguments = _arguments(model_path, max_num_seqs=4)
    assert arguments.kwargs["device"] == "cpu" and arguments.kwargs["attention_backend"] == "torch_native"
    assert arguments.kwargs["max_total_tokens"] == 4 * arguments.kwargs["context_length"]
    node = tiny.config(model_path, name="sglang").actor_rollout_ref.rollout
    assert engine_environment(node, "cpu")["SGLANG_USE_CPU_ENGINE"] == "1"
    assert not {"SGLANG_USE_CPU_ENGINE", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & set(engine_environment(node, "cuda"))


def test_ids_in_and_out_and_our_loader(model_path):
    kwargs = _arguments(model_path).kwargs
    assert kwargs["skip_tokenizer_init"] is True and kwargs["grammar_backend"] == "none"
    assert kwargs["custom_weight_loader"] == ["rlflow.workers.rollout.sglang.weight_loader.load"]


def test_the_context_leaves_room_for_what_sglang_keeps_for_itself(model_path):
    """A prompt must be 6 tokens shorter than SGLang's context: ours must still fit, up to the model's positions."""
    arguments = _arguments(model_path, max_model_len=256)  # all of its positions
    assert arguments.max_model_len == 256 and arguments.kwargs["context_length"] >= 256 + 6
    with pytest.raises(ConfigError, match="max_position_embeddings=256"):
        _arguments(model_path, max_model_len=257)


def test_sleep_on_a_gpu_frees_memory_and_keeps_a_copy_of_shared_weights(model_path):
    shared, own = _arguments(model_path, "cuda"), _arguments(model_path, "cuda", own_devices=True)
    assert shared.kwargs["enable_memory_saver"] and shared.kwargs["enable_weights_cpu_backup"]
    assert shared.memory_tags == ("kv_cache", "weights") and own.memory_tags == ("kv_cache",)
    assert not own.kwargs["enable_weights_cpu_backup"]
    kept = _arguments(model_path, "cuda", free_cache_engine=False)
    assert not kept.kwargs["enable_memory_saver"] and kept.kwargs["mem_fraction_static"] == 0.5


def test_the_tensor_parallel_size_is_passed_on(model_path):
    arguments = _arguments(model_path, "cuda", tensor_model_parallel_size=4)
    assert arguments.kwargs["tp_size"] == arguments.tp_size == 4
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2: on a CPU"):
        _arguments(model_path, tensor_model_parallel_size=2)


def test_raw_log_probs_are_asked_for_before_the_import(model_path):
    node = tiny.config(model_path, name="sglang", logprobs_mode="raw_logprobs").actor_rollout_ref.rollout
    assert engine_environment(node, "cpu")["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert _arguments(model_path, logprobs_mode="raw_logprobs").raw_log_probs
    assert not _arguments(model_path).raw_log_probs


def test_engine_kwargs_override_everything(model_path):
    own = {"attention_backend": "intel_amx", "max_total_tokens": 999, "schedule_policy": "lpm"}
    arguments = _arguments(model_path, engine_kwargs={"sglang": own})
    assert {key: arguments.kwargs[key] for key in own} == own


def test_an_unknown_load_format_is_refused(model_path):
    with pytest.raises(ConfigError, match="load_format=gguf"):
        _arguments(model_path, load_format="gguf")


def test_a_repetition_penalty_is_refused(model_path):
    """SGLang leaves the prompt out of it, and with it the first part of a continued request."""
    with pytest.raises(ConfigError, match="repetition_penalty=1.1"):
        _arguments(model_path, repetition_penalty=1.1)
