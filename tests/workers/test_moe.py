"""Mixtures of experts: their load as metrics, and their weights under the names of checkpoints."""

from __future__ import annotations

import pytest
import tiny
import torch
from model_families import MOE
from rank_jobs import build, full_params, loss_of, trained_params
from test_gradients import WAYS

from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import ConfigError
from rlflow.workers.engine.fsdp.moe import find_routers, load_values
from rlflow.workers.engine.fsdp.packed_attention import LAYOUT_KWARG, AttentionLayout


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory) -> str:
    options = MOE | {"output_router_logits": True}
    return tiny.save_tiny_model(tmp_path_factory.mktemp("moe"), family="Qwen3Moe", **options)


def metrics_of(engine, options):
    batch = tu.assign_non_tensor_whole(tiny.make_batch(8), options)
    with engine.train_mode():
        found = engine.forward_backward_batch(batch, loss_of(False))["metrics"]
    return {name: metric.aggregate() for name, metric in found.items() if name.startswith("moe/")}


def test_values_are_those_of_their_definition():
    assigned = torch.tensor([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])  # 4 tokens, two experts each
    values = load_values(assigned, torch.full((2, 4), 1.0), top_k=2)
    assert values["moe/max_vio/max"] == 1.0 and values["moe/max_vio/avg"] == 0.5
    assert values["moe/min_vio/max"] == 0.0 and values["moe/min_vio/avg"] == -0.5
    assert values["moe/avg_vio/max"] == 0.5 and values["moe/avg_vio/avg"] == 0.25
    assert values["moe/aux_loss"] == pytest.approx(2.0), "an even load costs the experts of a token"


def test_load_is_that_of_the_mini_batch_however_it_is_split(moe_model, single_process_group):
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    plain = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32, attn_implementation="eager")
    data, logits = tiny.make_batch(8), [[], []]
    for ids, response in zip(data["input_ids"].unbind(), data["responses"].unbind(), strict=True):
        for layer, part in enumerate(plain(ids[None, :-1], output_router_logits=True).router_logits):
            logits[layer].append(part.detach())
        assert len(response)
    gates = tuple(torch.cat(parts) for parts in logits)
    expected = float(load_balancing_loss_func(gates, num_experts=4, top_k=2))
    engine = build(moe_model)
    whole = metrics_of(engine, WAYS["packed"])
    assert whole["moe/aux_loss"] == pytest.approx(expected, rel=1e-4)
    chosen = torch.stack([torch.bincount(g.topk(2).indices.flatten(), minlength=4) for g in gates]).double()
    load = chosen / chosen.sum(1, keepdim=True)
    assert whole["moe/max_vio/max"] == pytest.approx(float(load.max() * 4 - 1))
    for way in ({"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}, {"max_token_len_per_gpu": 40}):
        assert metrics_of(engine, {"share_prompts": False} | way) == pytest.approx(whole, rel=1e-5)
    assert metrics_of(engine, WAYS["padded"]) == {}, "padding is no load"
    with engine.eval_mode():
        engine.infer_batch(data)
    assert metrics_of(engine, WAYS["packed"]) == pytest.approx(whole), "inference is not counted"


def test_dense_models_have_no_routers(tiny_model, single_process_group):
    engine = build(tiny_model)
    assert engine.module.routers is None and find_routers(engine.module.hf_model) == []


def test_experts_leave_under_the_names_of_checkpoints(moe_model, single_process_group, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    on_disk = load_file(f"{moe_model}/model.safetensors")
    engine = build(moe_model, contents=("hf_model",))
    exported = full_params(engine)
    assert exported.keys() == on_disk.keys() and any(".experts.3.up_proj.weight" in name for name in exported)
    for name, value in on_disk.items():
        assert torch.equal(exported[name], value), name
    engine.save_checkpoint(str(tmp_path))
    written = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert written.keys() == on_disk.keys()
    ids = tiny.make_batch(2)["input_ids"].unbind()[0][None]
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        for path in (moe_model, tmp_path / "huggingface")
    ]
    assert torch.equal(models[0](ids).logits, models[1](ids).logits)


def test_experts_get_no_adapter(moe_model, single_process_group, tmp_path):
    """By "all-linear", the default, PEFT means packed experts too, also when it reads an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = build(moe_model, model={"lora_rank": 4}, contents=())
    for name, param in engine.module.named_parameters():
        assert param.requires_grad == (".lora_" in name)
        if ".lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    assert len(trained_params(engine)) == 2 * 2 * 4, "A and B of four projections in two layers"
    engine.save_checkpoint(str(tmp_path))
    ids = torch.arange(3, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "lora_adapter")(ids).logits
    whole_rows = {LAYOUT_KWARG: AttentionLayout.padded(ids.shape[1])}
    torch.testing.assert_close(engine.module.hf_model(ids, **whole_rows).logits, by_peft, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match=r"experts.*Leave it out of model.target_modules"):
        build(moe_model, model={"lora_rank": 4, "target_modules": ["q_proj", "gate_proj", "up_proj"]})


def test_the_embedded_rollout_takes_experts_one_by_one(moe_model, single_process_group):
    from transformers import AutoModelForCausalLM

    from rlflow.checkpoint_engine.checksum import combine, tensor_digest
    from rlflow.utils.errors import WeightSyncError
    from rlflow.workers.rollout.hf.model import ServedModel

    model = AutoModelForCausalLM.from_pretrained(moe_model, dtype=torch.float32)
    served = ServedModel(model, weights_dtype=torch.float32, eos_token_ids=frozenset())
    sent = {name: value + 1 for name, value in full_params(build(moe_model)).items()}
    for name, value in sent.items():
        served.load(name, value)
    count, checksum = served.finish()
    digests = [tensor_digest(name, value) for name, value in sent.items()]
    assert (count, checksum) == (len(sent), combine(digests))
    packed = dict(model.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(packed[2, 32:], sent["model.layers.1.mlp.experts.2.up_proj.weight"])
    lost = "model.layers.1.mlp.experts.0.gate_proj.weight"
    for name in sent.keys() - {lost}:
        served.load(name, sent[name])
    with pytest.raises(WeightSyncError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        served.finish()
