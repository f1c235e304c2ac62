"""A worker's state on disk: exact, readable by any number of ranks, loadable by transformers."""

from __future__ import annotations

import json

import pytest
import torch
from rank_jobs import build, full_params

from rlflow.utils.errors import CheckpointError


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_two_steps_and_two_more_are_four_bit_for_bit(tiny_model, run_ranks, tmp_path, world):
    folder = str(tmp_path / "actor")
    whole = run_ranks(world, "train", path=tiny_model, seeds=[0, 1, 2, 3])
    first = run_ranks(world, "train", path=tiny_model, seeds=[0, 1], save_to=folder)
    rest = run_ranks(world, "train", path=tiny_model, seeds=[2, 3], load=folder)
    assert not torch.equal(first["params"]["model.norm.weight"], whole["params"]["model.norm.weight"])
    assert_equal(rest["params"], whole["params"])
    assert rest["lr"] == whole["lr"]
    assert torch.equal(rest["noise"], whole["noise"])


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (3, 2)])
def test_any_number_of_ranks_loads_what_any_number_wrote(tiny_model, run_ranks, tmp_path, writers, readers):
    folder = str(tmp_path / "actor")
    saved = run_ranks(writers, "train", path=tiny_model, seeds=[] if writers == 3 else [0, 1], save_to=folder)
    loaded = run_ranks(readers, "train", path=tiny_model, seeds=[], load=folder)
    assert_equal(loaded["params"], saved["params"])
    if writers != 3:
        # the optimizer too: two more steps stay together
        expected = run_ranks(writers, "train", path=tiny_model, seeds=[2, 3], load=folder)
        got = run_ranks(readers, "train", path=tiny_model, seeds=[2, 3], load=folder)
        for name in expected["params"]:
            torch.testing.assert_close(got["params"][name], expected["params"][name], rtol=1e-4, atol=1e-4)
    assert not [p for p in (tmp_path / "actor").rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]


@pytest.fixture
def engine(single_process_group, tiny_model):
    return build(tiny_model, optimizer="AdamW", contents=("model", "optimizer", "extra", "hf_model"))


def test_the_exported_folder_gives_the_same_logits(engine, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    engine.save_checkpoint(str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert model.dtype == torch.bfloat16
    expected = full_params(engine)
    for name, value in model.state_dict().items():
        if name in expected:
            assert torch.equal(value, expected[name].bfloat16()), name
    assert AutoTokenizer.from_pretrained(tmp_path / "huggingface").encode("w7 w8") == [7, 8]


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
    from safetensors import safe_open

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
