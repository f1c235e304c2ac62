"""A merged folder is the model that was trained, whoever wrote the shards; a damaged checkpoint is merged by nobody."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlflow.model_merger.merge import MergeOptions, merge
from rlflow.utils.errors import CheckpointError, ConfigError

FP32 = MergeOptions(dtype="float32")


def actor(run: Path) -> Path:
    return run / "global_step_3" / "actor"


def load(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_merged_model_is_the_one_that_was_saved(runs, tiny_models, tmp_path, world, name):
    from transformers import AutoTokenizer

    result = merge(actor(runs[world, name]), tmp_path / "out", FP32)
    original, merged = load(getattr(tiny_models, name)), load(tmp_path / "out")
    assert merged.dtype == torch.float32 and type(merged).__name__ == result.class_name
    expected = original.state_dict()
    assert expected.keys() == merged.state_dict().keys()
    for key, value in merged.state_dict().items():
        assert torch.equal(value, expected[key]), key
    shared = merged.get_input_embeddings().weight.data_ptr() == merged.get_output_embeddings().weight.data_ptr()
    assert shared == (name == "tied")
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (name == "untied")
    tokens = torch.arange(40).reshape(2, 20)
    assert torch.equal(merged(tokens).logits, original(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+1") == AutoTokenizer.from_pretrained(
        getattr(tiny_models, name)
    ).encode("1+1")
    assert merged.generation_config.eos_token_id == original.generation_config.eos_token_id


def test_the_default_is_bfloat16_in_weights_and_config(runs, tmp_path):
    result = merge(actor(runs[2, "tied"]), tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert load(tmp_path / "out").dtype == torch.bfloat16
    assert result.nbytes == sum(value.nbytes for value in weights.values())
    assert str(result).startswith(f"{tmp_path / 'out'}: LlamaForCausalLM, {len(weights)} tensors in 1 file, ")


@pytest.mark.parametrize("world", [1, 2])
def test_the_engine_exports_what_a_merge_gives(runs, tmp_path, world):
    merge(actor(runs[world, "untied"]), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    exported = load_file(actor(runs[world, "untied"]) / "huggingface" / "model.safetensors")
    assert merged.keys() == exported.keys()
    for name, value in exported.items():
        assert value.dtype == torch.bfloat16 and torch.equal(merged[name], value), name


def test_several_files_with_an_index(runs, tiny_models, tmp_path):
    limit = 60_000
    result = merge(actor(runs[2, "untied"]), tmp_path / "out", MergeOptions(dtype="float32", max_file_bytes=limit))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == result.files > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result.nbytes
    for file in files:
        tensors = load_file(tmp_path / "out" / file)
        assert sorted(tensors) == sorted(name for name, home in index["weight_map"].items() if home == file)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= limit
    expected = load(tiny_models.untied).state_dict()
    for key, value in load(tmp_path / "out").state_dict().items():
        assert torch.equal(value, expected[key]), key


def test_a_model_larger_than_a_block_is_read_in_blocks(runs, tiny_models, tmp_path, monkeypatch):
    """No tensor of the checkpoint is ever whole in memory when it is larger than a block."""
    from rlflow.checkpoint.shards import ShardReader

    monkeypatch.setattr("rlflow.model_merger.merge.BLOCK_BYTES", 5000)
    sizes: list[int] = []
    read = ShardReader.read

    def recorded(self, *args):
        block = read(self, *args)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(ShardReader, "read", recorded)
    merge(actor(runs[2, "tied"]), tmp_path / "out", FP32)
    assert max(sizes) <= 5000 < load(tiny_models.tied).get_input_embeddings().weight.nbytes
    assert sum(sizes) == sum(v.nbytes for v in load_file(tmp_path / "out" / "model.safetensors").values())


@pytest.mark.parametrize("world", [1, 2])
def test_a_critic_becomes_a_token_classifier_with_one_label(runs, tiny_models, tmp_path, world):
    from transformers import AutoModelForTokenClassification

    result = merge(runs[world, "tied"] / "global_step_3" / "critic", tmp_path / "out", FP32)
    assert result.class_name == "LlamaForTokenClassification"
    model, info = AutoModelForTokenClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.config.num_labels == 1 and not info["missing_keys"] and not info["unexpected_keys"]
    assert model(torch.arange(6)[None]).logits.shape == (1, 6, 1)
    assert torch.equal(model.model.norm.weight, load(tiny_models.tied).model.norm.weight)


# --- what is refused ---


def test_heads_are_not_mixed_up(runs, tmp_path):
    with pytest.raises(CheckpointError, match=r"score\.\w+.*add --is-value-model"):
        merge(runs[1, "tied"] / "global_step_3" / "critic", tmp_path / "out", MergeOptions(value_model=False))
    with pytest.raises(CheckpointError, match="leave --is-value-model out"):
        merge(actor(runs[1, "untied"]), tmp_path / "out", MergeOptions(value_model=True))
    assert not list(tmp_path.iterdir())


def test_tying_is_refused_when_it_would_change_the_model(runs, tmp_path):
    tie = MergeOptions(tie_word_embedding=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight, which differs"):
        merge(actor(runs[1, "untied"]), tmp_path / "out", tie)
    merge(actor(runs[1, "tied"]), tmp_path / "out", tie)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_equal_embeddings_are_tied_when_asked_for(run_copy, tmp_path):
    """A run that trained an untied model with equal weights: the head is left out and the config says tied."""
    from safetensors.torch import save_file

    from rlflow.checkpoint import write_manifest

    model = actor(run_copy) / "model"
    index = json.loads((model / "index.json").read_text())
    index["tensors"]["lm_head.weight"] = index["tensors"]["model.embed_tokens.weight"]
    (model / "index.json").write_text(json.dumps(index))
    for piece in index["tensors"]["lm_head.weight"]["pieces"]:
        tensors = load_file(model / piece["file"])
        save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, model / piece["file"])
    config = actor(run_copy) / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    write_manifest(run_copy / "global_step_3")
    merge(actor(run_copy), tmp_path / "untied")
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")
    merge(actor(run_copy), tmp_path / "tied", MergeOptions(tie_word_embedding=True))
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    tokens = torch.arange(12)[None]
    assert torch.equal(load(tmp_path / "tied")(tokens).logits, load(tmp_path / "untied")(tokens).logits)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (flip_a_byte, "its content changed"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:20]), "has 20 bytes"),
    "missing": (Path.unlink, "missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["model/rank_00001.safetensors", "model/index.json", "huggingface/config.json"])
def test_damage_is_named_and_nothing_is_written(run_copy, tmp_path, damage, file):
    act, message = DAMAGES[damage]
    act(actor(run_copy) / file)
    with pytest.raises(CheckpointError, match=f"{file}: .*{message}"):
        merge(actor(run_copy), tmp_path / "deep" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_damage_that_no_manifest_shows_leaves_nothing_either(run_copy, tmp_path, caplog):
    alone = tmp_path / "copied"
    actor(run_copy).rename(alone)
    merge(alone, tmp_path / "whole")
    assert "stands alone" in caplog.text
    shard = alone / "model" / "rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"rank_00001\.safetensors"):
        merge(alone, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied", "run", "whole"]


def test_a_step_without_a_manifest_is_no_checkpoint(run_copy, tmp_path):
    (run_copy / "global_step_3" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json: missing"):
        merge(actor(run_copy), tmp_path / "out")


def test_other_steps_are_proposed(run_copy, tmp_path):
    (run_copy / "global_step_1").mkdir()
    (actor(run_copy) / "meta.json").unlink()
    with pytest.raises(CheckpointError, match=r"meta\.json: missing.*Other steps of this run: 1"):
        merge(actor(run_copy), tmp_path / "out")


def test_only_an_empty_target_is_taken(runs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    merge(actor(runs[1, "tied"]), out)
    before = (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="not empty.*--overwrite"):
        merge(actor(runs[1, "tied"]), out)
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    (out / "old_file").touch()
    merge(actor(runs[1, "untied"]), out, MergeOptions(overwrite=True))
    assert not (out / "old_file").exists()
    assert load(out).config.model_type == "qwen3"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_spares_what_is_no_model(runs, tmp_path):
    (tmp_path / "home" / "photos").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        merge(actor(runs[1, "tied"]), tmp_path / "home", MergeOptions(overwrite=True))
    assert (tmp_path / "home" / "photos").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        merge(actor(runs[1, "tied"]), tmp_path / "file", MergeOptions(overwrite=True))


@pytest.mark.parametrize("inside", ["global_step_3/actor/huggingface", "global_step_3", "global_step_3/hf", "."])
def test_the_checkpoint_itself_is_never_a_target(run_copy, inside):
    before = sorted(run_copy.rglob("*"))
    with pytest.raises(ConfigError, match="within each other"):
        merge(actor(run_copy), run_copy / inside, MergeOptions(overwrite=True))
    assert sorted(run_copy.rglob("*")) == before


def test_a_disk_that_refuses_leaves_nothing(runs, tmp_path, monkeypatch):
    from rlflow.checkpoint import hf_weights

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights, "_header", full)
    with pytest.raises(CheckpointError, match=r"model\.safetensors was not written: .*No space"):
        merge(actor(runs[1, "tied"]), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_unusable_dtype(runs, tmp_path):
    with pytest.raises(ConfigError, match="bfloat16, float32"):
        merge(actor(runs[1, "tied"]), tmp_path / "out", MergeOptions(dtype="int8"))
