"""LoRA: gradients from their definition, one reference for all ranks, and files that PEFT and transformers load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from rank_jobs import build, full_grads, full_params, loss_of
from safetensors.torch import load_file, save_file
from test_gradients import WAYS, _naive, _relative

from rlflow.config import FSDPActorConfig
from rlflow.model_merger.compare import compare
from rlflow.model_merger.merge import MergeOptions, merge
from rlflow.model_merger.verify import verify
from rlflow.utils import tensordict_utils as tu
from rlflow.utils.errors import CheckpointError, ConfigError

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(autouse=True)
def _one_process(single_process_group):
    """Engines here run in this process, unless a test starts others."""


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    return tiny.save_adapter(tiny_model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def merged_model(tiny_model, adapter, tmp_path_factory):
    """A folder of the same model with the adapter merged in by PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("merged")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder)
    return str(folder)


def log_probs(engine, data=None, **options):
    batch = tu.assign_non_tensor_whole((data if data is not None else tiny.make_batch(8)).copy(), options)
    with engine.eval_mode():
        return tu.nested_values(engine.infer_batch(batch)["model_output"]["log_probs"])


@pytest.mark.parametrize("way", ["packed", "packed, prompts shared", "padded"])
def test_log_probs_and_gradients_follow_from_the_merged_weights(tiny_model, merged_model, adapter, way):
    """y = (W + s B A) x, so that dB = s dW A^T and dA = s B^T dW of the merged weight."""
    loss, expected, dense = _naive(merged_model, tiny.make_batch(8), FSDPActorConfig())
    engine = build(tiny_model, model={"lora_adapter_path": adapter})
    batch = tu.assign_non_tensor_whole(tiny.make_batch(8), WAYS[way])
    with engine.train_mode():
        out = engine.forward_backward_batch(batch, loss_of(False))
        grads = full_grads(engine)
    params = dict(engine.module.named_parameters())
    assert set(grads) == {name for name in params if "lora_" in name} and len(grads) == 2 * 2 * 7
    wanted = {}
    for name in grads:
        stem, _, _ = name.partition(".lora_")
        d_weight, scale = dense[f"{stem}.weight"], 8 / 4
        a, b = (params[f"{stem}.lora_{side}.default.weight"].detach() for side in "AB")
        wanted[name] = scale * (b.t() @ d_weight if "lora_A" in name else d_weight @ a.t())
    assert sum(out["loss"]) == pytest.approx(loss, rel=1e-5)
    assert _relative(grads, wanted) < 1e-5
    for mine, other in zip(out["model_output"]["log_probs"].unbind(), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_new_adapter_changes_nothing_and_depends_on_the_seed_only(tiny_model):
    plain = log_probs(build(tiny_model))
    engines = [build(tiny_model, model={"lora_rank": 4}, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(log_probs(engines[0]), plain)
    torch.rand(3)
    starts = [dict(e.module.named_parameters())[f"hf_model.{Q}.lora_A.default.weight"] for e in engines]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_the_policy_with_its_adapter_off_is_the_model_it_started_from(tiny_model, adapter):
    engine = build(tiny_model, model={"lora_adapter_path": adapter})
    base, trained = log_probs(build(tiny_model)), log_probs(engine)
    assert not torch.allclose(base, trained, atol=1e-3)
    with engine.disable_adapter():
        assert torch.equal(log_probs(engine), base)
    assert torch.equal(log_probs(engine), trained)
    assert all(p.requires_grad for n, p in engine.module.named_parameters() if "lora_" in n)


def test_only_adapters_train_and_the_export_is_merged(tiny_model, adapter, merged_model):
    engine = build(tiny_model, model={"lora_adapter_path": adapter}, optimizer="AdamW", lr=1e-2)
    merged = load_file(f"{merged_model}/model.safetensors")
    exported = full_params(engine)
    assert exported.keys() == merged.keys()
    assert _relative(exported, merged) < 1e-6
    before = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    with engine.train_mode():
        engine.train_batch(tiny.make_batch(8), loss_of(False))
    moved = {n for n, p in engine.module.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n}
    after = full_params(engine)
    assert not torch.equal(after[f"{Q}.weight"], exported[f"{Q}.weight"])
    assert torch.equal(after["model.norm.weight"], exported["model.norm.weight"])


def test_adapters_stay_in_fp32_beside_weights_in_bfloat16(tiny_model, adapter, run_ranks):
    args = {"path": tiny_model, "model": {"lora_adapter_path": adapter}}
    exact = run_ranks(1, "gradient", **args)
    rough = run_ranks(1, "gradient", **args, dtype="bfloat16", model_dtype="bf16")
    assert all(grad.dtype == torch.float32 for grad in rough["grads"].values())
    assert _relative(rough["grads"], exact["grads"]) < 0.1


def test_an_adapter_is_saved_alone_and_goes_on_with_other_ranks(tiny_model, run_ranks, tmp_path):
    folder, lora = tmp_path / "actor", {"path": tiny_model, "model": {"lora_rank": 4}, "lora_only": True}
    first = run_ranks(2, "train", seeds=[0, 1], save_to=str(folder), **lora)
    names = json.loads((folder / "model" / "index.json").read_text())["tensors"]
    assert len(names) == 28 and f"{Q}.lora_A.weight" in names and all(".lora_" in name for name in names)
    loaded = run_ranks(1, "train", seeds=[], load=str(folder), **lora)
    for name, value in first["params"].items():
        torch.testing.assert_close(loaded["params"][name], value, rtol=1e-6, atol=1e-6)
    whole = run_ranks(1, "train", seeds=[0, 1, 2], **lora)
    rest = run_ranks(1, "train", seeds=[2], load=str(folder), **lora)
    for name, value in whole["params"].items():
        torch.testing.assert_close(rest["params"][name], value, rtol=1e-3, atol=1e-3)


def test_files_are_those_that_peft_and_transformers_load(tiny_model, adapter, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = build(tiny_model, model={"lora_adapter_path": adapter}, contents=("model", "hf_model"))
    with engine.train_mode():
        engine.train_batch(tiny.make_batch(8), loss_of(False))
    engine.save_checkpoint(str(tmp_path))
    ids = tiny.make_batch(2)["input_ids"].unbind()[0][None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, tmp_path / "lora_adapter")(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32)(ids).logits
    assert (merged - by_peft).abs().max() < 0.1 * by_peft.std(), "merged weights are written in bfloat16"
    own = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    own.load_state_dict(full_params(engine), strict=False)
    torch.testing.assert_close(own(ids).logits, by_peft, rtol=1e-4, atol=1e-4)
    meta = json.loads((tmp_path / "lora_train_meta.json").read_text())
    assert (meta["r"], meta["lora_alpha"], meta["task_type"]) == (4, 8, "CAUSAL_LM")
    assert meta["scaling"][f"{Q}.weight"] == 2.0 and len(meta["scaling"]) == 14
    again = build(tiny_model, model={"lora_adapter_path": str(tmp_path / "lora_adapter")})
    assert torch.equal(log_probs(again), log_probs(engine))


def test_a_whole_checkpoint_also_holds_the_frozen_weights(tiny_model, tmp_path):
    lora = {"model": {"lora_rank": 2}}
    build(tiny_model, **lora).save_checkpoint(str(tmp_path))
    names = json.loads((tmp_path / "model" / "index.json").read_text())["tensors"]
    assert {f"{Q}.weight", f"{Q}.lora_B.weight", "model.norm.weight"} <= set(names)
    build(tiny_model, load=str(tmp_path), **lora)
    with pytest.raises(CheckpointError, match="lora_A"):
        build(tiny_model, load=str(tmp_path))


def test_a_merge_of_the_shards_is_the_merge_of_peft(tiny_model, adapter, merged_model, tmp_path):
    lora = {"model": {"lora_adapter_path": adapter}}
    build(tiny_model, **lora).save_checkpoint(str(tmp_path / "actor"))
    options = MergeOptions(dtype="float32")
    merge(tmp_path / "actor", tmp_path / "out", options)
    written, expected = (load_file(f"{folder}/model.safetensors") for folder in (tmp_path / "out", merged_model))
    assert written.keys() == expected.keys() and _relative(written, expected) < 1e-6
    found = verify(tmp_path / "actor", tmp_path / "out", options)
    assert found.passed and found.difference < 1e-4
    assert compare(tmp_path / "actor", tmp_path / "out", tolerance=1e-5) == []
    base = load_file(f"{tiny_model}/model.safetensors")
    save_file(base, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not verify(tmp_path / "actor", tmp_path / "out", options).passed
    build(tiny_model, lora_only=True, **lora).save_checkpoint(str(tmp_path / "alone"))
    with pytest.raises(CheckpointError, match="lora_adapter has it for peft"):
        merge(tmp_path / "alone", tmp_path / "more", options)


def test_a_critic_trains_its_adapter_and_its_head(tiny_model, tmp_path):
    engine = build(tiny_model, critic=True, model={"lora_rank": 4}, contents=("model",))
    trained = {n.removeprefix("hf_model.") for n, p in engine.module.named_parameters() if p.requires_grad}
    assert {"score.weight", "score.bias"} & trained and len([n for n in trained if "lora_" in n]) == 28
    with engine.train_mode():
        engine.train_batch(tiny.with_values(tiny.make_batch(8)), loss_of(True))
    engine.save_checkpoint(str(tmp_path))
    again = build(tiny_model, critic=True, model={"lora_adapter_path": str(tmp_path / "lora_adapter")})
    for name, value in full_params(engine).items():
        assert torch.equal(full_params(again)[name], value), name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"lora_rank": 4, "target_modules": ["nowhere"]}, "nowhere"),
        ({"lora_rank": 4, "target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"lora_rank": 4, "target_modules": ["lm_head"]}, "lm_head"),
        ({"lora_adapter_path": "/nowhere"}, "holds no adapter"),
        ({"lora_rank": -1}, "lora_rank=-1"),
        ({"lora_rank": 4, "target_modules": []}, "target_modules"),
    ],
)
def test_what_cannot_work_is_refused(untied_model, model, message):
    with pytest.raises(ConfigError, match=message):
        build(untied_model, model=model)


def test_adapters_of_another_kind_are_refused(tiny_model, untied_model, adapter, tmp_path):
    with pytest.raises(ConfigError, match="rank 4"):
        build(tiny_model, model={"lora_adapter_path": adapter, "lora_rank": 8})
    dora = tiny.save_adapter(tiny_model, tmp_path / "dora", use_dora=True)
    with pytest.raises(ConfigError, match="use_dora"):
        build(tiny_model, model={"lora_adapter_path": dora})
    config_file = Path(dora) / "adapter_config.json"
    changed = json.loads(config_file.read_text()) | {"use_dora": False, "init_lora_weights": "pissa"}
    config_file.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="init_lora_weights=pissa"):
        build(tiny_model, model={"lora_adapter_path": dora})
    some = tiny.save_adapter(tiny_model, tmp_path / "some", target_modules=["q_proj"])
    config = json.loads((tmp_path / "some" / "adapter_config.json").read_text())
    (tmp_path / "some" / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["k_proj"]}))
    with pytest.raises(ConfigError, match="no adapter of this model"):
        build(tiny_model, model={"lora_adapter_path": some})
