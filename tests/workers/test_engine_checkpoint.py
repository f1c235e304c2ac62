"""A worker's state on disk: exact, readable by any number of ranks, loadable by transformers."""

from __future__ import annotations

import json

import pytest
import torch
from rank_jobs import build, full_params, loss_of
from safetensors import safe_open
from tiny import make_batch, with_values

from rlflow.checkpoint.background import BackgroundFiles
from rlflow.checkpoint.shards import ShardReader
from rlflow.utils.errors import CheckpointError


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_two_steps_and_two_more_are_four_bit_for_bit(tiny_model, run_ranks, tmp_path, world):
    folder = str(tmp_path / "actor")
    ways = ({"seeds": [0, 1, 2, 3]}, {"seeds": [0, 1], "save_to": folder}, {"seeds": [2, 3], "load": folder})
    whole, first, rest = run_ranks(world, "in_turn", jobs=[("train", {"path": tiny_model} | way) for way in ways])
    assert not torch.equal(first["params"]["model.norm.weight"], whole["params"]["model.norm.weight"])
    assert_equal(rest["params"], whole["params"])
    assert rest["lr"] == whole["lr"]
    assert torch.equal(rest["noise"], whole["noise"])


def test_any_number_of_ranks_goes_on_from_what_any_number_wrote(tiny_model, run_ranks, tmp_path):
    """Saved by 2 ranks; 1, 4 and 2 x 2 ranks have the same losses afterwards, and what those save is the same again."""
    folder = str(tmp_path / "two")
    args = {"path": tiny_model, "lr": 1e-3}
    goes_on = args | {"seeds": [2, 3], "load": folder}
    first = args | {"seeds": [0, 1], "save_to": folder}
    saved, expected = run_ranks(2, "in_turn", jobs=[("train", first), ("train", goes_on)])
    assert expected["losses"][0] != pytest.approx(saved["losses"][0], rel=1e-2)
    one, four, hsdp = (goes_on | {"save_to": str(tmp_path / name)} for name in ("one", "four", "hsdp"))
    results = {"one": run_ranks(1, "train", **one)}
    results["four"], results["hsdp"] = run_ranks(
        4, "in_turn", jobs=[("train", four), ("train", hsdp | {"fsdp_size": 2})]
    )
    for name, loaded in results.items():
        assert loaded["losses"] == pytest.approx(expected["losses"], rel=1e-5), name
        assert loaded["lr"] == expected["lr"]
        for key in expected["params"]:
            torch.testing.assert_close(loaded["params"][key], expected["params"][key], rtol=1e-4, atol=1e-4)
        with ShardReader(tmp_path / name / "model") as reader:
            for key, value in loaded["params"].items():
                assert torch.equal(reader.read(key, 0, len(value)), value), (name, key)
    # Replicas of the 2 x 2 mesh write nothing twice.
    assert len(list((tmp_path / "hsdp" / "model").glob("rank_*"))) == 2
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pkl", ".bin")]


@pytest.fixture
def engine(single_process_group, tiny_model):
    return build(tiny_model, optimizer="AdamW", contents=("model", "optimizer", "extra", "hf_model"))


def rounded(module):
    """The transformers model that is trained, with its weights as they are exported, in bfloat16."""
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(param.bfloat16().float())
    return module.hf_model


@pytest.mark.parametrize("tied", [True, False])
def test_the_exported_folder_gives_the_same_logits(single_process_group, tiny_model, untied_model, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine = build(tiny_model if tied else untied_model, contents=("model", "hf_model"), optimizer="AdamW")
    with engine.train_mode():
        engine.train_batch(with_values(make_batch(8)), loss_of(False))
    engine.save_checkpoint(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings is tied
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        head = rounded(engine.module).get_output_embeddings().weight
        reference = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        reference.load_state_dict(full_params(engine), strict=not tied)
        expected = reference.eval()(ids).logits
        assert torch.equal(loaded.float()(ids).logits, expected)
    with safe_open(tmp_path / "huggingface" / "model.safetensors", framework="pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied
    assert torch.equal(loaded.get_output_embeddings().weight, head)
    assert AutoTokenizer.from_pretrained(tmp_path / "huggingface").encode("w7 w8") == [7, 8]


def test_the_exported_critic_gives_the_same_values(single_process_group, tiny_model, tmp_path):
    from transformers import AutoModelForTokenClassification

    engine = build(tiny_model, critic=True, contents=("model", "hf_model"), optimizer="AdamW", lr=1e-2)
    data = with_values(make_batch(4, group=1, min_r=9))
    with engine.train_mode():
        engine.train_batch(data, loss_of(True))
    engine.save_checkpoint(str(tmp_path))
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path / "huggingface").float().eval()
    rounded(engine.module)
    with engine.eval_mode():
        values = engine.infer_batch(data)["model_output"]["values"].unbind()
    for row in range(3):
        ids, prompt = data["input_ids"].unbind()[row], len(data["prompts"].unbind()[row])
        with torch.no_grad():
            expected = loaded(ids[None]).logits[0, prompt - 1 : -1, 0]
        torch.testing.assert_close(values[row], expected, rtol=1e-4, atol=1e-5)


def test_export_in_several_files(engine, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    from rlflow.workers.engine.fsdp import export

    monkeypatch.setattr(export, "SHARD_BYTES", 50_000)
    engine.save_checkpoint(str(tmp_path))
    assert len(list((tmp_path / "huggingface").glob("model-*-of-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    expected = full_params(engine)
    assert torch.equal(model.model.norm.weight, expected["model.norm.weight"].bfloat16())


def test_names_are_those_of_transformers_and_a_tied_weight_comes_once(engine, tiny_model):
    with safe_open(f"{tiny_model}/model.safetensors", framework="pt") as file:
        on_disk = {name: file.get_tensor(name) for name in file.keys()}
    assert_equal(full_params(engine), on_disk)


def test_weights_always_come_with_config_and_tokenizer(single_process_group, tiny_model, tmp_path):
    engine = build(tiny_model)
    engine.save_checkpoint(str(tmp_path))
    files = {p.name for p in (tmp_path / "huggingface").iterdir()}
    assert {"config.json", "tokenizer.json"} <= files
    assert not [name for name in files if name.endswith(".safetensors")]


def test_a_folder_of_something_else_is_refused(engine, untied_model, tmp_path):
    with pytest.raises(CheckpointError, match=r"meta\.json"):
        engine.load_checkpoint(str(tmp_path))
    build(untied_model, optimizer="AdamW").save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        engine.load_checkpoint(str(tmp_path))


def test_missing_contents_and_files_are_named(engine, tiny_model, tmp_path):
    build(tiny_model, optimizer="AdamW", contents=("model",)).save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="load_contents"):
        engine.load_checkpoint(str(tmp_path))
    engine.save_checkpoint(str(tmp_path))
    index = tmp_path / "model" / "index.json"
    content = json.loads(index.read_text())
    content["tensors"]["model.norm.weight"]["pieces"] = []
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        engine.load_checkpoint(str(tmp_path))


def test_another_optimizer_is_refused(engine, tiny_model, tmp_path):
    build(tiny_model).save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="SGD"):
        engine.load_checkpoint(str(tmp_path))


def test_a_disk_that_refuses_is_named(engine, tmp_path, monkeypatch):
    from rlflow.checkpoint import shards

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors.*No space"):
        engine.save_checkpoint(str(tmp_path))


def test_a_truncated_file_is_named(engine, tmp_path):
    engine.save_checkpoint(str(tmp_path))
    file = tmp_path / "model" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors"):
        engine.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("options", [{}, {"model": {"lora_rank": 4}, "lora_only": True}], ids=["whole", "adapter"])
def test_a_save_in_the_background_holds_the_state_of_its_moment(single_process_group, tiny_model, tmp_path, options):
    engine = build(tiny_model, optimizer="AdamW", lr=1e-2, async_save=True, **options)

    def step(seed):
        with engine.train_mode():
            engine.train_batch(with_values(make_batch(8, seed)), loss_of(False))
        engine.lr_scheduler_step()

    step(0)
    mark = engine.save_checkpoint(str(tmp_path / "actor"))
    step(1)
    expected = {name: value.clone() for name, value in full_params(engine).items()}
    BackgroundFiles([mark], 60).wait()
    again = build(tiny_model, optimizer="AdamW", lr=1e-2, load=str(tmp_path / "actor"), **options)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(full_params(again)[name], expected[name])
    engine = again
    step(1)
    assert_equal(full_params(again), expected)
    assert not list((tmp_path / "actor").glob(".*"))
