"""Modes, registry, and what an engine refuses."""

from __future__ import annotations

import pytest
import tiny
import torch
from rank_jobs import build

from rlflow.config import FSDPEngineConfig, HFModelConfig
from rlflow.utils.errors import ConfigError, ContractError
from rlflow.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

pytestmark = pytest.mark.usefixtures("single_process_group")


def test_modes_nest_and_return_to_the_outer_one(tiny_model):
    engine = build(tiny_model)
    with engine.train_mode():
        assert engine.mode == "train" and engine.module.training
        with engine.eval_mode():
            assert engine.mode == "eval" and not engine.module.training
        assert engine.mode == "train" and engine.module.training
        with engine.train_mode():
            next(engine.module.parameters()).grad = torch.zeros_like(next(engine.module.parameters()))
        assert next(engine.module.parameters()).grad is not None  # dropped by the outermost mode only
    assert engine.mode is None and not engine.module.training
    assert all(p.grad is None for p in engine.module.parameters())


def test_gradients_do_not_survive_an_exception(tiny_model):
    engine = build(tiny_model)
    first = next(engine.module.parameters())
    with pytest.raises(RuntimeError), engine.train_mode(zero_grad_on_exit=False):
        first.grad = torch.zeros_like(first)
        raise RuntimeError
    assert first.grad is None


def test_engines_are_found_by_model_type_and_backend(monkeypatch):
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", backend) is FSDPEngineWithLMHead
    monkeypatch.setenv("RLFLOW_ENGINE_DEVICE", "cuda")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp") is FSDPEngineWithLMHead
    with pytest.raises(ConfigError, match="strategy='nothing'"):
        EngineRegistry.get_engine_cls("language_model", "nothing")
    with pytest.raises(ContractError, match="BaseEngine"):
        EngineRegistry.register("language_model", "mine")(object)

    @EngineRegistry.register("language_model", "mine", device="cuda", vendor=["nvidia", "amd"])
    class Mine(BaseEngine):
        pass

    assert EngineRegistry.get_engine_cls("language_model", "mine") is Mine
    with pytest.raises(ContractError, match="already Mine"):
        EngineRegistry.register("language_model", "mine", device="cuda", vendor="amd")(FSDPEngineWithLMHead)


def test_a_frozen_engine_has_no_optimizer_and_stores_bf16_by_default(tiny_model):
    config = FSDPEngineConfig(forward_only=True, model_dtype=None, dtype="float32", max_token_len_per_gpu=4096)
    engine = FSDPEngineWithLMHead(HFModelConfig(path=tiny_model), config)
    engine.initialize()
    assert engine.optimizer is None
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in engine.module.parameters())
    data = tiny.make_batch(4)
    assert engine.infer_batch(data)["model_output"]["log_probs"].dtype == torch.float32
    with pytest.raises(ContractError, match="forward_only"):
        engine.forward_backward_batch(data, lambda **_: None)
    for call in (engine.optimizer_step, engine.lr_scheduler_step):
        with pytest.raises(ContractError, match="forward_only"):
            call()


def test_bad_configurations_are_named(tiny_model, tmp_path):
    with pytest.raises(ConfigError, match="optimizer_config"):
        FSDPEngineWithLMHead(HFModelConfig(path=tiny_model), FSDPEngineConfig())
    with pytest.raises(ConfigError, match=r"model\.path"):
        FSDPEngineWithLMHead(HFModelConfig(path=str(tmp_path)), FSDPEngineConfig(forward_only=True))
    for engine in ({"dtype": "float16"}, {"dtype": "int7"}, {"mixed_precision": {"param_dtype": "fp16"}}):
        with pytest.raises(ConfigError, match="dtype"):
            build(tiny_model, **engine)


def test_mixed_precision_overrides_dtype(tiny_model):
    exact = build(tiny_model, dtype="bfloat16", mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"})
    plain = build(tiny_model)
    data = tiny.make_batch(4)
    a, b = (e.infer_batch(data)["model_output"]["log_probs"].values() for e in (exact, plain))
    assert torch.equal(a, b)


def test_the_models_config_can_be_overridden(tiny_model):
    config = HFModelConfig(
        path=tiny_model, override_config={"rms_norm_eps": 0.5, "rope_parameters": {"rope_theta": 7.0}}
    )
    engine = FSDPEngineWithLMHead(config, FSDPEngineConfig(forward_only=True))
    assert engine.hf_config.rms_norm_eps == 0.5


def test_to_moves_nothing_on_a_cpu_and_checks_its_arguments(tiny_model):
    engine = build(tiny_model)
    engine.to("cpu")
    engine.to("device")
    with pytest.raises(ContractError, match="model=True"):
        engine.to("cpu", model=False, grad=True)
    with pytest.raises(ContractError, match="'tpu'"):
        engine.to("tpu")
